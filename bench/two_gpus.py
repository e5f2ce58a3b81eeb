"""One model on two GPUs: equal results, what a sum over the cards costs, what a split gains.

Parts, each written to the JSON as soon as it is done and each failing alone (the record then holds
the error):

  equality  the tiny checkpoint's recorded logits on one card and on two
  slice     decode and prefill of three layers and the head, on one card and on two with attention,
            experts and vocabulary split, alone and together: time, and how near the logits are to
            one card's; a reader's layer with its sums and without
  sums      a sum over two cards of 1 to 2,048 rows of 5,120, alone

Another part is another function of `PARTS`. On a CPU, `--small` and
XLA_FLAGS=--xla_force_host_platform_device_count=2 try every line on a toy geometry.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from slice_programs import LAYOUTS, Job, Slice, lower, three_layers, weights, whole
from timing import relative_error, write_results

from ds41jax.config import ModelConfig, load_config
from ds41jax.formats import Numerics
from ds41jax.kernels.cards import ALL_PARTS, AXIS, Part, join_columns, sum_of_cards
from ds41jax.kernels.compute import Compute, Kernels, Phase
from ds41jax.model.params import Params
from ds41jax.model.sharding import find_cards

TESTS = Path(__file__).parent.parent / "tests"
SUM_ROWS = (1, 6, 16, 96, 2048)
CHAIN = 16  # sums in one program


@dataclasses.dataclass
class Bench:
    """What the parts share: the slice, the time left, and the record."""

    piece: Slice
    out: Path
    deadline: float
    pool: ThreadPoolExecutor
    pending: dict[Job, Future[Any]] = dataclasses.field(default_factory=dict)
    weights: dict[str, Future[Any]] = dataclasses.field(default_factory=dict)
    caches: dict[tuple[int, bool], Future[Any]] = dataclasses.field(default_factory=dict)
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    expected: dict[tuple[int, Phase], np.ndarray] = dataclasses.field(default_factory=dict)

    def add(self, part: str, **fields: Any) -> None:
        record = {"part": part, **fields}
        self.records.append(record)
        print(record, flush=True)
        write_results(self.out, self.records, devices=jax.device_count())

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def need_time(self) -> None:
        """Raises `TimeoutError` when nothing more may begin."""
        if self.left <= 0:
            raise TimeoutError("no time left")

    @contextlib.contextmanager
    def guard(self, part: str, **fields: Any) -> Iterator[None]:
        """Records an error in place of a result and goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(part, **fields, error=f"{type(error).__name__}: {error}"[:500])


def small_layers() -> ModelConfig:
    """The kinds of `three_layers` in the tiny checkpoint's sizes."""
    tiny, official = load_config(TESTS / "golden" / "tiny"), three_layers()
    kept = ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids")
    kept += ("index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids")
    kept += ("engram_num_embeddings", "num_nextn_predict_layers", "dspark_target_layer_ids")
    return dataclasses.replace(tiny, vision=None, **{k: getattr(official, k) for k in kept})


def make_slice(small: bool) -> Slice:
    if small:
        return Slice(small_layers(), Kernels.JNP, ((1, 1), (4, 2)), 512, 32)
    steps = ((1, 1), (6, 1), (16, 16), (96, 16))
    return Slice(three_layers(), Kernels.PALLAS, steps, 16384, 2048)


def step_seconds(run: Callable[[], Any], repeats: int, rounds: int = 5) -> float:
    """Median seconds of a call among `repeats` queued ones."""
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(repeats):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begun) / repeats)
    return statistics.median(times)


FORMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gather, add in order": sum_of_cards,  # what the model does
    "all-reduce": lambda x: lax.psum(x, AXIS),
    "gather columns": join_columns,
}


