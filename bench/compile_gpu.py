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
from ds41jax.kernels.experts import expert_mlp, routed_experts
from ds41jax.kernels.flash_decode import RingAndStep
from ds41jax.kernels.index_select import PagedKeys, best_rows, paged_index_scores
from ds41jax.kernels.latents import latents
from ds41jax.kernels.linear import quantized_linear, quantized_parts
from ds41jax.kernels.mixes import finish_mixes
from ds41jax.kernels.rotation import Turn
from ds41jax.kernels.routing import choose_of_parts
from ds41jax.kernels.sparse_attention import rotated_attention
from ds41jax.kernels.store import store_rows
from ds41jax.kernels.streams import enter, leave_and_enter

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
    angles = Turn(*[S((rows, 32), jnp.float32)] * 2)
    ring = quantized(Format.FP8_GROUP, 2, 16, 256, 512)
    step = quantized(Format.FP8_GROUP, rows, 512, stacked=False)
    pages = quantized(Format.KV_FP4, 1 << 16, 512, stacked=False)
    index = [S((rows, n), jnp.int32) for n in (128, 512)]
    yield (
        lambda q, t, sink, ring, slots, step, i, pages, j: rotated_attention(
            q, t, ((RingAndStep(ring, slots, step), i), (pages, j)), sink, 0.04, 8, compute
        ),
        (
            S((rows, 64, 512), jnp.bfloat16),
            angles,
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
    yield from between_products(rows, compute)


def between_products(rows: int, compute: Compute) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The kernels that stand between two products, and products that share a launch."""
    f32, bf16 = jnp.float32, jnp.bfloat16
    decode = compute.phase is Phase.DECODE
    parts = lambda count, n: S((count if decode else 1, rows, n), f32)  # noqa: E731
    stream, pre, norm = S((rows, 4, 5120), bf16), S((rows, 4), f32), S((5120,), bf16)
    yield lambda s, p, n: enter(s, p, n, 1e-20, (2,), compute), (stream, pre, norm)
    yield (
        lambda o, s, p, c, n: leave_and_enter(o, s, p, c, p, n, 1e-20, (2, 4), compute),
        (parts(4, 5120), stream, pre, S((rows, 4, 4), f32), norm),
    )
    yield (
        lambda m, s, b, x: finish_mixes(m, s, b, x, 4, 20, 1e-6, 1e-20, compute),
        (parts(64, 24), S((rows,), f32), S((24,), f32), S((3,), f32)),
    )
    low = [quantized(Format.FP8_BLOCK, 2, n, 5120) for n in (1280, 512)]
    yield lambda x, a, b: quantized_parts(x, (a, b), compute), (S((rows, 5120), bf16), *low)
    yield (
        lambda a, b, m, n, t: latents((a, b), (m, n), t, 1e-20, compute),
        (
            *(parts(10, n) for n in (1280, 512)),
            *(S((n,), bf16) for n in (1280, 512)),
            Turn(*[S((rows, 32), f32)] * 2),
        ),
    )
    shared = [quantized(Format.FP8_BLOCK, 2, *s) for s in ((2304, 5120), (5120, 2304))]
    yield (
        lambda x, a, b: expert_mlp(x, (a, b, a), None, 10.0, compute),
        (S((rows, 5120), bf16), *shared),
    )
    yield (
        lambda p, b, i: choose_of_parts(p, (b, b), i, 6, True, 1.5, compute),
        (parts(10, 384), S((384,), f32), S((rows,), jnp.bool_)),
    )
    at = S((rows,), jnp.int32)
    yield (
        lambda r, s, p, x: store_rows(r, 1, s, p, x, compute),
        (
            quantized(Format.FP8_GROUP, 2, 16, 256, 512, stacked=False),
            at,
            at,
            quantized(Format.FP8_GROUP, rows, 512, stacked=False),
        ),
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
    parser.add_argument("--only", nargs="+", help="names of kernels; all by default")
    parser.add_argument("--arch", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    options = parser.parse_args()
    for arch in options.arch:
        for phase, rows in ((Phase.DECODE, 1), (Phase.DECODE, 96), (Phase.PREFILL, 2048)):
            for run, args in operations(rows, Compute(kernels=Kernels.PALLAS, phase=phase)):
                for name, ir, warps, stages in triton_modules(run, args, arch):
                    if options.only and name not in options.only:
                        continue
                    line = compile_kernel(ir, arch, warps, stages)
                    print(f"sm_{arch} {phase.value:8} {rows:5} {name:17} {line}", flush=True)


if __name__ == "__main__":
    main()
