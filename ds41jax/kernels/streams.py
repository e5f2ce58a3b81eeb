"""Residual streams: collapsed to a sub-layer's input, and what a sub-layer writes back to them.

Between two sub-layers a row is added up, written back, collapsed, normalised and quantised. Each
alone is a kernel of one or two microseconds that waits for the one before; here a row is one
program that keeps all its columns in registers.

Letters: T rows, S streams, D hidden size, P parts of a sum.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.norm import mean_square, rms_norm
from ds41jax.kernels.quantize import Input, Prepared, rounded_groups, store_planes

WARPS = 16  # a row of 5,120 columns is 16 a thread


def collapse(stream: jax.Array, pre: jax.Array, compute: Compute) -> jax.Array:
    """Streams [T, S, D] weighted by pre [T, S] to the sub-layer's input [T, D]."""
    terms = pre[..., None] * stream.astype(jnp.float32)
    return compute.round(_sum_in_order(terms, axis=1))


def expand(
    output: jax.Array, stream: jax.Array, post: jax.Array, comb: jax.Array, compute: Compute
) -> jax.Array:
    """Writes an output [T, D] back: stream k = post[k] * output + sum_j comb[j, k] * stream j."""
    terms = comb[..., None] * stream.astype(jnp.float32)[:, :, None, :]
    mixed = _sum_in_order(terms, axis=1)
    return compute.round(post[..., None] * output.astype(jnp.float32)[:, None, :] + mixed)


def _sum_in_order(x: jax.Array, axis: int) -> jax.Array:
    total, *rest = jnp.moveaxis(x, axis, 0)
    for term in rest:
        total = total + term
    return total


def enter(
    stream: jax.Array,
    pre: jax.Array,
    weight: jax.Array,
    eps: float,
    planes: tuple[int, ...],
    compute: Compute,
) -> tuple[Input, jax.Array]:
    """Collapses streams [T, S, D] by pre [T, S] and normalises by weight [D].

    Returns:
      The sub-layer's input [T, D], on a GPU with its `planes`; and the streams' mean square [T].
    """
    if compute.on_gpu:
        made = _run(stream, pre, weight, eps, planes, (), compute)
        return made[1], made[2]
    x = rms_norm(collapse(stream, pre, compute), weight, eps, compute)
    return x, mean_square(stream.reshape(stream.shape[0], -1), compute)[:, 0]


def leave_and_enter(
    parts: jax.Array,
    stream: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    weight: jax.Array,
    eps: float,
    planes: tuple[int, ...],
    compute: Compute,
) -> tuple[jax.Array, Input, jax.Array]:
    """Writes a sub-layer's output back, and then `enter` of the next.

    Args:
      parts: [P, T, D] of the output; their sum is rounded.

    Returns:
      The streams after the first sub-layer, and what `enter` returns.
    """
    if compute.on_gpu:
        return _run(stream, pre, weight, eps, planes, (parts, post, comb), compute)
    stream = expand(compute.round(gpu.add_parts(parts)), stream, post, comb, compute)
    return stream, *enter(stream, pre, weight, eps, planes, compute)


@dataclass(frozen=True)
class _Row:
    """Static numbers of a row."""

    streams: int
    columns: int
    eps: float
    planes: tuple[int, ...]


def _run(
    stream: jax.Array,
    pre: jax.Array,
    weight: jax.Array,
    eps: float,
    planes: tuple[int, ...],
    written: tuple[jax.Array, ...],
    compute: Compute,
) -> tuple[jax.Array, Prepared, jax.Array]:
    """The streams, the input and the mean square; `written` are parts, post and comb, if any."""
    t, s, d = stream.shape
    row = _Row(s, d, eps, planes)
    shapes = [jax.ShapeDtypeStruct((t, d), jnp.bfloat16), jax.ShapeDtypeStruct((t,), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((t, n, d // n), jnp.bfloat16) for n in row.planes]
    if written:
        shapes.append(jax.ShapeDtypeStruct(stream.shape, jnp.bfloat16))
    kernel = functools.partial(_kernel, row=row, parts=len(written), compute=compute)
    name = "leave_and_enter" if written else "enter"
    run = gpu.call(kernel, compute, (t,), shapes, warps=WARPS, stages=1, name=name)
    x, square, *rest = run(stream, pre, *gpu.entry(weight), *written)
    made = Prepared(x, dict(zip(planes, rest, strict=False)))
    return rest[-1] if written else stream, made, square


def _kernel(
    stream_ref: Any,  # [T, S, D]
    pre_ref: Any,  # [T, S]
    layer_ref: Any,
    weight_ref: Any,  # [L, D]
    *refs: Any,  # parts [P, T, D], post [T, S] and comb [T, S, S], if any; then the outputs
    row: _Row,
    parts: int,
    compute: Compute,
) -> None:
    written, (x_ref, square_ref, *out_refs) = refs[:parts], refs[parts:]
    at, s, d = pl.program_id(0), range(row.streams), row.columns
    column = jnp.arange(pl.next_power_of_2(d))
    live = column < d
    safe = jnp.where(live, column, 0)

    def load(ref: Any, *lead: Any) -> jax.Array:
        return triton.load(ref.at[(*lead, safe)], mask=live, other=0.0).astype(jnp.float32)

    streams = [load(stream_ref, at, k) for k in s]
    if written:
        parts_ref, post_ref, comb_ref = written
        output = gpu.add_parts([load(parts_ref, p, at) for p in range(parts_ref.shape[0])])
        output = gpu.rounded(output, compute)
        mixed = [gpu.add_parts([comb_ref[at, j, k] * streams[j] for j in s]) for k in s]
        streams = [gpu.rounded(post_ref[at, k] * output + mixed[k], compute) for k in s]
        for k in s:
            triton.store(out_refs[-1].at[at, k, column], streams[k].astype(jnp.bfloat16), mask=live)
    squares = gpu.add_parts([k * k for k in streams])
    square_ref[at] = jnp.sum(squares) / (row.streams * d)
    x = gpu.rounded(gpu.add_parts([pre_ref[at, k] * streams[k] for k in s]), compute)
    scale = lax.rsqrt(jnp.sum(x * x) / d + row.eps)
    x = gpu.rounded(load(weight_ref, layer_ref[0]) * (x * scale), compute)
    triton.store(x_ref.at[at, column], x.astype(jnp.bfloat16), mask=live)
    exact = rounded_groups(x)
    for ref in out_refs[: len(row.planes)]:
        store_planes(ref, at, column, exact, live)
