"""Traces of rounds: written, bounded, read back, replayed."""

import numpy as np
import pytest

from ds41jax.drafting import TraceWriter, make_policy, read_meta, read_rounds, replay
from ds41jax.drafting.content import Content
from ds41jax.drafting.costs import one_coordinator
from ds41jax.drafting.simulator import Simulation
from ds41jax.drafting.trace import TraceError

COST = one_coordinator(layers=4)
CONTENT = Content("code", (0.9,))


def balance():
    return make_policy("balance", placement=COST.placement)


def record(path, rounds=80, **options):
    with TraceWriter(path, meta={"model": "tiny"}, **options) as trace:
        simulation = Simulation(balance(), COST, [CONTENT] * 2, trace=trace)
        simulation.run(rounds, warmup=0)
    return simulation.policy, trace


def test_replay_of_a_trace_with_routes_is_the_run_itself(tmp_path):
    path = tmp_path / "trace.jsonl"
    policy, trace = record(path, routes=True)
    assert read_meta(path) == {"model": "tiny"}
    outcomes = list(read_rounds(path))
    assert len(outcomes) == trace.written == 80
    again = balance()
    choices = replay(again, path)
    # Lanes alternate: a lane chooses before the other's round is observed, so compare states.
    assert again.dump_state() == policy.dump_state()
    assert all(0 <= k <= 5 for lane in choices for k in lane)


def test_routes_are_left_out_by_default(tmp_path):
    record(tmp_path / "small.jsonl", rounds=20)
    record(tmp_path / "large.jsonl", rounds=20, routes=True)
    assert all(
        r.routes is None and r.draft.routes is None
        for outcome in read_rounds(tmp_path / "small.jsonl")
        for r in outcome.requests
    )
    outcome = next(read_rounds(tmp_path / "large.jsonl"))
    assert outcome.requests[0].routes.dtype == np.int64
    assert (tmp_path / "small.jsonl").stat().st_size < (tmp_path / "large.jsonl").stat().st_size


def test_a_full_trace_stops_at_a_whole_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    _, trace = record(path, rounds=50, max_bytes=4000)
    assert path.stat().st_size <= 4000
    assert trace.dropped == 50 - trace.written > 0
    assert len(list(read_rounds(path))) == trace.written > 0


def test_a_trace_is_never_overwritten(tmp_path):
    record(tmp_path / "trace.jsonl", rounds=1)
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "trace.jsonl")
    with pytest.raises(ValueError, match="header"):
        TraceWriter(tmp_path / "other.jsonl", max_bytes=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no header"),
        ("[]\n", "line 1: no header"),
        ('{"format":"ds41jax-draft-trace","version":9}\n', "line 1: version 9"),
        ('{"format":"ds41jax-draft-trace","version":1}\n{}\n', "line 2"),
        ('{"format":"ds41jax-draft-trace","version":1}\n{"a":', "line 2: cut short"),
        ('{"format":"ds41jax-draft-trace","version":1}\n7\n', "line 2"),
    ],
)
def test_bad_traces_name_the_line(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        list(read_rounds(path))
