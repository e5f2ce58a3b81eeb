"""One lane against two: steps whose experts are in other processes, and where their time went.

The coordinator has one core, the two workers of TP2EP1 share the other; on a GPU the coordinator
has the first one, and the workers share it (`--workers same`), have the second one (`other`) or
stay on the CPU. Prints a table of step times, alternating in one run, beside the same step with all
experts here, and the shares of a step in which the coordinator waited and in which workers
computed; draws one step of each kind.

    python bench/lanes.py --out bench/results/lanes.json --picture bench/results/lanes.png
"""

import argparse
import dataclasses
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from matplotlib import pyplot as plt
from timing import write_results
from tqdm import tqdm

from ds41jax.config import load_config
from ds41jax.engine import steps
from ds41jax.engine.batching import SequenceRows, build_batch
from ds41jax.engine.default_model import default_model_path
from ds41jax.engine.loading import Model, load_model
from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.library import Event, native
from ds41jax.fabric.topology import Placement, find_topology, make_placement
from ds41jax.fabric.worker import Worker
from ds41jax.kernels.compute import Compute, Phase, default_compute
from ds41jax.model.lanes import fault_of
from ds41jax.model.sharding import empty_caches
from ds41jax.model.state import PAGE_ROWS, CacheShape, KVState, StepBatch

CELLS = {  # sequences, rows of each, phase
    "prefill": (1, 256, Phase.PREFILL),
    "verification": (16, 4, Phase.DECODE),
    "decoding": (16, 1, Phase.DECODE),
}
PLACES = {
    "cpu": {"JAX_PLATFORMS": "cpu"},
    "same": {"CUDA_VISIBLE_DEVICES": "0"},
    "other": {"CUDA_VISIBLE_DEVICES": "1"},
}
CONTEXT = 512  # tokens that sequences have behind them
ROUNDS = 15


def pin(core: int) -> None:
    os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def serve(path: Path, placement: Placement, rank: int, transports: str, pipe: Any) -> None:
    """A worker process; at the end it hands its timeline over."""
    if jax.default_backend() == "cpu":
        pin(1 + rank % max(1, (os.cpu_count() or 1) - 1))
    compute = default_compute()
    worker = Worker(path, placement, rank, rows=256, transports=transports, compute=compute)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])

    def end() -> None:
        pipe.recv()
        pipe.send(native().timeline(worker.session, True))
        worker.stop()

    threading.Thread(target=end, daemon=True).start()
    worker.run(listener)


