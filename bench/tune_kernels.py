"""Tile sizes of the GPU kernels: every candidate against the current choice, and its time.

    python bench/tune_kernels.py            # all kernels; writes results/tuning_<device>.json
    python bench/tune_kernels.py --only attention --rows 1 6
    python bench/tune_kernels.py --smoke    # small shapes, in the interpreter, no times

A candidate changes some of the numbers that `ds41jax/kernels/choices.toml` gives a kernel. Its
result must agree with the current choice's (sums may be ordered otherwise), and its time is the
kernel's own in the device's trace (`timing.kernel_times`), summed over row counts where a choice
serves several. What does not compile, or needs too much shared memory, is recorded as such. Nothing
is chosen here: the table shows what to write into choices.toml.
"""

import argparse
import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import kernel_times, random_weight, relative_error, write_results

from ds41jax.formats import Format, encode
from ds41jax.kernels import choices
from ds41jax.kernels.compute import Compute, Kernels, Phase
from ds41jax.kernels.experts import routed_experts
from ds41jax.kernels.flash_decode import RingAndStep
from ds41jax.kernels.index_select import PagedKeys, best_rows, paged_index_scores
from ds41jax.kernels.linear import quantized_linear
from ds41jax.kernels.sparse_attention import sparse_attention

THREADS = 14
RESULTS = Path(__file__).parent / "results"
TOLERANCE = 5e-3  # relative; another order of sums moves roundings to bfloat16


@dataclass(frozen=True)
class Target:
    """A kernel's numbers and what to run to see them.

    Attributes:
      sizes: its table in choices.toml; kernel: its name in a trace, a pattern.
      candidates: values tried of each number.
      rows: row counts.
      make: (rows, small, compute) to an operation and its arguments.
      smoke: what a smoke test changes, with `smoke_rows` rows.
    """

    sizes: str
    kernel: str
    candidates: dict[str, tuple[int, ...]]
    rows: tuple[int, ...]
    make: Callable[[int, bool, Compute], tuple[Callable[..., jax.Array], tuple[Any, ...]]]
    phase: Phase = Phase.DECODE
    smoke: dict[str, int] = field(default_factory=dict)
    smoke_rows: int = 3

    def all_candidates(self) -> Iterator[dict[str, int]]:
        """The current numbers first, then every other combination."""
        now = choices.current()[self.sizes]
        yield {name: now[name] for name in self.candidates}
        for values in itertools.product(*self.candidates.values()):
            sizes = dict(zip(self.candidates, values, strict=True))
            if any(now[name] != value for name, value in sizes.items()):
                yield sizes


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def experts(rows: int, small: bool, compute: Compute) -> Any:
    d, f, count, k = (128, 64, 4, 2) if small else (5120, 2304, 384, 6)
    shapes = (f, d), (d, f), (f, d)
    stacks = tuple(
        random_weight(i, (1, count, *s), Format.MXFP4).at_layer(0) for i, s in enumerate(shapes)
    )
    random = np.random.default_rng(0)
    ids = jnp.asarray([random.permutation(count)[:k] for _ in range(rows)], jnp.int32)
    weights = jnp.full((rows, k), 0.25)
    run = lambda x, i, w, s: routed_experts(x, i, w, s, 10.0, compute)  # noqa: E731
    return run, (normal(1, rows, d), ids, weights, stacks)


def dense(rows: int, small: bool, compute: Compute) -> Any:
    shapes = ((64, 128),) if small else ((1280, 5120), (32768, 1280), (5120, 8192), (2304, 5120))
    weights = [
        random_weight(i, (1, *s), Format.FP8_BLOCK).at_layer(0) for i, s in enumerate(shapes)
    ]
    inputs = [normal(i, rows, k) for i, (_, k) in enumerate(shapes)]

    def run(inputs: Any, weights: Any) -> jax.Array:
        out = [quantized_linear(x, w, compute) for x, w in zip(inputs, weights, strict=True)]
        return jnp.concatenate(out, axis=1)

    return run, (inputs, weights)


