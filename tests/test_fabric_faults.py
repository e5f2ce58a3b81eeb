"""Workers that hang, die, come back, lie or vanish: what fails, what goes on, and how soon."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fabric_layers import in_process, through
from fabric_workers import (
    WorkerProcess,
    fabric,
    make_wide_checkpoint,
    place,
    wide_checkpoint,
    worker_processes,
)
from oracle import assert_same

from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.library import FabricError

LAYER = 2
DEADLINE = 1.5
TCP, SHARED_MEMORY = "tcp,self", "sm,self"
WAYS = (TCP, SHARED_MEMORY)


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def stopped(process: WorkerProcess) -> Iterator[None]:
    """A worker that hangs: alive, connected, and silent."""
    os.kill(process.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if process.process.poll() is None:
            os.kill(process.process.pid, signal.SIGCONT)


def expect(connected: Fabric, seed: int, alive: tuple[int, ...] | None = None) -> None:
    """A right answer."""
    found, fault = through(connected.compute(), seed, LAYER)
    assert fault == 0, connected.report()
    assert_same(found, through(in_process(connected.placement, alive), seed, LAYER)[0])


def expect_fault(connected: Fabric, *words: str, within: float = 10.0) -> None:
    """A failure that is told apart from an answer, in time, and says who and why."""
    compute = connected.compute()
    start = time.monotonic()
    _, fault = through(compute, 1, LAYER)
    assert time.monotonic() - start < within
    assert fault != 0
    assert compute.exchange is not None
    text = compute.exchange.describe(fault)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("transports", WAYS)
def test_a_hung_worker_is_given_up_and_taken_back(transports: str) -> None:
    path, placement = wide_checkpoint(), place(wide_checkpoint(), "TP2EP1")
    with fabric(path, placement, transports, deadline=DEADLINE) as (connected, processes):
        expect(connected, 1)
        with stopped(processes[1]):
            expect_fault(connected, "expert worker 1", "no answer within 1500 ms")
            expect_fault(connected, "rank 1", within=1.0)  # at once: it is known to be down
        until(lambda: connected.up(1))
        for seed in range(3):  # late answers to the lost exchange disturb nobody
            expect(connected, seed)


def test_a_slow_worker_within_the_deadline_is_waited_for() -> None:
    placement = place(wide_checkpoint(), "TP2EP1")
    with fabric(wide_checkpoint(), placement, TCP) as (connected, processes):
        expect(connected, 1)
        with stopped(processes[0]):
            waking = threading.Timer(1.0, os.kill, (processes[0].process.pid, signal.SIGCONT))
            waking.start()
            start = time.monotonic()
            expect(connected, 2)
            assert time.monotonic() - start > 0.9


@pytest.mark.parametrize("transports", WAYS)
def test_a_worker_that_dies_comes_back_on_its_port(transports: str) -> None:
    path = wide_checkpoint()
    placement = place(path, "TP2EP1")
    with fabric(path, placement, transports, deadline=5.0) as (connected, processes):
        expect(connected, 1)
        port = int(processes[1].endpoint.rpartition(":")[2])
        processes[1].kill()
        expect_fault(connected, "rker 1" if connected.up(1) else "rank 1", within=6.0)
        again = WorkerProcess(path, placement, 1, port=port, transports=transports)
        processes.append(again.wait())
        until(lambda: connected.up(1))
        expect(connected, 3)


def test_a_worker_that_dies_while_it_is_waited_for() -> None:
    placement = place(wide_checkpoint(), "TP2EP1")
    with fabric(wide_checkpoint(), placement, TCP, deadline=20.0) as (connected, processes):
        expect(connected, 1)
        with stopped(processes[1]):
            threading.Timer(0.5, processes[1].process.kill).start()
            expect_fault(connected, "expert worker 1", within=10.0)
            processes[1].process.wait(10)


def test_a_failed_step_sends_nothing_more() -> None:
    placement = place(wide_checkpoint(), "TP2EP1")
    with fabric(wide_checkpoint(), placement, TCP) as (connected, processes):
        out, fault = through(connected.compute(), 1, LAYER, fault=7)
        assert fault == 7
        assert np.isfinite(out.astype(np.float32)).all()
        printed = [process.stop() for process in processes]
    assert all("Answered 1 frames\n" in text for text in printed)


def test_survivors_take_over_for_a_lost_group() -> None:
    """No exchange fails: the group that is left computes every expert, as it would alone."""
    placement = place(wide_checkpoint(), "TP2EP2")
    with fabric(wide_checkpoint(), placement, TCP, deadline=DEADLINE) as (connected, processes):
        expect(connected, 1)
        with stopped(processes[3]):
            expect(connected, 2, alive=(0,))  # lost on the way
            assert connected.takeovers == 1
            expect(connected, 3, alive=(0,))  # known before it starts
            assert connected.takeovers == 1
        until(lambda: connected.up(3))
        expect(connected, 4)
        with stopped(processes[0]), stopped(processes[2]):
            expect_fault(connected, "expert worker 0", "expert worker 2")


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ("topology", "topology is 'TP2EP2' here and 'TP2EP1' there"),
        ("placement", "placement is"),
        ("model", "model is"),
        ("rank", "rank is 0 here and 1 there"),
        ("rows", r"rows must be 1 to 64 \(start the worker with a larger --rows\), not 65"),
    ],
)
def test_a_worker_of_another_identity_is_not_used(
    field: str, pattern: str, tmp_path: Path, one_worker: WorkerProcess
) -> None:
    path, placement = wide_checkpoint(), place(wide_checkpoint(), "TP2EP2")
    workers = [one_worker.endpoint] * 4
    options = FabricOptions(rows=64, transports=TCP)
    if field == "topology":
        placement, workers = place(path, "TP2EP1"), workers[:2]
    elif field == "placement":
        placement = place(path, "TP2EP2", first_layer=1)
    elif field == "model":
        path = make_wide_checkpoint(tmp_path / "other", seed=1)
    elif field == "rows":
        options = FabricOptions(rows=65, transports=TCP)
    with Fabric(path, placement, workers, options) as connected:
        with pytest.raises(FabricError, match=pattern):
            connected.wait_ready(3.0)
        assert not any(map(connected.up, range(1, placement.topology.ranks)))


@pytest.fixture(scope="module")
def one_worker() -> Iterator[WorkerProcess]:
    """Rank 0 of four, alone."""
    process = WorkerProcess(
        wide_checkpoint(), place(wide_checkpoint(), "TP2EP2"), 0, transports=TCP
    )
    try:
        yield process.wait()
    finally:
        process.kill()


@pytest.mark.parametrize("transports", WAYS)
def test_leaving_and_coming_back_leaks_nothing(transports: str) -> None:
    """Coordinators that come and go: the worker has room for the next one every time."""
    path, placement = wide_checkpoint(), place(wide_checkpoint(), "TP2EP1")
    options = FabricOptions(rows=64, transports=transports)
    with worker_processes(path, placement, transports) as processes:
        endpoints = [p.endpoint for p in processes]
        sizes = []
        for turn in range(12):
            with Fabric(path, placement, endpoints, options) as connected:
                connected.wait_ready(30)
                expect(connected, turn % 2)
            pid = processes[0].process.pid
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            sizes.append((pages, len(os.listdir(f"/proc/{pid}/fd"))))
        assert sizes[-1][0] - sizes[3][0] < 8 << 20 >> 12  # 8 MB
        assert sizes[-1][1] - sizes[3][1] <= 4
