"""Two lanes of a step: the same bits as one, and experts that are away while the other computes."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Run, assert_same, caches, page_tables, recorded, tiny_model
from test_row_independence import SLOTS, prompt, shared_batch

from ds41jax.engine import steps
from ds41jax.fabric.exchange import InProcess
from ds41jax.fabric.topology import find_topology, make_placement
from ds41jax.kernels.compute import Compute
from ds41jax.model.state import CacheShape

FIRST = 3  # layers 0 to 2 keep their experts


@functools.cache
def lanes(count: int, owners: str = "fixed", topology: str = "TP2EP2") -> Compute:
    placement = make_placement(tiny_model().config, find_topology(topology), FIRST, owners)
    return Compute(exchange=InProcess(placement), lanes=count)


@pytest.mark.parametrize("rows", [64, 33, 2, 1])
def test_a_prompt_is_the_same(rows: int) -> None:
    """Its halves pass the layers one behind the other; the caches end equal too."""
    tokens = np.resize(recorded("tiny_runs")["b27.input_ids"], 64)[:rows]
    runs = [Run(lanes(count), tokens) for count in (1, 2)]
    assert_same(runs[1].full(0, rows), runs[0].full(0, rows))
    assert_same(runs[1].state, runs[0].state)


@pytest.mark.parametrize("cut", [4, 9])
def test_sequences_beside_each_other_are_the_same(cut: int) -> None:
    """The border between the lanes falls inside a sequence, then on its end."""
    model = tiny_model()
    tables = page_tables(model.config, slots=4)[:, ::-1]
    found = []
    for count in (1, 2):
        state = caches(model, CacheShape(4, tables.size), lanes(count))
        spans = {case: (0, len(prompt(case)) - cut) for case in SLOTS}
        results = []
        for _ in range(2):
            batch = shared_batch(tables, spans, 64, 4)
            live = np.asarray(batch.sequences) < 4
            state, logits, hidden = steps.full_step(
                model.params, state, batch, model.config, lanes(count)
            )
            kept = jax.tree.map(np.array, state.pages)
            results.append((np.asarray(logits)[live], np.asarray(hidden)[live], kept))
            spans = {case: (end, end + 10) for case, (_, end) in spans.items()}
        found.append(results)
    assert_same(found[1], found[0])


@dataclass(frozen=True)
class Noting:
    """An exchange without experts that notes when it was asked and awaited, and fails if told to.

    Every note needs what the call was given, and gives what the call returns, so that none moves.
    """

    notes: list[tuple[str, int, int]] = field(default_factory=list, hash=False, compare=False)
    faults: dict[int, int] = field(default_factory=dict, hash=False, compare=False)  # by layer
    first_layer = 0
    holds_experts = False

    def send(
        self, x: jax.Array, ids: Any, weights: Any, layer: Any, live: jax.Array, fault: Any, _: Any
    ) -> Any:
        rows = jnp.sum(live.astype(jnp.int32))
        number = self._note("send", layer, rows, jnp.sum(x), fault)
        return number, jnp.asarray(layer, jnp.int32), rows, fault

    def wait(self, ticket: Any, meanwhile: Any, *_: Any) -> tuple[jax.Array, jax.Array]:
        number, layer, rows, fault = ticket
        before = sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(meanwhile))
        found = self._note("wait", layer, rows, number, before)
        sums = jnp.full(meanwhile[0].shape, found, jnp.float32)
        return sums, jnp.where(fault == 0, found, fault)

    def describe(self, fault: int) -> str:
        return f"fault {fault}"

    def _note(self, what: str, *numbers: Any) -> jax.Array:
        def note(layer: Any, rows: Any, *after: Any) -> Any:
            self.notes.append((what, int(layer), int(rows)))
            return np.int32(self.faults.get(int(layer), 0) if what == "wait" else 0)

        result = jax.ShapeDtypeStruct((), jnp.int32)
        number: jax.Array = jax.experimental.io_callback(note, result, *numbers)
        return number


def test_a_lane_waits_only_once_the_other_has_sent() -> None:
    """And the first fault of either lane is the step's."""
    exchange = Noting()
    run = Run(Compute(exchange=exchange, lanes=2), recorded("tiny_runs")["b27.input_ids"])
    layers, a, b = run.config.num_hidden_layers, 13, 12  # rows of the lanes
    run.full(0, a + b)
    expected = [("send", 0, a), ("send", 0, b)]
    for layer in range(1, layers):
        expected += [("wait", layer - 1, a), ("send", layer, a)]
        expected += [("wait", layer - 1, b), ("send", layer, b)]
    assert exchange.notes == [*expected, ("wait", layers - 1, a), ("wait", layers - 1, b)]
    assert int(run.state.fault) == 0
    exchange.faults.update({3: 7, layers - 1: 8})
    run.full(0, a + b)
    assert int(run.state.fault) == 7
    del exchange.faults[3]
    run.full(0, a + b)
    assert int(run.state.fault) == 8


def test_lanes_need_experts_to_wait_for() -> None:
    with pytest.raises(ValueError, match="2 with remote experts to wait for, not 2"):
        Compute(lanes=2)
    with pytest.raises(ValueError, match="not 3"):
        Compute(exchange=Noting(), lanes=3)
