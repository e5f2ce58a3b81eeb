"""Real worker processes for the tests, and the checkpoint that they serve."""

import atexit
import contextlib
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.config import load_config
from ds41jax.engine.loading import Model, load_model
from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.library import native
from ds41jax.fabric.topology import Placement, find_topology, make_placement

WIDTH = 384  # splits into 2, 3, 4 and 6 slices of whole scales, as the released 2304 does
ROWS = 64
MAIN = "from ds41jax.cli import main; raise SystemExit(main())"
START_SECONDS = 240  # on a machine that is busy with other tests


def make_wide_checkpoint(path: Path, seed: int = 0) -> Path:
    """The tiny geometry with experts wide enough for every topology."""
    config = tiny_config()
    config["text_config"]["moe_intermediate_size"] = WIDTH
    make_checkpoint(path, config, seed=seed, progress=False)
    return path


@functools.cache
def wide_checkpoint() -> Path:
    """That checkpoint, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="ds41jax-wide-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_wide_checkpoint(folder / "checkpoint")


@functools.cache
def wide_model() -> Model:
    """All its weights in this process."""
    return load_model(wide_checkpoint(), progress=False)


def place(path: Path, topology: str, first_layer: int = 0, owners: str = "balanced") -> Placement:
    return make_placement(load_config(path), find_topology(topology), first_layer, owners)


class WorkerProcess:
    """One `ds41jax worker`; its output is kept, its port is read from it."""

    def __init__(
        self,
        path: Path,
        placement: Placement,
        rank: int,
        *,
        port: int = 0,
        transports: str | None = None,
        prefix: tuple[str, ...] = (),
        host: str = "127.0.0.1",
    ):
        command = [
            *(*prefix, sys.executable, "-c", MAIN, "worker", "--model", str(path)),
            *("--topology", placement.topology.name, "--rank", str(rank)),
            *("--first-layer", str(placement.first_layer), "--owners", placement.owners),
            *("--listen", f"{host}:{port}", "--rows", str(ROWS)),
            *(("--transports", transports) if transports else ()),
        ]
        root = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.endpoint = ""
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.append(line)
            if found := re.search(r" at (\S+:\d+), process", line):
                self.endpoint = found[1]
                self.ready.set()
        self.ready.set()

    def wait(self) -> "WorkerProcess":
        """Waits until it listens."""
        assert self.ready.wait(START_SECONDS), "the worker did not start: " + "".join(self.lines)
        assert self.endpoint, "".join(self.lines)
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def stop(self) -> str:
        """Ends it as an operator would; returns all that it printed."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._reader.join(10)
        return "".join(self.lines)


@contextlib.contextmanager
def worker_processes(
    path: Path, placement: Placement, transports: str | None = None
) -> Iterator[list[WorkerProcess]]:
    """Every rank of a placement, ready."""
    native()  # built once here rather than by every process at the same time
    ranks = range(placement.topology.ranks)
    processes = [WorkerProcess(path, placement, r, transports=transports) for r in ranks]
    try:
        for process in processes:
            process.wait()
        yield processes
    finally:
        for process in processes:
            process.kill()


@contextlib.contextmanager
def fabric(
    path: Path,
    placement: Placement,
    transports: str | None = None,
    **options: object,
) -> Iterator[tuple[Fabric, list[WorkerProcess]]]:
    """A connected coordinator and its workers."""
    made = FabricOptions(rows=ROWS, transports=transports, deadline=60.0)
    made = dataclasses.replace(made, **options)
    with worker_processes(path, placement, transports) as processes:
        endpoints = [p.endpoint for p in processes]
        with Fabric(path, placement, endpoints, made) as connected:
            connected.wait_ready(60)
            yield connected, processes
