"""Rows of a step written into the sequences' rings, codes and scales by one kernel, in place.

Letters: T rows, L layers, S slots, R rows of a ring, D columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ds41jax.formats import QuantizedArray
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute


def store_rows(
    ring: QuantizedArray,
    layer: jax.Array | int,
    slots: jax.Array,
    places: jax.Array,
    rows: QuantizedArray,
    compute: Compute,
) -> QuantizedArray:
    """`ring` [L, S, R, D] with rows [T, D] at `slots` and `places` [T]; slot S drops a row."""
    if not compute.on_gpu:
        return jax.tree.map(
            lambda store, x: store.at[layer, slots, places].set(x, mode="drop"), ring, rows
        )
    at = jnp.asarray(layer, jnp.int32).reshape(1), slots, places
    stores = ring.codes, ring.scales
    shapes = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in stores)
    aliases = {5: 0, 6: 1}  # the rings, after `at` and the rows
    grid = (slots.shape[0],)
    run = gpu.call(_kernel, compute, grid, shapes, warps=1, name="store_rows", aliases=aliases)
    codes, scales = run(*at, rows.codes, rows.scales, *stores)
    return QuantizedArray(codes, scales, format=ring.format)


def _kernel(
    layer_ref: Any,
    slots_ref: Any,  # [T]
    places_ref: Any,  # [T]
    codes_ref: Any,  # [T, D]
    scales_ref: Any,  # [T, D / 32]
    *refs: Any,  # the rings [L, S, R, D] and their scales, as inputs and as outputs
) -> None:
    row, (ring_codes, ring_scales) = pl.program_id(0), refs[2:]
    slot, place = slots_ref[row], places_ref[row]

    @pl.when(slot < ring_codes.shape[1])
    def _() -> None:
        ring_codes[layer_ref[0], slot, place, :] = codes_ref[row, :]
        ring_scales[layer_ref[0], slot, place, :] = scales_ref[row, :]
