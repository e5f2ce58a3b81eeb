"""The engine over worker processes: the same tokens as over the same topology in one process.

Drafts, seeds, prefixes, lanes and several requests at once included; and what happens to requests
when workers are lost and come back.
"""

import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
from engine_runs import Run, options, prompt, request
from fabric_workers import (
    ROWS,
    WorkerProcess,
    fabric,
    place,
    wide_checkpoint,
    wide_model,
    worker_processes,
)
from oracle import tiny_model
from paths import GOLDEN
from test_fabric_faults import stopped, until

from ds41jax.engine.core import EngineCore
from ds41jax.engine.loading import Model, load_model
from ds41jax.engine.request import Failed, Finished
from ds41jax.engine.session import Session
from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.exchange import InProcess
from ds41jax.fabric.topology import TOPOLOGIES, Placement, find_topology, make_placement
from ds41jax.formats import Numerics
from ds41jax.kernels.compute import Compute

TINY = GOLDEN / "tiny"
FIRST = 3  # layers 0 to 2 keep their experts
TCP = "tcp,self"


def placement(name: str) -> Placement:
    return make_placement(tiny_model().config, find_topology(name), FIRST)


@cache
def part() -> Model:
    """The tiny model without the experts of the remote layers."""
    return load_model(TINY, progress=False, local_layers=FIRST)


def engine_run(model: Model, compute: Compute, dspark: bool = True) -> Run:
    return Run(EngineCore(model, options(compute=compute, dspark=dspark)))


def conversation(run: Run) -> list[list[int]]:
    """Two at once, one of them seeded; then one that repeats a prompt, and one that goes on."""
    first, second = prompt(1, 40), prompt(2, 21)
    out = run.all([request(first, 6), request(second, 6, seed=3)])
    out += run.all([request(first, 6), request([*first, *out[0], 77, 78], 5, seed=4)])
    return out


@pytest.fixture(scope="module")
def lent() -> Iterator[tuple[Fabric, list[WorkerProcess]]]:
    """TP2EP1, for the tests of this module."""
    made = placement("TP2EP1")
    with worker_processes(TINY, made, TCP) as processes:
        endpoints = [p.endpoint for p in processes]
        settings = FabricOptions(rows=ROWS, transports=TCP, deadline=5.0)
        with Fabric(TINY, made, endpoints, settings) as connected:
            connected.wait_ready(60)
            yield connected, processes


def test_tokens_equal_those_of_one_process(lent: tuple[Fabric, list[WorkerProcess]]) -> None:
    connected, _ = lent
    assert part().params.layers.ffn.experts.w1.codes.shape[0] == FIRST
    expected = conversation(
        engine_run(tiny_model(), Compute(exchange=InProcess(placement("TP2EP1"))))
    )
    drafted = engine_run(part(), connected.compute())
    assert conversation(drafted) == expected
    assert drafted.core.counters.drafted > 0
    assert drafted.core.counters.cached_tokens > 0
    in_lanes = dataclasses.replace(connected.compute(), lanes=2)
    assert conversation(engine_run(part(), in_lanes, dspark=False)) == expected


def test_only_the_requests_of_a_lost_round_fail(
    lent: tuple[Fabric, list[WorkerProcess]],
) -> None:
    connected, processes = lent
    run = engine_run(part(), connected.compute())
    ids = prompt(5, 12)
    (expected,) = run.all([request(ids, 6)])
    lost = [run.add(request(prompt(n, 9), 40)) for n in (6, 7)]
    while not all(run.tokens(n) for n in lost):
        run.core.step()
    with stopped(processes[1]):
        run.core.step()
    for number in lost:
        failed = run.last(number)
        assert isinstance(failed, Failed)
        assert failed.error.kind == "unavailable"
        assert "expert worker 1: no answer within 5000 ms" in str(failed.error)
    until(lambda: connected.up(1))
    assert run.all([request(ids, 6)]) == [expected]


def test_a_prompt_that_is_lost_fails_alone(lent: tuple[Fabric, list[WorkerProcess]]) -> None:
    """A chunk of a prompt is a step of its own; who is only decoding goes on."""
    connected, processes = lent
    run = engine_run(part(), connected.compute())
    ids = prompt(8, 12)
    (expected,) = run.all([request(ids, 8)])
    decoding = run.add(request(ids, 8))
    run.core.step()
    assert 1 <= len(run.tokens(decoding)) < 8
    lost = run.add(request(prompt(10, 50), 4))
    with stopped(processes[0]):
        run.core.step()
    assert isinstance(run.last(lost), Failed)
    until(lambda: connected.up(0))
    run.finish()
    assert isinstance(run.last(decoding), Finished)
    assert run.tokens(decoding) == expected


def test_a_lost_group_costs_no_request() -> None:
    made = placement("TP2EP2")
    with worker_processes(TINY, made, TCP) as processes:
        endpoints = [p.endpoint for p in processes]
        settings = FabricOptions(rows=ROWS, transports=TCP, deadline=2.0)
        with Fabric(TINY, made, endpoints, settings) as connected:
            connected.wait_ready(60)
            run = engine_run(part(), connected.compute(), dspark=False)
            numbers = [run.add(request(prompt(n, 15), 8)) for n in (11, 12)]
            while not all(run.tokens(n) for n in numbers):
                run.core.step()
            processes[2].kill()
            run.finish()
            assert all(isinstance(run.last(n), Finished) for n in numbers)
            assert all(len(run.tokens(n)) == 8 for n in numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "transports"),
    [(name, (TCP, "sm,self")[i % 2]) for i, name in enumerate(sorted(TOPOLOGIES))],
)
def test_every_topology_serves_requests(name: str, transports: str) -> None:
    path, made = wide_checkpoint(), place(wide_checkpoint(), name, FIRST)
    expected = conversation(engine_run(wide_model(), Compute(exchange=InProcess(made))))
    with fabric(path, made, transports) as (connected, _):
        assert conversation(engine_run(wide_model(), connected.compute())) == expected


def test_options_that_do_not_go_together() -> None:
    exchange = InProcess(placement("TP2EP1"))
    with pytest.raises(ValueError, match="rows go to remote experts in FP8"):
        dataclasses.replace(Compute(exchange=exchange), numerics=Numerics.FLOAT32)
    with pytest.raises(ValueError, match="use Engine for remote ones"):
        Session(tiny_model(), 64, Compute(exchange=exchange))
