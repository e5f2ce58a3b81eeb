"""Launches of a layer's decode step, counted without a GPU: what XLA makes of it for an H200.

XLA's compiler needs JAX's CUDA plugin and NVIDIA's ptxas and libdevice, but no GPU and no driver:
`pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm`, with the
versions of the installed JAX (0.11 or later). Every kernel, fusion and copy that the compiled
program's entry holds is one launch; constants, bitcasts, tuples and copies of empty arrays (caches
of drafts that these layers do not have) are none.

Layers are those of `layers_gpu.py`. What depends on the batch alone (window and page indices,
cosines and sines) is counted in each layer here, while a model's step computes it once.
"""

import argparse
import collections
import re

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding
from layers_gpu import KINDS, STEPS, decode_batch, six_layers, start_carry

from ds41jax.kernels.compute import Compute, Kernels
from ds41jax.model import backbone, text_layer
from ds41jax.model.params import param_specs
from ds41jax.model.state import CacheShape, init_state
from ds41jax.model.tensors import TensorSpec

# The H200's numbers, as XLA's `GpuTargetConfigProto`.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
LAUNCHES = "fusion|custom-call|copy|scatter|gather|reduce|sort|while|conditional|all-reduce"


def compiled_layer(index: int, rows: int, sequences: int, context: int) -> str:
    """The optimised program of a layer's decode step, as XLA's text."""
    config, compute = six_layers(), Compute(kernels=Kernels.PALLAS)
    (device,) = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices
    place = SingleDeviceSharding(device)
    is_spec = lambda leaf: isinstance(leaf, TensorSpec)  # noqa: E731
    params = jax.tree.map(lambda s: s.abstract(), param_specs(config), is_leaf=is_spec)
    batch = decode_batch(rows, sequences, context, config)
    pages = CacheShape(sequences, int(batch.page_tables.size))
    carry = jax.eval_shape(
        lambda: start_carry(batch, init_state(config, pages, compute), config, compute)
    )
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (carry, params, batch)
    )

    def step(carry: backbone.Carry, params: object, batch: object) -> backbone.Carry:
        return text_layer.layer(carry, index, params, batch, config, compute)

    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step, donate_argnums=0, out_shardings=place).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()


def launches(program: str) -> list[tuple[str, str, str]]:
    """(operation, kernel's or instruction's name, result) of every launch, in their order."""
    entry = program[program.index("\nENTRY") :]
    pattern = rf"^\s+(?:ROOT )?%?(\S+) = (.*?)\s({LAUNCHES})(?:-start)?\((.*)$"
    found = []
    for name, result, operation, rest in re.findall(pattern, entry, re.MULTILINE):
        if re.search(r"\[(\d+,)*0[,\]]", result):
            continue
        kernel = re.search(r'\bname = "(\w+)"', rest)
        found.append((operation, kernel.group(1) if kernel else name, result))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 96])
    parser.add_argument("--layers", type=int, nargs="+", default=list(range(len(KINDS))))
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--names", action="store_true", help="every launch, in order")
    options = parser.parse_args()
    for rows, sequences in STEPS:
        for index in options.layers if rows in options.rows else ():
            found = launches(compiled_layer(index, rows, sequences, options.context))
            kinds = dict(collections.Counter(operation for operation, *_ in found))
            print(f"{KINDS[index]:18} {rows:3} rows {len(found):4} launches {kinds}", flush=True)
            for operation, name, result in found if options.names else ():
                print(f"    {operation:12} {name:20} {result[:100]}")


if __name__ == "__main__":
    main()