def sums(bench: Bench) -> None:
    """Microseconds of one of a chain of sums, by form, rows and dtype."""
    mesh = find_cards(2).mesh
    everywhere = NamedSharding(mesh, P())

    def compiled(job: tuple[str, int, Any]) -> Any:
        form, rows, dtype = job

        def chained(x: jax.Array) -> jax.Array:
            for _ in range(CHAIN):
                x = (FORMS[form](x)[:, :5120] * 0.5).astype(dtype)
            return x

        program = jax.shard_map(chained, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        x = jax.ShapeDtypeStruct((rows, 5120), dtype, sharding=everywhere)
        return jax.jit(program).lower(x).compile()

    counts = [rows for rows in SUM_ROWS if rows <= bench.piece.prefill_rows]
    jobs = [(f, r, d) for f in FORMS for d in (jnp.float32, jnp.bfloat16) for r in counts]
    programs = list(bench.pool.map(compiled, jobs))
    for (form, rows, dtype), program in zip(jobs, programs, strict=True):
        x = jax.device_put(np.ones((rows, 5120), dtype), everywhere)
        us = step_seconds(functools.partial(program, x), 4) / CHAIN * 1e6
        bench.add("sum alone", form=form, rows=rows, dtype=jnp.dtype(dtype).name, us=round(us, 2))


def begin(bench: Bench) -> None:
    """Traces every program of the slice and hands it to the compilers."""
    mesh, jobs = find_cards(2).mesh, bench.piece.jobs()
    begun = time.perf_counter()
    first = {layout: next(job for job in jobs if job.layout == layout) for layout in LAYOUTS}
    lowered = {layout: weights(bench.piece, job, mesh) for layout, job in first.items()}
    bench.weights = {k: bench.pool.submit(program.compile) for k, program in lowered.items()}
    for job in jobs:  # caches differ by the number of sequences alone
        make = jax.jit(bench.piece.caches(job), out_shardings=whole(bench.piece, job, mesh))
        key = job.sequences, LAYOUTS[job.layout] is None
        if key not in bench.caches:
            bench.caches[key] = bench.pool.submit(make.lower().compile)
    for job in jobs:
        if bench.left < bench.piece.measuring_seconds:
            bench.add("untraced", what=job.what, layout=job.layout, rows=job.rows)
            continue
        with bench.guard(job.what, layout=job.layout, rows=job.rows, phase=job.phase.value):
            program = lower(bench.piece, job, mesh)
            bench.pending[job] = bench.pool.submit(program.compile)
    bench.add("traced", programs=len(bench.pending), seconds=round(time.perf_counter() - begun, 1))


def slices(bench: Bench) -> None:
    """Every program of the slice, those of one layout after the other, with the compilers idle."""
    begun = time.perf_counter()
    done, _ = wait(bench.pending.values(), timeout=bench.left - bench.piece.measuring_seconds)
    waited = round(time.perf_counter() - begun, 1)
    bench.add("compiled", programs=len(done), of=len(bench.pending), waited=waited)
    for layout in LAYOUTS:
        params = bench.weights[layout].result(timeout=bench.left)()
        for job in (job for job in bench.pending if job.layout == layout):
            with bench.guard(job.what, layout=layout, rows=job.rows, phase=job.phase.value):
                measure(bench, job, params)
        del params
    for program in bench.pending.values():
        program.cancel()


def measure(bench: Bench, job: Job, params: Params) -> None:
    """Times a program; of a whole slice also compares the logits with one card's."""
    bench.need_time()
    patience = max(0.0, bench.left - bench.piece.measuring_seconds / 2)
    mesh, program = find_cards(2).mesh, bench.pending[job].result(timeout=patience)
    everywhere = whole(bench.piece, job, mesh)
    state = bench.caches[job.sequences, LAYOUTS[job.layout] is None].result()()
    batch, held = jax.device_put(bench.piece.batch(job), everywhere), [state]

    def run() -> jax.Array:
        held[0], out = program(params, held[0], batch)
        return out

    first = run()
    found = np.asarray(first, np.float32)
    shards = {np.asarray(shard.data).tobytes() for shard in first.addressable_shards}
    seconds = step_seconds(run, 10 if job.phase is Phase.DECODE else 3)
    fields: dict[str, Any] = {"finite": bool(np.isfinite(found).all())}
    if job.what == "slice":
        one = bench.expected.setdefault((job.rows, job.phase), found)
        fields |= {
            "equal_to_one_card": bool((found == one).all()),
            "relative_error": relative_error(jnp.asarray(found), jnp.asarray(one)),
            "same_choice": float((found.argmax(-1) == one.argmax(-1)).mean()),
            "cards_equal": len(shards) == 1,
        }
    bench.add(
        job.what,
        layout=job.layout,
        rows=job.rows,
        sequences=job.sequences,
        phase=job.phase.value,
        ms=round(seconds * 1e3, 4),
        **fields,
    )


def equality(bench: Bench) -> None:
    """The tiny checkpoint's recorded logits in float32 numerics, on one card and on two."""
    sys.path += [str(TESTS), str(TESTS / "two_cards")]
    from oracle import max_abs, recorded
    from split_runs import split_run

    golden = recorded("tiny_runs")
    one = None
    layouts = {"one card": (0, ALL_PARTS), "vocabulary": (2, frozenset({Part.VOCABULARY}))}
    for layout, (count, parts) in (layouts | {"all": (2, ALL_PARTS)}).items():
        with bench.guard("equality", layout=layout), jax.default_matmul_precision("highest"):
            bench.need_time()
            run = split_run(Compute(Numerics.FLOAT32), golden["b13.input_ids"], count, parts)
            logits, _ = run.full(0, len(run.tokens))
            one = logits if one is None else one
            bench.add(
                "equality",
                what="tiny checkpoint, 13 rows, float32",
                layout=layout,
                max_abs_to_golden=max_abs(logits, golden["b13.smooth.prefill_logits"]),
                limit=1e-3,
                equal_to_one_card=bool((logits == one).all()),
            )


PARTS: dict[str, Callable[[Bench], None]] = {
    "slice": slices,
    "sums": sums,
    "equality": equality,
}


def table(records: list[dict[str, Any]]) -> None:
    """Times of the slice, a row a layout."""
    timed = [r for r in records if r["part"] == "slice" and "ms" in r]
    columns = list(dict.fromkeys((r["rows"], r["phase"]) for r in timed))
    print(f"{'ms a step':<14}" + "".join(f"{rows:>8} {phase}" for rows, phase in columns))
    for layout in LAYOUTS:
        mine = {(r["rows"], r["phase"]): r["ms"] for r in timed if r["layout"] == layout}
        cells = "".join(f"{mine.get(c, float('nan')):>{9 + len(c[1])}.3f}" for c in columns)
        print(f"{layout:<14}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing after them")
    parser.add_argument("--compilers", type=int, default=1, help="programs compiled at once")
    parser.add_argument("--small", action="store_true", help="a toy geometry, for the CPU")
    options = parser.parse_args()
    piece = make_slice(options.small)
    if jax.device_count() < 2:
        parser.error(f"two devices are needed, JAX sees {jax.device_count()}")
    deadline = time.monotonic() + options.seconds
    pool = ThreadPoolExecutor(options.compilers)
    bench = Bench(piece, options.out, deadline, pool)
    if "slice" in options.parts:
        begin(bench)
    for name in options.parts:
        begun = time.perf_counter()
        with bench.guard(name):
            bench.need_time()
            PARTS[name](bench)
        bench.add("time", of=name, seconds=round(time.perf_counter() - begun, 1))
    table(bench.records)
    sys.stdout.flush()
    os._exit(0)  # compilers that are still at work would be waited for


if __name__ == "__main__":
    main()
