"""What an observer hears: prefill progress, what became of every draft, where the time went."""

import logging

from engine_runs import Run, alone, options, prompt, request
from oracle import tiny_model

from ds41jax.drafting.threshold import ThresholdPolicy
from ds41jax.engine.engine import Engine
from ds41jax.engine.observer import DecodeRound, PrefillStep
from ds41jax.engine.request import Token


class Recorder:
    """Keeps what it is told, and the window of each prompt."""

    def __init__(self):
        self.steps: list[PrefillStep] = []
        self.rounds: list[DecodeRound] = []

    def prefilled(self, step):
        self.steps.append(step)

    def decoded(self, round):
        self.rounds.append(round)


def named(run, requests):
    """Adds requests under the names 0, 1, ..."""
    for n, r in enumerate(requests):
        run.sequences[run.add(r)].id = str(n)


def test_prefill_progress_ends_at_its_total():
    run = Run(prefill_chunk=64)
    run.core.watched.observer = seen = Recorder()
    named(run, [request(prompt(1, 150), 2), request(prompt(2, 3), 2)])
    run.finish()
    window = tiny_model().config.sliding_window
    for name, length in (("0", 150), ("1", 3)):
        steps = [s for s in seen.steps if s.request_id == name]
        total = length + min(length, window)
        assert [s.done for s in steps][-1] == total == sum(s.rows for s in steps)
        assert all(s.total == total for s in steps)
        assert sorted(s.done for s in steps) == [s.done for s in steps]
    run.core.watched.observer = seen = Recorder()
    named(run, [request((*prompt(1, 150), 11, 12), 2)])
    run.finish()
    assert seen.steps[0].done > 150 and seen.steps[0].rows == 2  # the rest was in the cache


def test_rounds_account_for_every_draft_and_token():
    requests = [request(prompt(1, 20), 12), request(prompt(2, 9), 10, seed=3)]
    run = Run(policy=ThresholdPolicy(5))
    run.core.watched.observer = seen = Recorder()
    named(run, requests)
    run.finish()
    for n, r in enumerate(requests):
        tokens, position = alone(r), len(r.token_ids) + 1  # the prefill emitted the first one
        mine = [m for one in seen.rounds for m in one.requests if m.request_id == str(n)]
        assert sum((m.emitted for m in mine), ()) == tuple(tokens[1:]) == tuple(run.tokens(n)[1:])
        for m in mine:
            assert m.position == position and m.emitted[: m.accepted] == m.accepted_ids
            assert len(m.emitted) == m.accepted + 1 <= m.verified + 1 <= len(m.drafted) + 1
            assert m.accepted_ids + m.rejected_ids == m.drafted[: m.verified]
            position += len(m.emitted)
    counters = run.core.counters
    every = [m for one in seen.rounds for m in one.requests]
    assert sum(m.verified for m in every) == counters.drafted > 0
    assert sum(m.accepted for m in every) == counters.accepted
    for one in seen.rounds:
        assert one.rows == sum(1 + m.verified for m in one.requests) <= one.padded_rows
        times = vars(one.times)
        assert all(t >= 0 for t in times.values()) and times["build"] > 0 and times["emit"] > 0
    assert [one.policy["rounds"] for one in seen.rounds] == [*range(1, len(seen.rounds) + 1)]
    assert seen.rounds[-1].policy["mode"] == "threshold"


def test_an_engine_is_observed_and_left_alone_again(caplog):
    class Broken(Recorder):
        def decoded(self, round):
            super().decoded(round)
            raise RuntimeError("no more")

    wanted = request(prompt(1, 20), 8)
    with Engine(tiny_model(), options()) as engine:
        engine.observe(broken := Broken())
        with caplog.at_level(logging.ERROR):
            handle = engine.submit(wanted)
            assert [e.token_id for e in handle if isinstance(e, Token)] == alone(wanted)
        assert broken.steps[0].request_id == handle.id
        assert len(broken.rounds) == 1 and "no more" in caplog.text
        engine.observe(seen := Recorder())
        list(engine.submit(wanted))
        engine.observe(None)
        told = len(seen.rounds)
        list(engine.submit(wanted))
        assert len(seen.rounds) == told > 0
        times = engine.stats().totals["times"]
        assert set(times) == {"choose", "build", "dispatch", "wait", "emit"}
        assert min(times.values()) > 0
