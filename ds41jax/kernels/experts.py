"""Routed experts: MXFP4 gate, up and down products of the rows that chose each expert.

The definition takes one (row, expert) pair at a time, so a pair's result cannot depend on the
others. The kernels take blocks of up to BLOCK_ROWS pairs of one expert: weights are the first
operand of the matrix unit and the pairs its columns, which never mix, so neither can there.

Decoding is bound by the experts' bytes and by the instructions that decode them, about four for
every two codes. Sums are split so that even one row's six experts fill the card.

Letters: T rows, D hidden size, F expert width, E experts, K experts a row, P = T * K pairs.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats import Format, QuantizedArray, values
from ds41jax.kernels import gpu
from ds41jax.kernels.choices import current as current_sizes
from ds41jax.kernels.compute import Compute, Phase
from ds41jax.kernels.expert_plan import BLOCK_ROWS, block_plan, sorted_plan
from ds41jax.kernels.linear import matmul, quantized_linear, quantized_parts
from ds41jax.kernels.quantize import Input, quantized_planes, rounded_groups, store_planes
from ds41jax.kernels.rows import map_rows


@dataclass(frozen=True)
class Tiles:
    """Static sizes of a product: outputs a program, lanes (of 4 codes) a step, parts of the sum."""

    outputs: int
    lanes: int
    splits: int
    warps: int
    stages: int
    rows: int = BLOCK_ROWS

    def fitted(self, n: int, k: int) -> "Tiles":
        """The same, no larger than a matrix [n, k] divides into."""
        lanes = min(self.lanes, (k // 4) & -(k // 4))
        splits = math.gcd(self.splits, k // 4 // lanes)
        return dataclasses.replace(
            self, outputs=min(self.outputs, n & -n), lanes=lanes, splits=splits
        )


ACTIVATION_COLUMNS = 256


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in float32."""
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)


def expert_mlp(
    x: Input,
    matrices: tuple[Any, Any, Any],
    weight: jax.Array | None,
    limit: float,
    compute: Compute,
    rounded: bool = True,
) -> jax.Array:
    """One expert, (gate, down, up) as values, on rows x [..., D].

    `weight` scales the hidden layer before that is quantised. Of a share of the hidden columns the
    output is a part of a sum, and not `rounded`.
    """
    w1, w2, w3 = matrices
    if compute.on_gpu:
        parts = quantized_parts(x, (w1, w3), compute)
        hidden = _activate(parts, weight, limit, 2, compute)
        return matmul(hidden[:, None], w2, compute, rounded)
    gate = quantized_linear(x, w1, compute)
    up = quantized_linear(x, w3, compute)
    hidden = swiglu(gate, up, limit)
    if weight is not None:
        hidden = hidden * weight
    return quantized_linear(compute.round(hidden), w2, compute, rounded)


def routed_experts(
    x: Input,
    expert_ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[QuantizedArray, QuantizedArray, QuantizedArray],
    limit: float,
    compute: Compute,
    rounded: bool = True,
    sparse: bool = False,
) -> jax.Array:
    """Sum over a row's experts, in the order of its choices.

    Args:
      x: [T, D] in the activation dtype.
      expert_ids: [T, K] int32.
      weights: [T, K] float32 routing weights, applied before the down projection.
      matrices: gate [E, F, D], down [E, D, F] and up [E, F, D] in MXFP4; stacks of layers may be
        pointed into (`QuantizedArray.layer`).
      limit: clamp of the SwiGLU inputs.
      rounded: whether each expert's output is rounded before the sum; not if F is a share of the
        hidden columns.
      sparse: whether an id may be -1: a choice that is computed elsewhere and adds nothing here.

    Returns:
      [T, D] float32.
    """
    if compute.on_gpu:
        return _routed_on_gpu(x, expert_ids, weights, matrices, limit, compute, rounded, sparse)
    if compute.differentiable:
        return _all_experts(x, expert_ids, weights, matrices, limit, compute)
    rows, choices = expert_ids.shape

    def pair(x: jax.Array, expert: jax.Array, weight: jax.Array) -> jax.Array:
        w1, w2, w3 = (values(_expert(w, expert[0])) for w in matrices)
        return expert_mlp(x, (w1, w2, w3), weight[:, None], limit, compute, rounded)

    def pair_or_nothing(x: jax.Array, expert: jax.Array, weight: jax.Array) -> jax.Array:
        out = jax.eval_shape(pair, x, expert, weight)
        nothing = jnp.zeros(out.shape, out.dtype)
        return lax.cond(expert[0] >= 0, lambda: pair(x, expert, weight), lambda: nothing)

    each = map_rows(
        compute,
        pair_or_nothing if sparse else pair,
        jnp.repeat(x, choices, axis=0),
        expert_ids.reshape(-1),
        weights.reshape(-1),
        tile=1,
    ).reshape(rows, choices, -1)

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        return total + each[:, k].astype(jnp.float32)

    return lax.fori_loop(1, choices, add, each[:, 0].astype(jnp.float32))


