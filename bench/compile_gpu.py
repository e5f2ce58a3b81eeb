"""Machine code of the GPU kernels without a GPU: registers, shared memory, matrix units, stores.

Takes the Triton IR that Pallas emits and compiles it with the `triton` package (no torch needed),
for sm_90 and sm_120. XLA carries a Triton of its own, so this is near the truth, not the truth. It
needs JAX 0.11 or later and reaches into JAX's private lowering.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax._src.pallas.triton.lowering as pallas_lowering
import jax.numpy as jnp
import triton
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from triton.backends.compiler import GPUTarget

from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels.compute import Compute, Kernels, Phase
from ds41jax.kernels.experts import routed_experts
from ds41jax.kernels.index_select import PagedKeys, best_rows, paged_index_scores
from ds41jax.kernels.linear import quantized_linear
from ds41jax.kernels.mixes import split_mixes
from ds41jax.kernels.sparse_attention import RingAndStep, sparse_attention

DEVICES = {
    90: ("NVIDIA H200", 132),
    120: ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188),
}
SHARED_LIMIT = {90: 227 << 10, 120: 99 << 10}
S = jax.ShapeDtypeStruct


def quantized(format: Format, *shape: int, stacked: bool = True) -> QuantizedArray:
    """The shapes of a weight or cache."""
    *lead, rows, columns = shape
    packed = columns // 2 if format.packed else columns
    codes = S((*lead, rows, packed), jnp.uint8 if format.packed else jnp.float8_e4m3fn)
    scale_rows = rows // 32 if format is Format.FP8_BLOCK else rows
    dtype = jnp.float8_e4m3fn if format is Format.KV_FP4 else jnp.uint8
    scales = S((*lead, scale_rows, columns // format.group), dtype)
    return QuantizedArray(codes, scales, S((), jnp.int32) if stacked else None, format=format)


def operations(rows: int, compute: Compute) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Functions and the shapes of their arguments, in the official geometry."""
    x = S((rows, 5120), jnp.bfloat16)
    experts = [quantized(Format.MXFP4, 2, 384, *s) for s in ((2304, 5120), (5120, 2304))]
    yield (
        lambda x, i, w, a, b: routed_experts(x, i, w, (a, b, a), 10.0, compute),
        (x, S((rows, 6), jnp.int32), S((rows, 6), jnp.float32), *experts),
    )
    dense = quantized(Format.FP8_BLOCK, 2, 1280, 5120)
    yield lambda x, w: quantized_linear(x, w, compute), (x, dense)
    ring = quantized(Format.FP8_GROUP, 2, 16, 256, 512)
    step = quantized(Format.FP8_GROUP, rows, 512, stacked=False)
    pages = quantized(Format.KV_FP4, 1 << 16, 512, stacked=False)
    index = [S((rows, n), jnp.int32) for n in (128, 512)]
    yield (
        lambda q, sink, ring, slots, step, i, pages, j: sparse_attention(
            q, ((RingAndStep(ring, slots, step), i), (pages, j)), sink, 0.04, compute
        ),
        (
            S((rows, 64, 512), jnp.bfloat16),
            S((64,), jnp.float32),
            ring,
            S((16,), jnp.int32),
            step,
            index[0],
            pages,
            index[1],
        ),
    )
    keys = PagedKeys(
        quantized(Format.MXFP4, 4096, 256, 128, stacked=False), S((16, 256), jnp.int32)
    )
    row, heads = S((rows,), jnp.int32), (rows, 32)
    yield (
        lambda q, w, k, s, v: paged_index_scores(q, w, k, s, v, compute),
        (S((*heads, 128), jnp.bfloat16), S(heads, jnp.float32), keys, row, row),
    )
    yield lambda s: best_rows(s, 512, compute), (S((rows, 1 << 16), jnp.float32),)
    yield (
        lambda m, b, s: split_mixes(m, b, s, 4, 20, 1e-6, compute),
        (S((rows, 24), jnp.float32), S((24,), jnp.float32), S((3,), jnp.float32)),
    )


def triton_modules(run: Any, args: tuple[Any, ...], arch: int) -> list[tuple[str, str, int, int]]:
    """(name, Triton IR, warps, stages) of every kernel that `run` launches."""
    emitted: list[str] = []
    lower = pallas_lowering.lower_jaxpr_to_triton_module

    def record(*args: Any, **kwargs: Any) -> Any:
        result = lower(*args, **kwargs)
        emitted.append(str(result.module))
        return result

    kind, cores = DEVICES[arch]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with (
        mock.patch.object(pallas_lowering, "lower_jaxpr_to_triton_module", record),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'name = "(\w+)", num_stages = (\d+) : i32, num_warps = (\d+)', text)
    return [(n, ir, int(w), int(s)) for (n, s, w), ir in zip(found, emitted, strict=True)]


def compile_kernel(ir: str, arch: int, warps: int, stages: int) -> str:
    """One line on the machine code of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttir"
        source.write_text(ir)
        options = {"num_warps": warps, "num_stages": stages}
        kernel = triton.compile(str(source), target=GPUTarget("cuda", arch, 32), options=options)
        code = Path(folder) / "kernel.cubin"
        code.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run(
            [tool, "--dump-resource-usage", code], capture_output=True, text=True, check=True
        ).stdout
    ptx = kernel.asm["ptx"]
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()  # type: ignore[union-attr]
    shared = kernel.metadata.shared
    fits = "" if shared <= SHARED_LIMIT[arch] else "  TOO MUCH SHARED MEMORY"
    return (
        f"{registers:>4} registers {stack:>4} stack {shared:>7} shared "
        f"{ptx.count('wgmma.mma_async'):>4} wgmma {ptx.count('mma.sync'):>4} mma.sync "
        f"{len(re.findall(r'st.global', ptx)):>4} stores{fits}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    options = parser.parse_args()
    for arch in options.arch:
        for phase, rows in ((Phase.DECODE, 1), (Phase.DECODE, 96), (Phase.PREFILL, 2048)):
            for run, args in operations(rows, Compute(kernels=Kernels.PALLAS, phase=phase)):
                for name, ir, warps, stages in triton_modules(run, args, arch):
                    line = compile_kernel(ir, arch, warps, stages)
                    print(f"sm_{arch} {phase.value:8} {rows:5} {name:17} {line}", flush=True)


if __name__ == "__main__":
    main()