def attention(rows: int, small: bool, compute: Compute) -> Any:
    heads, width, pool, chosen = (8, 64, 256, 100) if small else (64, 512, 1 << 18, 512)
    window, slots, ring = (16, 2, 32) if small else (128, 16, 256)
    random = np.random.default_rng(0)
    rings = encode(normal(1, 1, slots, ring, width), Format.FP8_GROUP).at_layer(0)
    step = encode(normal(2, rows, width), Format.FP8_GROUP)
    pages = encode(normal(3, pool, width), Format.KV_FP4)
    index = [
        jnp.asarray(random.integers(0, most, (rows, n)), jnp.int32)
        for most, n in ((slots * ring + rows, window), (pool, chosen))
    ]
    own = jnp.arange(slots, dtype=jnp.int32)

    def run(q: Any, sink: Any, rings: Any, step: Any, pages: Any, index: Any) -> jax.Array:
        sources = (RingAndStep(rings, own, step), index[0]), (pages, index[1])
        return sparse_attention(q, sources, sink, width**-0.5, compute)

    return run, (normal(4, rows, heads, width), jnp.zeros(heads), rings, step, pages, index)


def index_scores(rows: int, small: bool, compute: Compute) -> Any:
    pages, page = (2, 128) if small else (256, 256)
    keys = encode(normal(1, pages, page, 128), Format.MXFP4)
    table = jnp.tile(jnp.arange(pages, dtype=jnp.int32), (rows, 1))
    row, visible = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, pages * page - 3, jnp.int32)

    def run(q: Any, w: Any, keys: Any, table: Any, row: Any, visible: Any) -> jax.Array:
        return paged_index_scores(q, w, PagedKeys(keys, table), row, visible, compute)

    q = normal(2, rows, 32, 128).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return run, (q, normal(3, rows, 32) / 64, keys, table, row, visible)


def index_select(rows: int, small: bool, compute: Compute) -> Any:
    count, k = (300, 16) if small else (1 << 18, 512)
    scores = normal(1, rows, count).astype(jnp.float32)
    return lambda s: best_rows(s, k, compute).astype(jnp.float32), (scores,)


