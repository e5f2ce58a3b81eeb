"""Two devices that hold the model, and workers that hold its experts.

Run by `tests/test_two_cards.py` in a process that has two devices.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from fabric_workers import ROWS, WorkerProcess, worker_processes
from oracle import Run, assert_same, recorded, rel_rms, tiny_model
from paths import GOLDEN
from split_runs import cards_agree, layout_name, split_run
from test_fabric_faults import stopped

from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.exchange import InProcess
from ds41jax.fabric.topology import find_topology, make_placement
from ds41jax.kernels.cards import ALL_PARTS, Part
from ds41jax.kernels.compute import Compute
from ds41jax.model.sharding import find_cards

FIRST = 3  # layers 0 to 2 keep their experts
TCP = "tcp,self"
TOKENS = recorded("tiny_runs")["b27.input_ids"]


@pytest.fixture(scope="module")
def lent() -> Iterator[tuple[Fabric, list[WorkerProcess]]]:
    made = make_placement(tiny_model().config, find_topology("TP2EP1"), FIRST)
    path = GOLDEN / "tiny"
    with worker_processes(path, made, TCP) as processes:
        endpoints = [p.endpoint for p in processes]
        options = FabricOptions(rows=ROWS, transports=TCP, deadline=5.0, lanes=2)
        with Fabric(path, made, endpoints, options) as connected:
            connected.wait_ready(60)
            yield connected, processes


def results(run: Run) -> np.ndarray:
    """Logits of a prompt in two lanes, and of a row that follows."""
    logits, _ = run.full(0, len(TOKENS))
    return np.concatenate([logits, run.append(7)[0][None]])


@pytest.mark.parametrize("parts", [frozenset({Part.VOCABULARY}), ALL_PARTS], ids=layout_name)
def test_workers_serve_two_cards(
    lent: tuple[Fabric, list[WorkerProcess]], parts: frozenset[Part]
) -> None:
    """A split vocabulary changes no bit; split sums stay as near as they do without workers."""
    connected, processes = lent
    one = results(Run(connected.compute(), TOKENS))
    run = split_run(connected.compute(), TOKENS, 2, parts)
    two = results(run)
    assert cards_agree(run.state)
    if parts == ALL_PARTS:
        assert 0 < rel_rms(two, one) < 0.05
    else:
        assert_same(two, one)
    with stopped(processes[1]):
        run.append(8)
    assert int(run.state.fault) != 0
    assert "expert worker 1" in connected.compute().exchange.describe(int(run.state.fault))
    assert cards_agree(run.state.fault)
    connected.wait_ready(60)
    run.append(8)
    assert int(run.state.fault) == 0


def test_experts_in_this_process_stay_whole() -> None:
    exchange = InProcess(make_placement(tiny_model().config, find_topology("TP2EP1"), FIRST))
    with pytest.raises(ValueError, match="stay whole on every card"):
        Compute(exchange=exchange, cards=find_cards(2))
