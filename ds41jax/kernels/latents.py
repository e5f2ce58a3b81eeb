"""What attention makes of its low-rank products: the query's latent, and the row that is stored.

The parts of both products are added up, normalised and quantised, and the row is rotated, by one
kernel with one program for each.

Letters: T rows, P parts of a sum, Q columns of the query's latent, D head width, R rotary pairs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats import Format, QuantizedArray
from ds41jax.formats.quantized import E4M3_MAX, decode_e8m0
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.norm import rms_norm
from ds41jax.kernels.quantize import Input, Prepared, rounded_groups, scale_codes, store_planes
from ds41jax.kernels.rotation import Turn, load_turn, turn, turn_pairs

WARPS = 8


def latents(
    parts: tuple[jax.Array, ...],
    norms: tuple[jax.Array, jax.Array],
    angles: Turn,
    eps: float,
    compute: Compute,
) -> tuple[Input, QuantizedArray]:
    """The query's latent [T, Q] and the stored row, FP8_GROUP [T, D].

    Args:
      parts: [P, T, Q] and [P, T, D] of the two products; their sums are rounded.
      norms: [Q] and [D].
    """
    if compute.on_gpu:
        return _on_gpu(parts, norms, angles, eps, compute)
    whole = [compute.round(gpu.add_parts(p)) for p in parts]
    latent, row = (rms_norm(x, w, eps, compute) for x, w in zip(whole, norms, strict=True))
    row = turn(row, angles.cos, angles.sin, compute)
    stored = compute.quantize(row, Format.FP8_GROUP)
    assert isinstance(stored, QuantizedArray)
    return latent, stored


def _on_gpu(
    parts: tuple[jax.Array, ...],
    norms: tuple[jax.Array, jax.Array],
    angles: Turn,
    eps: float,
    compute: Compute,
) -> tuple[Prepared, QuantizedArray]:
    (_, t, q), d = parts[0].shape, parts[1].shape[-1]
    shapes = (
        jax.ShapeDtypeStruct((t, q), jnp.bfloat16),
        jax.ShapeDtypeStruct((t, 2, q // 2), jnp.bfloat16),
        jax.ShapeDtypeStruct((t, d), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((t, d // 32), jnp.uint8),
    )
    kernel = functools.partial(_kernel, eps=eps, compute=compute)
    run = gpu.call(kernel, compute, (t, 2), shapes, warps=WARPS, stages=1, name="latents")
    weights = [a for w in norms for a in gpu.entry(w)]
    latent, planes, codes, scales = run(*parts, *weights, angles.cos, angles.sin)
    return Prepared(latent, {2: planes}), QuantizedArray(codes, scales, format=Format.FP8_GROUP)


def _kernel(
    query_ref: Any,  # [P, T, Q]
    row_ref: Any,  # [P, T, D]
    query_layer: Any,
    query_norm: Any,  # [L, Q]
    row_layer: Any,
    row_norm: Any,  # [L, D]
    cos_ref: Any,  # [T, R]
    sin_ref: Any,
    latent_ref: Any,  # [T, Q]
    planes_ref: Any,  # [T, 2, Q / 2]
    codes_ref: Any,  # [T, D]
    scales_ref: Any,  # [T, D / 32]
    *,
    eps: float,
    compute: Compute,
) -> None:
    at = pl.program_id(0)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        columns = latent_ref.shape[1]
        column = jnp.arange(pl.next_power_of_2(columns))
        live = column < columns
        safe = jnp.where(live, column, 0)
        x = _whole(query_ref, at, safe, live, compute)
        scale = lax.rsqrt(jnp.sum(x * x) / columns + eps)
        x = gpu.rounded(_load(query_norm, (query_layer[0],), safe, live) * (x * scale), compute)
        triton.store(latent_ref.at[at, column], x.astype(jnp.bfloat16), mask=live)
        store_planes(planes_ref, at, column, rounded_groups(x), live)

    @pl.when(pl.program_id(1) == 1)
    def _() -> None:
        columns = codes_ref.shape[1]
        pair = jnp.arange(columns // 2)
        halves = [_whole(row_ref, at, 2 * pair + odd, None, compute) for odd in range(2)]
        total = jnp.sum(gpu.add_parts([x * x for x in halves]))
        scale = lax.rsqrt(total / columns + eps)
        weights = [_load(row_norm, (row_layer[0],), 2 * pair + odd, None) for odd in range(2)]
        even, odd = (
            gpu.rounded(w * (x * scale), compute) for w, x in zip(weights, halves, strict=True)
        )
        cos, sin = load_turn(cos_ref, sin_ref, at, pair, columns // 2)
        pairs = [x.reshape(-1, 16) for x in turn_pairs(even, odd, cos, sin, compute)]
        sizes = jnp.maximum(*(jnp.max(jnp.abs(x), axis=1) for x in pairs))
        codes = scale_codes(sizes)
        scales_ref[at, :] = codes
        for half, x in enumerate(pairs):
            scaled = jnp.clip(x / decode_e8m0(codes)[:, None], -E4M3_MAX, E4M3_MAX)
            stored = scaled.astype(jnp.float8_e4m3fn).reshape(columns // 2)
            triton.store(codes_ref.at[at, 2 * pair + half], stored)


def _load(ref: Any, lead: tuple[Any, ...], column: jax.Array, live: Any) -> jax.Array:
    other = None if live is None else 0.0
    return triton.load(ref.at[(*lead, column)], mask=live, other=other).astype(jnp.float32)


def _whole(ref: Any, row: Any, column: jax.Array, live: Any, compute: Compute) -> jax.Array:
    """Columns of a row of a sum of parts, rounded."""
    parts = [_load(ref, (p, row), column, live) for p in range(ref.shape[0])]
    return gpu.rounded(gpu.add_parts(parts), compute)