def _all_experts(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[Any, Any, Any],
    limit: float,
    compute: Compute,
) -> jax.Array:
    """`routed_experts` for training: every expert sees every row, most with weight 0.

    With few small experts that is less work than sorting rows, and one plain product.
    """
    w1, w2, w3 = matrices
    wide = jnp.zeros((x.shape[0], w1.shape[0]), jnp.float32)
    wide = wide.at[jnp.arange(x.shape[0])[:, None], expert_ids].set(weights)
    x = compute.fake_quantize(x, Format.FP8_GROUP).astype(w1.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    gate = compute.round(product("td,efd->tef", x, w1))
    up = compute.round(product("td,efd->tef", x, w3))
    hidden = compute.round(swiglu(gate, up, limit) * wide[..., None])
    hidden = compute.fake_quantize(hidden, Format.FP8_GROUP).astype(w2.dtype)
    return product("tef,edf->td", hidden, w2)


def _expert(stack: QuantizedArray, expert: jax.Array) -> QuantizedArray:
    if stack.layer is None:
        return stack.map(lambda x: x[expert])
    layer = stack.layer
    return dataclasses.replace(
        stack, codes=stack.codes[layer, expert], scales=stack.scales[layer, expert], layer=None
    )


def expert_floor(rows: int, experts: int, d: int, f: int) -> tuple[int, int]:
    """(bytes, FLOPs) of pairs `rows` on `experts` distinct experts: weights dominate the bytes."""
    weights = experts * 3 * d * f * 17 // 32
    return weights + rows * (3 * d + 2 * f) * 2, rows * 6 * d * f


def _routed_on_gpu(
    x: Input,
    expert_ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[QuantizedArray, QuantizedArray, QuantizedArray],
    limit: float,
    compute: Compute,
    rounded: bool,
    sparse: bool,
) -> jax.Array:
    rows, choices = expert_ids.shape
    w1, w2, w3 = matrices
    table = current_sizes()
    if compute.phase is Phase.PREFILL:
        up = down = Tiles(**table["expert_prefill"])
        plan = sorted_plan(expert_ids.reshape(-1), w1.shape[0], up.rows)
    else:
        up, down = Tiles(**table["expert_up"]), Tiles(**table["expert_down"])
        plan = block_plan(expert_ids.reshape(-1), compute)
    x = quantized_planes(x, 4, compute)
    parts = _expert_matmul(x, plan, (w1, w3), choices, up, compute)
    hidden = _activate(parts, weights.reshape(-1), limit, 4, compute)
    (outputs,) = _expert_matmul(hidden, plan, (w2,), 1, down, compute)
    each = gpu.add_parts(outputs)
    each = (compute.round(each) if rounded else each).reshape(rows, choices, -1)
    if sparse:  # nothing was written for the others
        each = jnp.where(expert_ids[..., None] >= 0, each, 0)
    total = each[:, 0].astype(jnp.float32)
    for k in range(1, choices):
        total = total + each[:, k].astype(jnp.float32)
    return total


def _expert_matmul(
    x: jax.Array,
    plan: tuple[jax.Array, jax.Array],
    matrices: tuple[QuantizedArray, ...],
    choices: int,
    tiles: Tiles,
    compute: Compute,
) -> tuple[jax.Array, ...]:
    """Products of every pair with its expert's matrices [E, N, K], of equal shape.

    Args:
      x: [rows, 4, K / 4] planes of the inputs, row p // choices for pair p.

    Returns:
      For each matrix the parts of its sums, [splits, P, N] float32.
    """
    pairs = x.shape[0] * choices
    n, k = matrices[0].shape[-2:]
    tiles = tiles.fitted(n, k)
    stacks = [gpu.stack(w) for w in matrices]
    kernel = functools.partial(
        _matmul_kernel, choices=choices, steps=k // 4 // tiles.lanes, tiles=tiles, compute=compute
    )
    out = jax.ShapeDtypeStruct((tiles.splits, pairs, n), jnp.float32)
    grid = (n // tiles.outputs, tiles.splits, plan[0].shape[0])
    run = gpu.call(
        kernel,
        compute,
        grid,
        (out,) * len(matrices),
        warps=tiles.warps,
        stages=tiles.stages,
        name="expert_up" if len(matrices) == 2 else "expert_down",
    )
    weights = [a for _, codes, scales in stacks for a in (codes, scales)]
    return tuple(run(stacks[0][0], *plan, x, *weights))


def _matmul_kernel(
    layer_ref: Any,
    expert_ref: Any,  # [blocks]
    rows_ref: Any,  # [blocks, pairs of a block]
    x_ref: Any,  # [rows, 4, K / 4]
    *refs: Any,  # codes [L, E, N, K / 4] and scales [L, E, N, K / 32] of each matrix; parts
    choices: int,
    steps: int,
    tiles: Tiles,
    compute: Compute,
) -> None:
    count = len(refs) // 3
    weight_refs, out_refs = refs[: 2 * count], refs[2 * count :]
    first, split = pl.program_id(0) * tiles.outputs, pl.program_id(1)
    block = pl.program_id(2)
    expert = expert_ref[block]

    @pl.when(expert >= 0)
    def _() -> None:
        pairs = rows_ref[block, :]
        live = pairs < out_refs[0].shape[1]
        rows = jnp.where(live, pairs, 0)[:, None] // choices
        mask = jnp.broadcast_to(live[:, None], (pairs.shape[0], tiles.lanes))
        outputs = pl.ds(first, tiles.outputs)

        def step(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            i = split * (steps // tiles.splits) + i
            columns = i * tiles.lanes + jnp.arange(tiles.lanes)[None, :]
            x = [triton.load(x_ref.at[rows, p, columns], mask=mask, other=0.0) for p in range(4)]
            totals = []
            for m, total in enumerate(sums):
                at = (layer_ref[0], expert, outputs)
                codes = weight_refs[2 * m][(*at, pl.ds(i * tiles.lanes, tiles.lanes))]
                groups = tiles.lanes // 8
                scales = weight_refs[2 * m + 1][(*at, pl.ds(i * groups, groups))]
                factors = gpu.expand(gpu.e8m0_factor(scales, 126), 8)
                for p, plane in enumerate(gpu.decode_e2m1_lanes(codes, factors, compute)):
                    total = total + gpu.dot(plane, x[p].T)
                totals.append(total)
            return tuple(totals)

        zero = jnp.zeros((tiles.outputs, pairs.shape[0]), jnp.float32)
        sums = lax.fori_loop(0, steps // tiles.splits, step, (zero,) * count)
        columns = first + jnp.arange(tiles.outputs)[None, :]
        store = jnp.broadcast_to(live[:, None], (pairs.shape[0], tiles.outputs))
        for ref, total in zip(out_refs, sums, strict=True):
            target = ref.at[split, pairs[:, None], columns]  # dead pairs lie past the end
            triton.store(target, (total * 2.0**gpu.SCALE_SHIFT).T, mask=store)


def _activate(
    parts: tuple[jax.Array, ...],
    weights: jax.Array | None,
    limit: float,
    planes: int,
    compute: Compute,
) -> jax.Array:
    """Parts of gate and up [splits, P, F] to the FP8-rounded hidden planes [P, planes, F / planes].

    `weights` [P], if given, scale the hidden layer before it is quantised.
    """
    splits, pairs, f = parts[0].shape
    width = min(ACTIVATION_COLUMNS, f & -f)
    kernel = functools.partial(
        _activate_kernel, splits=splits, width=width, limit=limit, compute=compute
    )
    out = jax.ShapeDtypeStruct((pairs, planes, f // planes), jnp.bfloat16)
    grid = (f // width, pairs)
    scaled = () if weights is None else (weights,)
    return gpu.call(kernel, compute, grid, out, warps=2, name="expert_act")(*parts, *scaled)


def _activate_kernel(
    gate_ref: Any,
    up_ref: Any,
    *refs: Any,  # the pairs' weights, if any; the output
    splits: int,
    width: int,
    limit: float,
    compute: Compute,
) -> None:
    *weights, out_ref = refs
    first, pair = pl.program_id(0) * width, pl.program_id(1)

    def total(ref: Any) -> jax.Array:
        parts = [ref[split, pair, pl.ds(first, width)] for split in range(splits)]
        return gpu.rounded(gpu.add_parts(parts), compute)

    hidden = swiglu(total(gate_ref), total(up_ref), limit)
    for ref in weights:
        hidden = hidden * ref[pair]
    exact = rounded_groups(gpu.rounded(hidden, compute))
    store_planes(out_ref, pair, first + jnp.arange(width), exact)
