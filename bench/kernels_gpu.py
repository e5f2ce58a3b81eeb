"""Every kernel on a GPU: against its definition, a row alone against company, and its time.

Times are medians of the device's own trace, with the cache flushed before every call; a record's
`kernels` lists what an operation launches. Bytes are the least that an operation must move.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import copy_bandwidth, kernel_times, random_weight, relative_error, write_results

from ds41jax.formats import Format, QuantizedArray, decode, encode, values
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels, Phase
from ds41jax.kernels.experts import expert_floor, expert_mlp, routed_experts
from ds41jax.kernels.flash_decode import RingAndStep
from ds41jax.kernels.index_select import (
    PagedKeys,
    best_rows,
    index_floor,
    index_scores,
    paged_index_scores,
    top_rows,
)
from ds41jax.kernels.latents import latents
from ds41jax.kernels.linear import (
    grouped_linear,
    linear_floor,
    operand,
    project,
    quantized_linear,
    quantized_parts,
)
from ds41jax.kernels.mixes import finish_mixes
from ds41jax.kernels.quantize import values_of
from ds41jax.kernels.rotation import Turn
from ds41jax.kernels.routing import choose_of_parts
from ds41jax.kernels.sparse_attention import attention_floor, rotated_attention
from ds41jax.kernels.store import store_rows
from ds41jax.kernels.streams import enter, leave_and_enter

DECODE = Compute(kernels=Kernels.PALLAS)
PREFILL = Compute(kernels=Kernels.PALLAS, phase=Phase.PREFILL)
DECODE_ROWS, PREFILL_ROWS = (1, 6, 16, 96), 2048
D, F, EXPERTS, CHOICES, HEADS, WIDTH = 5120, 2304, 384, 6, 64, 512
DENSE = {  # name: outputs, inputs, groups
    "wq_a": (1280, 5120, 1),
    "wkv": (512, 5120, 1),
    "wq_b": (32768, 1280, 1),
    "wo_a": (8192, 4096, 8),
    "wo_b": (5120, 8192, 1),
    "shared gate or up": (2304, 5120, 1),
    "shared down": (5120, 2304, 1),
}


@dataclasses.dataclass
class Case:
    """One measurement.

    Attributes:
      run: the operation, of `args`; a list of results where several calls share the data's size.
      calls: how many calls `run` makes.
      rows: of a call; equal names with more rows must agree on the first rows, bit for bit.
      floor: (bytes, FLOPs) of a call.
      expected: the definition's result for the first rows, of the same arguments, or None.
    """

    name: str
    rows: int
    run: Callable[..., list[jax.Array]]
    args: tuple[Any, ...]
    floor: tuple[int, int]
    calls: int = 1
    expected: Callable[..., jax.Array] | None = None


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def angles(rows: int) -> Turn:
    turns = jnp.arange(rows)[:, None] * jnp.linspace(1, 1e-4, 32)
    return Turn(jnp.cos(turns), jnp.sin(turns))


def expert_cases() -> Iterator[Case]:
    shapes = ((F, D), (D, F), (F, D))
    stacks = tuple(random_weight(i, (2, EXPERTS, *s), Format.MXFP4) for i, s in enumerate(shapes))
    random = np.random.default_rng(0)
    rows = PREFILL_ROWS
    ids = np.stack([random.permutation(EXPERTS)[:CHOICES] for _ in range(rows)])
    step = normal(1, rows, D), jnp.asarray(ids, jnp.int32), jnp.ones((rows, CHOICES)) / 4

    def run(compute: Compute, layers: tuple[int, ...]) -> Callable[..., list[jax.Array]]:
        def calls(x: jax.Array, ids: jax.Array, w: jax.Array, stacks: Any) -> list[jax.Array]:
            return [
                routed_experts(x, ids, w, tuple(s.at_layer(i) for s in stacks), 10.0, compute)
                for i in layers
            ]

        return calls

    def expected(x: jax.Array, ids: jax.Array, w: jax.Array, stacks: Any) -> jax.Array:
        return run(REFERENCE, (0,))(x[:2], ids[:2], w[:2], stacks)[0]

    for count, compute in [*((n, DECODE) for n in DECODE_ROWS), (rows, PREFILL)]:
        pairs, unique = count * CHOICES, len(np.unique(ids[:count]))
        args = (*(a[:count] for a in step), stacks)
        name = "experts" if compute is DECODE else "experts, prefill"
        floor = expert_floor(pairs, unique, D, F)
        yield Case(name, count, run(compute, (0, 1)), args, floor, 2, expected)


def dense_cases() -> Iterator[Case]:
    for name, (n, k, groups) in DENSE.items():
        stack = random_weight(3, (max(2, int(2e8 / n / k)), n, k), Format.FP8_BLOCK)
        x = normal(1, PREFILL_ROWS, groups, k)
        layers = range(min(4, stack.codes.shape[0]))

        def product(
            x: jax.Array, w: QuantizedArray, i: int, compute: Compute, groups: int = groups
        ) -> jax.Array:
            matrix = operand(w.at_layer(i), compute)
            if groups > 1:
                return grouped_linear(x, matrix, compute)
            return quantized_linear(x[:, 0], matrix, compute)

        for count, compute in [*((m, DECODE) for m in DECODE_ROWS), (PREFILL_ROWS, PREFILL)]:
            label = name if compute is DECODE else f"{name}, prefill"
            yield Case(
                label,
                count,
                lambda x, w, c=compute, f=product, ls=layers: [f(x, w, i, c) for i in ls],
                (x[:count], stack),
                linear_floor(count, n, k),
                len(layers),
                lambda x, w, f=product: f(x[:16], w, 0, REFERENCE),
            )
    for name, n, k, dtype in (
        ("router", EXPERTS, D, jnp.bfloat16),
        ("mix projection", 24, 4 * D, jnp.float32),
        ("head", 129280, D, jnp.bfloat16),
    ):
        w = (normal(2, n, k) * 1.001).astype(dtype)
        for count in DECODE_ROWS:
            floor = linear_floor(count, n, k, w.dtype.itemsize)
            x = normal(1, 96, k)[:count]
            run = lambda x, w: [project(x, w, DECODE)]  # noqa: E731
            yield Case(name, count, run, (x, w), floor, 1, lambda x, w: project(x, w, REFERENCE))


def attention_cases() -> Iterator[Case]:
    slots, ring, pool, most = 16, 256, 1 << 18, 512
    random = np.random.default_rng(0)
    stack = encode(normal(1, 2, slots, ring, WIDTH), Format.FP8_GROUP)
    step, pages = (
        encode(normal(2, most, WIDTH), Format.FP8_GROUP),
        encode(normal(3, pool, WIDTH), Format.KV_FP4),
    )
    window = random.integers(0, slots * ring, (most, 128))
    window[:, -2:] = slots * ring + np.arange(most)[:, None]
    chosen = np.stack([random.choice(pool, 512, replace=False) for _ in range(most)])
    q, sink = normal(4, most, HEADS, WIDTH), normal(5, HEADS).astype(jnp.float32)
    index = jnp.asarray(window, jnp.int32), jnp.asarray(chosen, jnp.int32)

    def attend(compute: Compute) -> Callable[..., list[jax.Array]]:
        def run(q: Any, window: Any, chosen: Any, stack: Any, step: Any, pages: Any) -> Any:
            rows = RingAndStep(stack.at_layer(1), jnp.arange(slots, dtype=jnp.int32), step)
            sources = ((rows, window), (pages, chosen))
            turn = jax.tree.map(lambda a: a[: q.shape[0]], angles(most))
            return [rotated_attention(q, turn, sources, sink, WIDTH**-0.5, 8, compute)]

        return run

    def expected(q: Any, window: Any, chosen: Any, stack: Any, step: Any, pages: Any) -> jax.Array:
        flat = stack.map(lambda a: a[1].reshape(slots * ring, -1))
        rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), flat, step)
        sources = ((rows, window[:16]), (pages, chosen[:16]))
        turn = jax.tree.map(lambda a: a[:16], angles(most))
        return rotated_attention(q[:16], turn, sources, sink, WIDTH**-0.5, 8, REFERENCE)

    for count, compute in [*((n, DECODE) for n in DECODE_ROWS), (most, PREFILL)]:
        args = (q[:count], *(i[:count] for i in index), stack, step, pages)
        name = "attention" if compute is DECODE else "attention, prefill"
        floor = attention_floor(count, 128, 512, HEADS, WIDTH)
        yield Case(name, count, attend(compute), args, floor, 1, expected)


def index_cases() -> Iterator[Case]:
    pages = encode(normal(1, 8192, 256, 128), Format.MXFP4)
    q = values(encode(normal(2, 16, 32, 128), Format.MXFP4))
    weights = normal(3, 16, 32) / 64
    for keys, rows in ((8192, 1), (65536, 1), (262144, 1), (262144, 6), (65536, 16)):
        count, random = keys // 256, np.random.default_rng(keys)
        table = jnp.asarray([random.permutation(8192)[:count] for _ in range(rows)], jnp.int32)
        visible = jnp.full(rows, keys - 3, jnp.int32)
        row = jnp.arange(rows, dtype=jnp.int32)

        def score(q: Any, w: Any, pages: Any, t: Any, s: Any, v: Any) -> list[jax.Array]:
            return [paged_index_scores(q, w, PagedKeys(pages, t), s, v, DECODE)]

        def expected(q: Any, w: Any, pages: Any, t: Any, s: Any, v: Any) -> jax.Array:
            mine = values(pages.map(lambda a: a[t[0]])).reshape(-1, 128)
            scores = index_scores(q[0], w[0], mine, REFERENCE)
            return jnp.where(jnp.arange(scores.shape[0]) < v[0], scores, 0)[None]

        args = (q[:rows], weights[:rows], pages, table, row, visible)
        floor = index_floor(rows, keys, 32, 128)
        yield Case(f"index scores of {keys}", rows, score, args, floor, 1, expected)
        scores = normal(keys, 16, keys)[:rows].astype(jnp.float32)
        best = lambda s: [best_rows(s, 512, DECODE)]  # noqa: E731
        top = lambda s: jax.vmap(lambda s: top_rows(s, 512))(s)  # noqa: E731
        yield Case(f"best 512 of {keys}", rows, best, (scores,), (rows * keys * 4, 0), 1, top)


def small_cases() -> Iterator[Case]:
    for rows in DECODE_ROWS:
        parts = normal(1, 64, 96, 24).astype(jnp.float32)[:, :rows] / 8
        square, base = jnp.ones(rows), jnp.zeros(24)

        def mixes(p: Any, s: Any, b: Any, compute: Compute = DECODE) -> list[jax.Array]:
            return list(finish_mixes(p, s, b, jnp.ones(3), 4, 20, 1e-6, 1e-20, compute))[2:]

        def mixes_expected(p: Any, s: Any, b: Any) -> jax.Array:
            return mixes(p, s, b, REFERENCE)[0]

        args = parts, square, base
        yield Case("mixes", rows, mixes, args, (rows * 6240, 0), 1, mixes_expected)
        parts = normal(2, 10, 96, EXPERTS).astype(jnp.float32)[:, :rows]
        image = jnp.arange(rows) % 3 == 1

        def route(p: Any, i: Any, compute: Compute = DECODE) -> list[jax.Array]:
            biases = jnp.zeros(EXPERTS), jnp.ones(EXPERTS)
            return [choose_of_parts(p, biases, i, CHOICES, True, 1.5, compute)[1]]

        def route_expected(p: Any, i: Any) -> jax.Array:
            return route(p, i, REFERENCE)[0]

        floor = (rows * EXPERTS * 40, 0)
        yield Case("route", rows, route, (parts, image), floor, 1, route_expected)


def between_cases() -> Iterator[Case]:
    """What stands between two products, each as one kernel."""
    most = DECODE_ROWS[-1]
    stream, norm = normal(1, most, 4, D), normal(2, D)
    pre, post = (jax.nn.sigmoid(normal(i, most, 4).astype(jnp.float32)) for i in (3, 4))
    comb = jax.nn.softmax(normal(5, most, 4, 4).astype(jnp.float32))
    parts = normal(6, 4, most, D).astype(jnp.float32)
    low = [normal(i, 10, most, n).astype(jnp.float32) for i, n in ((7, 1280), (8, WIDTH))]
    norms = normal(9, 1280), normal(10, WIDTH)
    ring = encode(normal(11, 2, 16, 256, WIDTH), Format.FP8_GROUP)
    stored = encode(normal(12, most, WIDTH), Format.FP8_GROUP)

    def entered(stream: Any, pre: Any, norm: Any, compute: Compute = DECODE) -> list[jax.Array]:
        return [values_of(enter(stream, pre, norm, 1e-20, (2,), compute)[0])]

    def left(parts: Any, stream: Any, mixes: Any, norm: Any, compute: Compute = DECODE) -> Any:
        made = leave_and_enter(parts, stream, *mixes, norm, 1e-20, (2, 4), compute)
        return [values_of(made[1]), made[0]]

    def made(low: Any, norms: Any, turn: Any, compute: Compute = DECODE) -> list[jax.Array]:
        latent, row = latents(low, norms, turn, 1e-20, compute)
        return [jnp.concatenate([values_of(latent).astype(jnp.float32), decode(row)], axis=1)]

    def written(ring: Any, rows: Any, compute: Compute = DECODE) -> list[jax.Array]:
        at = jnp.arange(rows.codes.shape[0])
        after = store_rows(ring, 1, at % 16, at // 16, rows, compute)
        return [decode(after.map(lambda a: a[1, at % 16, at // 16]))]

    def first(rows: int, tree: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda a: lax.slice_in_dim(a, 0, rows, axis=axis), tree)

    for rows in DECODE_ROWS:
        mixes = first(rows, (post, comb, pre))
        for name, run, args, size in (
            ("enter", entered, (first(rows, stream), mixes[2], norm), 12 * D),
            (
                "leave and enter",
                left,
                (first(rows, parts, 1), first(rows, stream), mixes, norm),
                38 * D,
            ),
            ("latents", made, (first(rows, low, 1), norms, first(rows, angles(most))), 80 << 10),
            ("store rows", written, (ring, first(rows, stored)), 1056),
        ):
            expected = lambda *args, f=run: f(*args, REFERENCE)[0]  # noqa: E731
            yield Case(name, rows, run, args, (rows * size, 0), 1, expected)


def shared_cases() -> Iterator[Case]:
    """Products that share a launch: the low-rank ones, and the shared expert."""
    stacks = [
        random_weight(i, (16, *s), Format.FP8_BLOCK)
        for i, s in enumerate(((1280, D), (WIDTH, D), (F, D), (D, F)))
    ]
    x, layers = normal(1, PREFILL_ROWS, D), range(4)

    def low(x: Any, a: Any, b: Any, compute: Compute = DECODE) -> list[jax.Array]:
        both = [quantized_parts(x, (a.at_layer(i), b.at_layer(i)), compute) for i in layers]
        return [jnp.concatenate([sum_of(p, compute) for p in pair], axis=1) for pair in both]

    def low_expected(x: Any, a: Any, b: Any) -> jax.Array:
        whole = [operand(w.at_layer(0), REFERENCE) for w in (a, b)]
        return jnp.concatenate([quantized_linear(x[:16], w, REFERENCE) for w in whole], axis=1)

    def sum_of(parts: jax.Array, compute: Compute) -> jax.Array:
        return compute.round(functools.reduce(jnp.add, parts))

    def mlp(x: Any, a: Any, b: Any, compute: Compute = DECODE) -> list[jax.Array]:
        of = [[operand(w.at_layer(i), compute) for w in (a, b, a)] for i in layers]
        return [expert_mlp(x, tuple(w), None, 10.0, compute) for w in of]

    for count, compute in [*((m, DECODE) for m in DECODE_ROWS), (PREFILL_ROWS, PREFILL)]:
        prefill = ", prefill" if compute is PREFILL else ""
        floor = linear_floor(count, 1280 + WIDTH, D)
        run = functools.partial(low, compute=compute)
        yield Case(
            f"wq_a and wkv{prefill}", count, run, (x[:count], *stacks[:2]), floor, 4, low_expected
        )
        floor = linear_floor(count, 3 * F, D)
        run = functools.partial(mlp, compute=compute)
        expected = lambda x, a, b: mlp(x[:16], a, b, REFERENCE)[0]  # noqa: E731
        yield Case(
            f"shared expert{prefill}", count, run, (x[:count], *stacks[2:]), floor, 4, expected
        )


GROUPS = {
    "experts": expert_cases,
    "dense": dense_cases,
    "attention": attention_cases,
    "index": index_cases,
    "small": small_cases,
    "between": between_cases,
    "shared": shared_cases,
}


def measure(cases: list[Case], bandwidth: float) -> Iterator[dict[str, Any]]:
    """Compiles all cases at once, checks each and times it."""
    programs = [jax.jit(c.run).lower(*c.args) for c in cases]
    widest = {c.name: c for c in sorted(cases, key=lambda c: c.rows) if c.expected}
    checks = [jax.jit(c.expected).lower(*c.args) for c in widest.values()]
    with ThreadPoolExecutor(14) as pool:
        compiled = list(pool.map(lambda p: p.compile(), [*programs, *checks]))
    results = [program(*c.args)[0] for program, c in zip(compiled, cases, strict=False)]
    errors = {}
    for check, c in zip(compiled[len(cases) :], widest.values(), strict=True):
        want, got = check(*c.args), results[cases.index(c)]
        got = jnp.where(jnp.isfinite(got), got, 0)[: want.shape[0]]
        errors[c.name] = relative_error(got, want)
    for c, program, result in zip(cases, compiled, results, strict=False):
        whole = results[cases.index(widest[c.name])]
        kernels = kernel_times(lambda p=program, a=c.args: p(*a))
        microseconds = sum(n * us for n, us in kernels.values()) / c.calls
        size, flops = c.floor
        yield {
            "operation": c.name,
            "rows": c.rows,
            "us": round(microseconds, 1),
            "megabytes": round(size / 1e6, 2),
            "of_copy_bandwidth": round(size / microseconds * 1e6 / bandwidth, 3),
            "teraflops": round(flops / microseconds / 1e6, 1),
            "error": errors[c.name],
            "rows_alone_equal": bool((result == whole[: result.shape[0]]).all()),
            "kernels": {k: [n / c.calls, us] for k, (n, us) in kernels.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    options = parser.parse_args()
    bandwidth = copy_bandwidth(2)
    records: list[dict[str, Any]] = []
    for group in (GROUPS[name] for name in options.only):
        for record in measure(list(group()), bandwidth):
            records.append(record)
            print({k: v for k, v in record.items() if k != "kernels"}, flush=True)
        write_results(options.out, records, copy_bytes_per_second=bandwidth)


if __name__ == "__main__":
    main()