DECODE_ROWS, PREFILL = (1, 6, 96), {"rows": (2048,), "phase": Phase.PREFILL}
TARGETS = {
    "expert_up": Target(
        "expert_up",
        "expert_up",
        {"outputs": (16, 32, 64), "lanes": (64, 128), "warps": (2, 4), "stages": (3, 4)},
        DECODE_ROWS,
        experts,
        smoke={"outputs": 16},
    ),
    "expert_down": Target(
        "expert_down",
        "expert_down",
        {"outputs": (32, 64, 128), "lanes": (32, 64), "warps": (2, 4), "stages": (3, 4)},
        DECODE_ROWS,
        experts,
        smoke={"lanes": 8},
    ),
    "dense": Target(
        "dense",
        "matmul",
        {"outputs": (32, 64, 128), "inputs": (128, 256), "warps": (4, 8), "stages": (3, 4)},
        (1, 6, 16),
        dense,
        smoke={"inputs": 64},
    ),
    "dense_wide": Target(
        "dense_wide",
        "matmul",
        {"outputs": (64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
        (96,),
        dense,
        smoke={"outputs": 32},
        smoke_rows=40,
    ),
    "attention": Target(
        "attention",
        "sparse_attention",
        {"heads": (16, 32), "keys": (32, 64), "part_tiles": (1, 2, 5), "warps": (4, 8)},
        DECODE_ROWS,
        attention,
        smoke={"part_tiles": 1},
    ),
    "index_scores": Target(
        "index_scores",
        "index_scores",
        {"keys": (32, 64, 128), "warps": (2, 4, 8), "stages": (1,)},
        (1, 6),
        index_scores,
        smoke={"keys": 32},
    ),
    "index_select": Target(
        "index_select",
        "best_rows",
        {"scores": (4096, 8192, 16384), "warps": (8, 16)},
        (1, 6),
        index_select,
        smoke={"scores": 64},
    ),
    # A weight tile is decoded once for all rows of a tile: the candidates with more rows decode
    # less often, with fewer outputs or inputs so that tiles still fit 99 KiB.
    "expert_prefill": Target(
        "expert_prefill",
        "expert_(?:up|down)",
        {"rows": (64, 128, 256), "outputs": (64, 128), "lanes": (16, 32), "warps": (4, 8)},
        make=experts,
        smoke={"rows": 16},
        **PREFILL,
    ),
    "dense_prefill": Target(
        "dense_prefill",
        "matmul",
        {
            "rows": (128, 256),
            "outputs": (64, 128),
            "inputs": (64, 128),
            "warps": (8, 16),
            "stages": (2, 3),
        },
        make=dense,
        smoke={"rows": 32},
        **PREFILL,
    ),
}


def compiled(
    target: Target, tried: list[dict[str, int]], rows: int, smoke: bool
) -> tuple[list[Any], tuple[Any, ...]]:
    """The operation compiled with each candidate's numbers, or why it cannot be; its arguments."""
    kernels = Kernels.INTERPRET if smoke else Kernels.PALLAS
    run, args = target.make(rows, smoke, Compute(kernels=kernels, phase=target.phase))

    def lower(sizes: dict[str, int]) -> Any:
        with choices.trying(target.sizes, **sizes):  # a function of its own, as jit keeps traces
            return jax.jit(lambda *args: run(*args)).lower(*args)

    def compile_or_explain(lowered: Any) -> Any:
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return error

    lowered = [lower(sizes) for sizes in tried]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(compile_or_explain, lowered)), args


def kernel_microseconds(kernel: str, run: Callable[[], Any]) -> float:
    """Time that a call spends in one kernel, however often and as whatever number it runs."""
    named = re.compile(rf"{kernel}(__\d+)?")
    times = kernel_times(run).items()
    return sum(count * us for name, (count, us) in times if named.fullmatch(name))


def outcome(program: Any, args: tuple[Any, ...]) -> Any:
    """What the program computes, -inf as 0, or why it cannot."""
    if isinstance(program, Exception):
        return program
    try:
        x = jax.block_until_ready(program(*args)).astype(jnp.float32)
    except jax.errors.JaxRuntimeError as error:
        return error
    return jnp.where(jnp.isfinite(x), x, 0)


def tune(name: str, target: Target, rows: int, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yields a record for every candidate, the current choice first."""
    wanted, every = None, list(target.all_candidates())
    tried = [every[0], {**every[0], **target.smoke}] if smoke else every
    programs, args = compiled(target, tried, rows, smoke)
    for number, (sizes, program) in enumerate(zip(tried, programs, strict=True)):
        record: dict[str, Any] = {"target": name, "rows": rows, "sizes": sizes, "us": None}
        begun = time.perf_counter()
        result = outcome(program, args)
        if isinstance(result, Exception):  # too large a tile; the current choice must fit
            if wanted is None:
                raise result
            yield record | {"failed": str(result).splitlines()[0][:200]}
            continue
        wanted = result if wanted is None else wanted
        error = relative_error(result, wanted)
        record |= {"error": error, "agrees": error <= TOLERANCE}
        if not smoke:
            run = lambda p=program, a=args: p(*a)  # noqa: E731
            record["us"] = round(kernel_microseconds(target.kernel, run), 2)
        seconds = round(time.perf_counter() - begun, 1)
        yield record | {"of": f"{number + 1}/{len(tried)}", "seconds": seconds}


def best(records: list[dict[str, Any]]) -> list[str]:
    """A line for each target: the current choice, and the candidate with the least sum of times."""
    lines = []
    for name in dict.fromkeys(r["target"] for r in records):
        mine = [r for r in records if r["target"] == name]
        counts, totals = {r["rows"] for r in mine}, {}
        for sizes in {tuple(r["sizes"].items()) for r in mine}:
            own = [r for r in mine if tuple(r["sizes"].items()) == sizes]
            if len(own) == len(counts) and all(r.get("agrees") and r["us"] for r in own):
                totals[sizes] = sum(r["us"] for r in own)
        now = tuple(mine[0]["sizes"].items())
        if totals:
            least = min(totals, key=lambda s: totals[s])
            lines.append(f"{name}: now {totals[now]:.1f} us, {dict(least)} {totals[least]:.1f} us")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rows", type=int, nargs="+", help="of decode kernels; all by default")
    parser.add_argument("--smoke", action="store_true", help="small, interpreted, untimed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower()).strip("_")
    out = options.out or RESULTS / f"tuning_{device}.json"
    records: list[dict[str, Any]] = []
    for name in options.only:
        target = TARGETS[name]
        decode = options.rows or target.rows
        own = (target.smoke_rows,)
        counts = own if options.smoke else decode if target.phase is Phase.DECODE else target.rows
        for rows in counts:
            for record in tune(name, target, rows, options.smoke):
                records.append(record)
                print(record, flush=True)
            if not options.smoke or options.out:
                write_results(out, records, generation=choices.generation())
    print("\n".join(best(records)))


if __name__ == "__main__":
    main()
