"""Every kernel on a GPU: against its definition, a row alone against company, and its time.

Times are medians of the device's own trace, with the cache flushed before every call; a record's
`kernels` lists what an operation launches. Bytes are the least that an operation must move.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import copy_bandwidth, kernel_times, random_weight, relative_error, write_results

from ds41jax.formats import Format, QuantizedArray, encode, values
from ds41jax.kernels.compute import REFERENCE, Compute, Kernels, Phase
from ds41jax.kernels.experts import expert_floor, routed_experts
from ds41jax.kernels.index_select import (
    PagedKeys,
    best_rows,
    index_floor,
    index_scores,
    paged_index_scores,
    top_rows,
)
from ds41jax.kernels.linear import grouped_linear, linear_floor, operand, project, quantized_linear
from ds41jax.kernels.mixes import split_mixes
from ds41jax.kernels.routing import choose_experts
from ds41jax.kernels.sparse_attention import RingAndStep, attention_floor, sparse_attention

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
            return [sparse_attention(q, sources, sink, WIDTH**-0.5, compute)]

        return run

    def expected(q: Any, window: Any, chosen: Any, stack: Any, step: Any, pages: Any) -> jax.Array:
        flat = stack.map(lambda a: a[1].reshape(slots * ring, -1))
        rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), flat, step)
        sources = ((rows, window[:16]), (pages, chosen[:16]))
        return sparse_attention(q[:16], sources, sink, WIDTH**-0.5, REFERENCE)

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
        mixes, base = normal(1, 96, 24).astype(jnp.float32)[:rows], jnp.zeros(24)

        def split(m: Any, b: Any, compute: Compute = DECODE) -> list[jax.Array]:
            return list(split_mixes(m, b, jnp.ones(3), 4, 20, 1e-6, compute))[2:]

        def split_expected(m: Any, b: Any) -> jax.Array:
            return split_mixes(m, b, jnp.ones(3), 4, 20, 1e-6, REFERENCE)[2]

        yield Case("mixes", rows, split, (mixes, base), (rows * 192, 0), 1, split_expected)
        products = normal(2, 96, EXPERTS).astype(jnp.float32)[:rows]

        def route(p: Any) -> list[jax.Array]:
            return [choose_experts(p, p * 0, CHOICES, True, 1.5, DECODE)[1]]

        def route_expected(p: Any) -> jax.Array:
            return choose_experts(p, p * 0, CHOICES, True, 1.5, REFERENCE)[1]

        floor = (rows * EXPERTS * 8, 0)
        yield Case("route", rows, route, (products,), floor, 1, route_expected)


GROUPS = {
    "experts": expert_cases,
    "dense": dense_cases,
    "attention": attention_cases,
    "index": index_cases,
    "small": small_cases,
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
