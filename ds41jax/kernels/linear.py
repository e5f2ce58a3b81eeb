"""Matrix products of the dense weights: what is quantised, accumulated and rounded where.

Weights are [out, in]; products accumulate in float32. The official FP8 product adds float32 partial
sums of 32-wide blocks in K order; codes times power-of-two scales are exact in float32, so only the
order of the same sum differs here.

The kernel: a tile of outputs a program, weights as the first operand of the matrix unit, rows as
its columns, which never mix. The width of a row tile may therefore follow the number of rows
without changing a bit of any of them; the split of the sum over the inputs must not, and follows
the matrix's shape alone.

Letters: T rows, N outputs, K inputs, G groups of a block-diagonal matrix.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats import Format, QuantizedArray
from ds41jax.formats.numerics import values
from ds41jax.kernels import choices, gpu
from ds41jax.kernels.compute import Compute, Phase
from ds41jax.kernels.quantize import Input, quantized_planes, values_of

TILE = 64  # outputs of an unquantised product's program
ROW_TILES = (16, 32, 64)
MOST_SPLITS, MOST_SPLITS_OF_ONE_TILE = 16, 64


Weight = Any  # QuantizedArray, jax.Array, StackEntry, or values of a quantised one on the jnp path


def operand(weight: Weight, compute: Compute) -> Weight:
    """A weight as the products below want it: kernels read quantised ones in place."""
    return weight if compute.on_gpu or compute.differentiable else values(weight)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., in] by [out, in] -> [..., out] in float32, at full precision."""
    return lax.dot_general(
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        (((x.ndim - 1,), (w.ndim - 1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def project(x: Input, w: jax.Array, compute: Compute) -> jax.Array:
    """`dot` of rows x [T, in] with an unquantised weight. On a GPU `x` must fit bfloat16."""
    if compute.differentiable:
        return _dot_of_batch(x, w)
    return gpu.add_parts(project_parts(x, w, compute)) if compute.on_gpu else dot(x, w)


def project_parts(x: Input, w: jax.Array, compute: Compute) -> jax.Array:
    """`project` by the kernel, for another kernel to add up: parts [P, T, out] of the sums."""
    (parts,) = products(values_of(x)[:, None, None], (w,), compute)
    return parts


def _dot_of_batch(x: jax.Array, w: jax.Array) -> jax.Array:
    """`dot` on matrix units where the weight's values fit bfloat16."""
    if w.dtype != jnp.bfloat16:
        return dot(x, w)
    dims = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return lax.dot_general(x.astype(w.dtype), w, dims, preferred_element_type=jnp.float32)


def linear(x: Input, w: jax.Array, compute: Compute) -> jax.Array:
    """A product with an unquantised weight, rounded once. x [T, in], w [out, in]."""
    if compute.on_gpu:
        return matmul(values_of(x)[:, None, None], w, compute, rounded=True)
    return compute.round(project(x, w, compute))


def quantized_linear(x: Input, w: Weight, compute: Compute, rounded: bool = True) -> jax.Array:
    """A product with a quantised weight (`operand`); the input [T, in] is quantised to FP8.

    In float32 unless `rounded`: a part of a sum is rounded when the sum is whole.
    """
    if compute.on_gpu:
        return matmul(quantized_planes(x, 2, compute)[:, None], w, compute, rounded=rounded)
    product = project(compute.fake_quantize(x, Format.FP8_GROUP), w, compute)
    return compute.round(product) if rounded else product


def quantized_parts(
    x: Input, weights: tuple[Weight, ...], compute: Compute
) -> tuple[jax.Array, ...]:
    """`quantized_linear` with several weights by one kernel, for another kernel to add up.

    x may itself be such parts. Returns parts [P, T, out] of the sums; rounding them is still due.
    """
    return products(quantized_planes(x, 2, compute)[:, None], weights, compute)


def grouped_linear(x: jax.Array, w: Weight, compute: Compute) -> jax.Array:
    """Block-diagonal product: x [T, G, in] by w [G * out, in] -> [T, G * out]; input as is."""
    if compute.on_gpu:
        return matmul(gpu.planes(x, 2), w, compute, rounded=True)
    rows, groups, _ = x.shape
    product = jnp.einsum(
        "tgd,grd->tgr",
        x.astype(w.dtype),
        w.reshape(groups, -1, w.shape[-1]),
        precision=None if compute.differentiable else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return compute.round(product).reshape(rows, -1)


def grouped_parts(x: jax.Array, w: Weight, compute: Compute) -> jax.Array:
    """`grouped_linear` by the kernel, of planes [T, G, 2, in / 2]: parts [P, T, G * out]."""
    (parts,) = products(x, (w,), compute, rounded=True)
    return parts


def linear_floor(
    rows: int, n: int, k: int, bytes_a_weight: float = 1 + 1 / 1024
) -> tuple[int, int]:
    """(bytes, FLOPs) of a product; `k` inputs of each output."""
    return int(n * k * bytes_a_weight) + rows * 2 * (n + k), 2 * rows * n * k


@dataclass(frozen=True)
class _Plan:
    """Static numbers of one product."""

    n: int
    k: int
    groups: int
    rows: int
    quantized: bool
    wide: bool  # float32 weights
    prefill: bool
    dense: Any  # Sizes: of decoding
    sizes: Any  # Sizes: of this product

    @property
    def tile(self) -> int:
        part = self.n // self.groups
        if not self.quantized:
            return min(TILE, part & -part) if self.groups > 1 else TILE
        return min(self.sizes["outputs"], part & -part)

    @property
    def step(self) -> int:
        sizes = self.sizes if self.quantized and self.prefill else self.dense
        return min(sizes["inputs"] // 2 if self.wide else sizes["inputs"], self.k & -self.k)

    @property
    def splits(self) -> int:
        """Parts of the sum over K: by shape alone, so that no row's order of sums ever changes."""
        if self.prefill:
            return 1
        steps, tiles = self.k // self.step, -(-self.n // TILE)
        most = MOST_SPLITS_OF_ONE_TILE if tiles == 1 else MOST_SPLITS
        fitting = [s for s in range(1, most + 1) if steps % s == 0]
        enough = [s for s in fitting if s * tiles >= self.dense["programs"]]
        return enough[0] if enough else fitting[-1]

    @property
    def row_tile(self) -> int:
        if self.prefill:
            return self.sizes["rows"] if self.quantized else ROW_TILES[-1]
        return row_tile(self.rows)

    @property
    def tiles(self) -> int:
        return -(-self.n // self.tile)

    @property
    def launch(self) -> tuple[Any, ...]:
        """What products that share a launch have in common."""
        return self.quantized, self.wide, self.tile, self.splits, self.warps_and_stages

    @property
    def warps_and_stages(self) -> tuple[int, int]:
        return (self.sizes["warps"], self.sizes["stages"]) if self.quantized else (4, 3)


def row_tile(rows: int) -> int:
    """Rows a program of decoding."""
    return next((t for t in ROW_TILES if rows <= t), ROW_TILES[-1])


def matmul(x: jax.Array, w: Weight, compute: Compute, rounded: bool = False) -> jax.Array:
    """x [T, G, planes, K / planes], values that fit bfloat16, by w [N, K] -> [T, N].

    Group g of x multiplies the g-th part of the outputs. A quantised weight takes two planes. The
    result is float32, or `rounded` once to bfloat16.
    """
    (parts,) = products(x, (w,), compute, rounded)
    total = gpu.add_parts(parts)
    return compute.round(total) if rounded else total


def products(
    x: jax.Array, weights: tuple[Weight, ...], compute: Compute, rounded: bool = False
) -> tuple[jax.Array, ...]:
    """`matmul` with every weight, as parts [P, T, N] of its sums: bfloat16 if `rounded` and P = 1.

    Weights of one size of tiles and parts share a launch; no weight's result depends on it.
    """
    plans = tuple(_plan(x, w, compute) for w in weights)
    if len({plan.launch for plan in plans}) > 1:
        return tuple(part for w in weights for part in products(x, (w,), compute, rounded))
    kernel = functools.partial(_matmul_kernel, plans=plans, compute=compute)
    first = plans[0]
    grid = (-(-first.rows // first.row_tile), sum(plan.tiles for plan in plans), first.splits)
    dtype = jnp.bfloat16 if rounded and first.splits == 1 else jnp.float32
    out = [jax.ShapeDtypeStruct((plan.splits, plan.rows, plan.n), dtype) for plan in plans]
    warps, stages = first.warps_and_stages
    run = gpu.call(kernel, compute, grid, out, warps=warps, stages=stages, name="matmul")
    return tuple(run(x.astype(jnp.bfloat16), *(a for w in weights for a in _in_place(w))))


def _plan(x: jax.Array, w: Weight, compute: Compute) -> _Plan:
    rows, groups, count, width = x.shape
    matrix, prefill = _in_place(w)[1], compute.phase is Phase.PREFILL
    table = choices.current()
    kind = "dense_wide" if row_tile(rows) >= 64 else "dense"
    return _Plan(
        n=matrix.shape[-2],
        k=count * width,
        groups=groups,
        rows=rows,
        quantized=isinstance(w, QuantizedArray),
        wide=matrix.dtype == jnp.float32,
        prefill=prefill,
        dense=table["dense"],
        sizes=table["dense_prefill" if prefill else kind],
    )


def _in_place(w: Weight) -> tuple[jax.Array, ...]:
    """(layer [1], stack of codes or values, and scales if quantised), nothing moved."""
    return gpu.stack(w) if isinstance(w, QuantizedArray) else gpu.entry(w)


def _matmul_kernel(x_ref: Any, *refs: Any, plans: tuple[_Plan, ...], compute: Compute) -> None:
    weight_refs, out_refs = refs[: -len(plans)], refs[-len(plans) :]
    each = len(weight_refs) // len(plans)
    row_tile, tile, split = (pl.program_id(axis) for axis in range(3))
    for m, (plan, out_ref) in enumerate(zip(plans, out_refs, strict=True)):
        mine = weight_refs[m * each : (m + 1) * each]
        at = row_tile, tile, split
        run = functools.partial(_product_tile, x_ref, mine, out_ref, at, plan, compute)
        if len(plans) == 1:
            run()
        else:
            pl.when((tile >= 0) & (tile < plan.tiles))(run)
        tile = tile - plan.tiles


def _product_tile(
    x_ref: Any,
    refs: tuple[Any, ...],
    out_ref: Any,
    at: tuple[Any, Any, Any],
    plan: _Plan,
    compute: Compute,
) -> None:
    """Tile and part `at` of a weight's outputs; refs: its layer, codes and scales, or values."""
    layer_ref, *weight_refs = refs
    row_tile, output_tile, split = at
    tile, count = plan.row_tile, 2 if plan.quantized else 1
    rows = row_tile * tile + jnp.arange(tile)
    first = output_tile * plan.tile
    group = first // (plan.n // plan.groups)
    live = rows < plan.rows
    safe = jnp.where(live, rows, 0)[:, None]
    width = plan.step // count
    mask = jnp.broadcast_to(live[:, None], (tile, width))
    steps = plan.k // plan.step // plan.splits

    def add(i: Any, total: jax.Array) -> jax.Array:
        i = split * steps + i
        columns = i * width + jnp.arange(width)[None, :]
        x = [
            triton.load(x_ref.at[safe, group, p, columns], mask=mask, other=0.0).T
            for p in range(count)
        ]
        terms = _weight_tile(weight_refs, layer_ref[0], first, i, plan, compute)
        for t, term in enumerate(terms):
            total = total + gpu.dot(term, x[t % count])
        return total

    total = lax.fori_loop(0, steps, add, jnp.zeros((plan.tile, tile), jnp.float32))
    if plan.quantized:
        total = total * 2.0**gpu.SCALE_SHIFT
    outputs = first + jnp.arange(plan.tile)[None, :]
    store = live[:, None] & (outputs < plan.n)
    target = jnp.where(live, rows, plan.rows)[:, None]  # dead rows point past the end
    triton.store(out_ref.at[split, target, outputs], total.T.astype(out_ref.dtype), mask=store)


def _weight_tile(
    refs: list[Any], layer: Any, first: Any, i: Any, plan: _Plan, compute: Compute
) -> list[jax.Array]:
    """A tile of weights in BF16: the planes of quantised ones, at 2^-64, or terms of a sum."""
    step, tile = plan.step, plan.tile
    outputs = first + jnp.arange(tile)[:, None]
    if plan.quantized:
        codes, scales = refs
        lanes = codes[layer, pl.ds(first, tile), pl.ds(i * (step // 2), step // 2)]
        blocks = step // 32
        columns = i * blocks + jnp.arange(blocks)[None, :]
        factors = gpu.e8m0_factor(triton.load(scales.at[layer, outputs // 32, columns]), 120)
        return gpu.decode_e4m3_lanes(lanes, gpu.expand(factors, 16), compute)
    (ref,) = refs
    live = jnp.broadcast_to(outputs < plan.n, (tile, step))
    columns = i * step + jnp.arange(step)[None, :]
    weights = triton.load(
        ref.at[layer, jnp.where(outputs < plan.n, outputs, 0), columns], mask=live
    )
    if weights.dtype == jnp.bfloat16:
        return [weights]
    terms = []
    for _ in range(3):  # 3 x 8 bits hold a float32
        terms.append(weights.astype(jnp.bfloat16))
        weights = weights - terms[-1].astype(jnp.float32)
    return terms