@contextmanager
def workers(
    path: Path, placement: Placement, transports: str, where: str
) -> Iterator[tuple[list[str], list[Any]]]:
    """Endpoints of all ranks, and the pipes that ask for their timelines."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    environment = PLACES[where] | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    for rank in range(placement.topology.ranks):
        mine, theirs = context.Pipe()
        arguments = (path, placement, rank, transports, theirs)
        processes.append(context.Process(target=serve, args=arguments))
        with mock.patch.dict(os.environ, environment):
            processes[-1].start()
        pipes.append(mine)
    try:
        yield [f"127.0.0.1:{pipe.recv()}" for pipe in pipes], pipes
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def make_batch(model: Model, sequences: int, rows: int) -> StepBatch:
    """Rows of sequences that have CONTEXT tokens behind them."""
    config, rng = model.config, np.random.default_rng(0)
    pages = -(-(CONTEXT + rows) // PAGE_ROWS)
    tables = np.arange(len(config.kv_source_layer_ids) * sequences * pages, dtype=np.int32)
    given = []
    for slot in range(sequences):
        tokens = rng.integers(300, config.vocab_size, CONTEXT + rows).astype(np.int32)
        flags = np.zeros(len(tokens), bool)
        assert model.engram is not None
        engram = model.engram.gather(tokens, flags, CONTEXT)
        given.append(SequenceRows(slot, CONTEXT, tokens[CONTEXT:], engram=engram))
    shape = len(config.kv_source_layer_ids), sequences, pages
    return build_batch(given, tables.reshape(shape), config, buckets=(sequences * rows,))


def make_state(model: Model, batch: StepBatch, compute: Compute) -> KVState:
    shape = CacheShape(batch.page_tables.shape[1], batch.page_tables.size)
    return empty_caches(model.config, shape, compute, model.params.norm.sharding)


class Cell:
    """One kind of step, with one lane or two, or with all experts here."""

    def __init__(self, model: Model, batch: StepBatch, compute: Compute):
        self.model, self.batch, self.compute = model, batch, compute
        self.state = make_state(model, batch, compute)
        self.seconds: list[float] = []
        self.start = self.end = 0

    def run(self) -> np.ndarray:
        """One step; returns its logits."""
        self.start = time.monotonic_ns()
        self.state, logits, _ = steps.full_step(
            self.model.params, self.state, self.batch, self.model.config, self.compute
        )
        found = np.asarray(logits)
        self.end = time.monotonic_ns()
        self.seconds.append((self.end - self.start) / 1e9)
        if self.compute.exchange is not None and int(fault_of(self.state)):
            raise RuntimeError(self.compute.exchange.describe(int(fault_of(self.state))))
        return found


def bars(moments: np.ndarray, begin: Event, end: Event, cell: Cell) -> list[tuple[float, float]]:
    """(ms after the step's start, ms long) between two moments of every wave of the cell's step."""
    inside = (moments["nanoseconds"] >= cell.start) & (moments["nanoseconds"] <= cell.end)
    moments = moments[inside]
    ends = {m["wave"]: int(m["nanoseconds"]) for m in moments[moments["event"] == end]}
    begins = moments[moments["event"] == begin]
    spans = [(int(m["nanoseconds"]), ends[m["wave"]]) for m in begins if m["wave"] in ends]
    return [((a - cell.start) / 1e6, (b - a) / 1e6) for a, b in spans]


def draw(
    path: Path, cells: dict[str, list[Cell]], here: np.ndarray, there: list[np.ndarray]
) -> None:
    """A step of every cell, with one lane above two."""
    shown = [(name, cell) for name, some in cells.items() for cell in some if cell.compute.exchange]
    figure, axes = plt.subplots(len(shown), 1, figsize=(11, 2.1 * len(shown)))
    for axis, (name, cell) in zip(axes, shown, strict=True):
        away = bars(here, Event.SENT, Event.AWAITED, cell)
        waits = bars(here, Event.AWAITED, Event.SUMMED, cell)
        count = cell.compute.lanes
        for lane in range(count):
            axis.broken_barh(away[lane::count], (2 - lane - 0.35, 0.7), color="#9ecae1")
            axis.broken_barh(waits[lane::count], (2 - lane - 0.35, 0.7), color="#de2d26")
        for rank, moments in enumerate(there):
            work = bars(moments, Event.RECEIVED, Event.ANSWERED, cell)
            axis.broken_barh(work, (-rank - 0.35, 0.7), color="#31a354")
        length = (cell.end - cell.start) / 1e6
        axis.set(xlim=(0, length), yticks=[2, 1, 0, -1])
        axis.set_yticklabels(["lane 1", "lane 2" if count == 2 else "", "worker 0", "worker 1"])
        axis.set_title(f"{name}, {count} lane{'s' * (count == 2)}: {length:.1f} ms", loc="left")
    axes[-1].set_xlabel(
        "ms. Blue: a lane's experts are away while the coordinator computes; red: it waits; "
        "green: a worker computes"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def records(cells: dict[str, list[Cell]], here: np.ndarray, there: list[np.ndarray]) -> Any:
    """What was measured of each cell; prints the table."""
    print(f"{'step':<14}{'lanes':>6}{'ms':>9}{'of one':>8}{'waiting':>9}{'worker':>8}")
    found = []
    for name, some in cells.items():
        one = statistics.median(some[0].seconds)
        for cell in some:
            length = (cell.end - cell.start) / 1e6
            waiting = sum(b for _, b in bars(here, Event.AWAITED, Event.SUMMED, cell)) / length
            busy = [
                sum(b for _, b in bars(m, Event.RECEIVED, Event.ANSWERED, cell)) / length
                for m in there
            ]
            median = statistics.median(cell.seconds)
            lanes: int | str = cell.compute.lanes if cell.compute.exchange else "here"
            print(
                f"{name:<14}{lanes:>6}{median * 1e3:>9.2f}{median / one:>8.2f}"
                f"{waiting:>8.0%} {statistics.mean(busy):>7.0%}"
            )
            found.append(
                {
                    "step": name,
                    "lanes": lanes,
                    "seconds": cell.seconds,
                    "waiting": waiting,
                    "workers_busy": busy,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--model", type=Path, help="with at least two layers; nano if left out")
    parser.add_argument("--workers", choices=sorted(PLACES), default="cpu", dest="where")
    parser.add_argument("--transports", default="tcp,self")
    args = parser.parse_args()
    load = os.getloadavg()
    path = args.model or default_model_path()
    placement = make_placement(load_config(path), find_topology("TP2EP1"))
    with workers(path, placement, args.transports, args.where) as (endpoints, pipes):
        if jax.default_backend() == "cpu":
            pin(0)
        model = load_model(path, progress=False)
        options = FabricOptions(rows=256, transports=args.transports)
        with Fabric(path, placement, endpoints, options) as fabric:
            fabric.wait_ready(120)
            cells = make_cells(model, fabric)
            for some in tqdm(cells.values(), "compiling"):
                one, two, here = (cell.run() for cell in some)
                np.testing.assert_array_equal(two, one)
                far = np.linalg.norm(one - here) / np.linalg.norm(here)
                print(f"logits differ from those of experts here by {far:.1e} of their norm")
            for _ in tqdm(range(ROUNDS), "steps"):
                for cell in (cell for some in cells.values() for cell in some):
                    cell.run()
            moments = fabric.timeline()
        for pipe in pipes:
            pipe.send("end")
        there = [pipe.recv() for pipe in pipes]
    for cell in (cell for some in cells.values() for cell in some):
        cell.seconds = cell.seconds[1:]
    found = records(cells, moments, there)
    if args.picture:
        draw(args.picture, cells, moments, there)
    if args.out:
        facts = {"load": load, "cores": os.cpu_count(), "context": CONTEXT, "workers": args.where}
        write_results(args.out, found, **facts, model=path.name, transports=args.transports)


def make_cells(model: Model, fabric: Fabric) -> dict[str, list[Cell]]:
    """For every kind of step: one lane, two lanes, all experts here."""
    cells = {}
    for name, (sequences, rows, phase) in CELLS.items():
        batch = make_batch(model, sequences, rows)
        compute = fabric.compute(default_compute()).during(phase)
        lanes = [dataclasses.replace(compute, lanes=n) for n in (1, 2)]
        every = [*lanes, dataclasses.replace(compute, exchange=None)]
        cells[name] = [Cell(model, batch, c) for c in every]
    return cells


if __name__ == "__main__":
    main()
