"""The engine gives every request exactly what it gets alone, whatever runs beside it."""

import dataclasses

import numpy as np
import pytest
from engine_runs import Run, alone, options, prompt, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import recorded, tiny_model

from ds41jax.cache.radix import Reuse
from ds41jax.checkpoint.engram_tables import EngramTable
from ds41jax.checkpoint.safetensors_files import CheckpointError
from ds41jax.drafting.fixed import FixedPolicy
from ds41jax.engine.core import EngineCore
from ds41jax.engine.request import (
    EngineError,
    Failed,
    Finished,
    ImageSpan,
    Request,
    Started,
    Token,
)
from ds41jax.kernels.compute import FLOAT32

MIXED = [
    request(prompt(1, 20), 12),
    request(prompt(2, 33), 12, seed=3),
    request(prompt(3, 7), 9),
    request(prompt(4, 1), 5, seed=9),
    request(prompt(5, 64), 12),
    request(prompt(6, 100), 7, seed=1),
]


def test_batched_equals_alone():
    assert Run().all(MIXED) == [alone(r) for r in MIXED]


def test_drafts_change_nothing():
    run = Run(dspark=False)
    assert run.all(MIXED) == [alone(r) for r in MIXED]
    assert run.core.counters.drafted == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_every_draft_width_gives_the_same(limit):
    """Blocks of five and verifications of six rows corrupted other engines: each width apart."""
    run = Run(policy=FixedPolicy(limit))
    assert run.all(MIXED[:3]) == [alone(r) for r in MIXED[:3]]
    widths = run.core.speculation.policy.stats()["draft_rows_histogram"]
    assert widths[limit] > 0 and not any(widths[limit + 1 :])


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("bounded", [True, False])
def test_every_chunk_size_gives_the_same(chunk, bounded):
    requests = [request(prompt(6, 100), 4), request(prompt(5, 64), 4), request(prompt(1, 8), 4)]
    run = Run(prefill_chunk=chunk, bounded=bounded)
    assert run.all(requests) == [alone(r, bounded) for r in requests]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_any_schedule_gives_the_same(data):
    """Arrivals and cancellations at any step, over reuse in exact mode."""
    run = Run()
    cancelled = set()
    for _ in range(data.draw(st.integers(3, 8), label="requests")):
        base = prompt(data.draw(st.integers(0, 2), label="prompt"), 40)
        ids = base[: data.draw(st.integers(1, 40), label="length")]
        seed = data.draw(st.sampled_from([None, 5]), label="seed")
        number = run.add(request(ids, data.draw(st.integers(1, 6), label="tokens"), seed))
        for _ in range(data.draw(st.integers(0, 4), label="steps")):
            run.core.step()
        if data.draw(st.integers(0, 5), label="cancel") == 0:
            run.sequences[number].cancelled = True
            cancelled.add(number)
    run.finish()
    for number, sequence in enumerate(run.sequences):
        wanted = alone(sequence.request)
        got = run.tokens(number)
        assert got == wanted[: len(got)]
        assert number in cancelled or got == wanted
        assert run.last(number).reason in ("cancelled", "length", "stop")


def test_a_long_prompt_does_not_stall_the_others():
    run = Run(prefill_chunk=8)
    first = run.add(request(prompt(1, 8), 20))
    while not run.tokens(first):
        run.core.step()
    long = run.add(request(prompt(7, 120), 2))
    while not run.tokens(long):
        before = len(run.tokens(first))
        run.core.step()
        assert len(run.tokens(first)) > before or run.last(first)
    run.finish()
    assert run.tokens(first) == alone(run.sequences[first].request)


def test_a_cancelled_request_leaves_its_neighbours_alone():
    run = Run()
    numbers = [run.add(r) for r in MIXED]
    for _ in range(5):
        run.core.step()
    run.sequences[numbers[1]].cancelled = True
    run.sequences[numbers[5]].cancelled = True
    run.finish()
    assert run.last(1).reason == run.last(5).reason == "cancelled"
    for number in (0, 2, 3, 4):
        assert run.tokens(number) == alone(MIXED[number])


# ---------------------------------------------------------------------- reuse


@pytest.mark.parametrize("bounded", [True, False])
def test_exact_reuse_equals_a_cold_run(bounded):
    """Whole prompts, prompts that go on, and turns that go on; no token may change."""
    ids = prompt(8, 45)
    run = Run(bounded=bounded)
    first = request(ids, 9)
    answer = run.all([first])[0]
    assert answer == alone(first, bounded)
    following = [
        first,
        request(ids, 9, seed=4),
        request((*ids, *prompt(9, 3)), 6),
        request((*ids, *prompt(10, 30)), 6),
        request((*ids, *answer, *prompt(11, 2)), 6),
        request((*ids, *answer, *prompt(12, 20)), 6, seed=2),
    ]
    for wanted in following:
        number = run.add(wanted)
        run.finish()
        started = run.events[number][0]
        assert isinstance(started, Started) and started.cached_tokens >= len(ids)
        assert run.tokens(number) == alone(wanted, bounded)


def test_exact_reuse_restarts_inside_a_long_prompt():
    run = Run(snapshot_every=64)
    ids = prompt(13, 200)
    run.all([request(ids, 2)])
    changed = request((*ids[:150], *prompt(14, 20)), 6)
    number = run.add(changed)
    run.finish()
    assert run.events[number][0].cached_tokens == 128
    assert run.tokens(number) == alone(changed)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2049])
def test_ring_phases_survive_reuse(length):
    run = Run()
    ids = prompt(15, length)
    run.all([request(ids, 3)])
    longer = request((*ids, *prompt(16, 5)), 6)
    assert run.all([longer]) == [alone(longer)]


def test_bounded_reuse_computes_the_last_window_again():
    """The oracle's replay of a prompt that shares 45 tokens with an earlier one."""
    golden = recorded("tiny_bounded")
    prefix, ids = golden["replay0.prefix_ids"].tolist(), golden["replay0.input_ids"].tolist()
    run = Run(reuse=Reuse.BOUNDED, compute=FLOAT32)
    run.all([request(prefix, 1)])
    number = run.add(request(ids, 1, top_logprobs=20))
    run.finish()
    window = tiny_model().config.sliding_window
    assert run.events[number][0].cached_tokens == 45 // 2 * 2 - window
    first = next(e for e in run.events[number] if isinstance(e, Token))
    logits = golden["replay0.smooth.prefill_logits"][-1].astype(np.float64)
    wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    best = np.argsort(-wanted, kind="stable")[:20]
    assert [i for i, _ in first.logprobs.top] == best.tolist()
    np.testing.assert_allclose([p for _, p in first.logprobs.top], wanted[best], atol=1e-3)


def test_a_prompt_is_only_reused_with_its_own_images():
    golden = recorded("tiny_runs")
    ids, types = golden["img.input_ids"].tolist(), golden["img.token_types"]
    start = int(np.argmax(types >= 0))
    patches = golden["img.patches"].astype(np.float32)

    def with_image(patches, identity):
        image = ImageSpan(start, patches, 6, 8, identity)
        return Request(tuple(ids), 6, images=(image,))

    run = Run()
    first, other, again = (
        with_image(patches, b"a"),
        with_image(patches[::-1].copy(), b"b"),
        with_image(patches, b"a"),
    )
    tokens = run.all([first])[0]
    assert tokens[0] == golden["img.decode_tokens"][0]
    number = run.add(other)
    run.finish()
    assert run.events[number][0].cached_tokens == 0
    number = run.add(again)
    run.finish()
    assert run.events[number][0].cached_tokens == len(ids)
    assert run.tokens(number) == tokens


def test_a_snapshot_comes_back_from_host_memory():
    """The device gave everything up; the host still has the prompt, its rings and its pages."""
    # Patient: the moves compile here, which takes long on a busy machine.
    run = Run(host_snapshots=8, host_tokens=4096, host_restore_seconds=60.0)
    old = request(prompt(40, 50), 4)
    run.all([old, request(prompt(41, 30), 2)])
    while run.core.cache.host.copying:
        run.core.step()
    assert run.core.cache.evict_for(run.core.pool.size)
    number = run.add(old)
    run.finish()
    assert run.core.cache.stats().restored == 1
    assert run.events[number][0].cached_tokens == 50
    assert run.tokens(number) == alone(old)


# ---------------------------------------------------------------------- limits and faults


def test_what_cannot_ever_fit_fails_alone():
    run = Run()
    small, large = run.add(MIXED[0]), run.add(request(prompt(1, 1500), 2500))
    other = run.add(MIXED[2])
    run.finish()
    assert isinstance(run.last(large), Failed) and run.last(large).error.kind == "capacity"
    assert run.tokens(small) == alone(MIXED[0]) and run.tokens(other) == alone(MIXED[2])


def test_torture_by_a_tiny_pool():
    """Lifetimes that fill the pool two at a time, most of them cancelled: nothing leaks."""
    run = Run()
    rng = np.random.default_rng(0)
    for i in range(60):
        ids = prompt(int(rng.integers(6)), int(rng.integers(1, 60)))
        long = rng.random() < 0.5
        number = run.add(request(ids, 1400 if long else int(rng.integers(1, 5)), i % 3 or None))
        for _ in range(rng.integers(4)):
            run.core.step()
        if long:
            run.sequences[int(rng.integers(number + 1))].cancelled = True
            run.sequences[number].cancelled = rng.random() < 0.9
        run.core.check()
    for sequence in run.sequences:
        sequence.cancelled |= sequence.request.max_tokens > 5
    run.finish()
    for number, sequence in enumerate(run.sequences):
        last = run.last(number)
        assert isinstance(last, Finished)
        if last.reason != "cancelled":
            assert run.tokens(number) == alone(sequence.request)
    free = run.core.pool.free + run.core.cache.evictable_pages()
    assert free == run.core.pool.size


def test_a_broken_table_row_fails_only_who_reads_it(monkeypatch):
    run = Run()
    gather = type(run.core.model.engram).gather

    def broken(self, tokens, is_image, start):
        if 499 in tokens[start:]:
            raise CheckpointError("row 7 holds a NaN")
        return gather(self, tokens, is_image, start)

    monkeypatch.setattr(type(run.core.model.engram), "gather", broken)
    healthy = [request([t for t in r.token_ids if t != 499], 6) for r in MIXED[:3]]
    numbers = [run.add(r) for r in healthy]
    bad = run.add(request((10, 499, 11), 6))
    run.finish()
    assert isinstance(run.last(bad), Failed) and "row 7" in str(run.last(bad).error)
    assert [run.tokens(n) for n in numbers] == [alone(r) for r in healthy]


def with_broken_rows(rows):
    """The tiny model with NaN in rows of its first Engram table."""
    model = tiny_model()
    first, *others = model.engram.tables
    codes = first.codes.copy()
    codes[sorted(rows)] = 0x7F
    broken = dataclasses.replace(first, codes=codes)
    engram = dataclasses.replace(model.engram, tables=(broken, *others))
    return dataclasses.replace(model, engram=engram)


@pytest.fixture
def rows_read(monkeypatch):
    """Rows of the first Engram table that were read since it was cleared."""
    seen, first = set(), tiny_model().engram.tables[0]
    for name in ("gather", "take"):
        read = getattr(EngramTable, name)

        def noting(self, ids, read=read):
            if self is first:
                seen.update(ids.ravel().tolist())
            return read(self, ids)

        monkeypatch.setattr(EngramTable, name, noting)
    return seen


def test_a_draft_that_reads_a_broken_row_is_not_verified(rows_read):
    """Whatever lies in the rows of a wrong draft is nobody's loss."""
    Run(dspark=False).all(MIXED[:3])
    needed = set(rows_read)
    rows_read.clear()
    whole = Run()
    whole.all(MIXED[:3])
    only_drafts = rows_read - needed
    assert only_drafts
    run = Run(EngineCore(with_broken_rows(only_drafts), options()))
    assert run.all(MIXED[:3]) == [alone(r) for r in MIXED[:3]]
    assert 0 < run.core.counters.drafted < whole.core.counters.drafted


def test_a_token_that_reads_a_broken_row_fails_its_request_alone(rows_read):
    Run(dspark=False).all([MIXED[2], request(MIXED[0].token_ids, 1)])
    others = set(rows_read)
    rows_read.clear()
    Run(dspark=False).all([MIXED[0]])
    late = rows_read - others
    assert late
    run = Run(EngineCore(with_broken_rows(late), options()))
    bad, good = run.add(MIXED[0]), run.add(MIXED[2])
    run.finish()
    assert isinstance(run.last(bad), Failed) and "NaN" in str(run.last(bad).error)
    assert run.tokens(bad) == alone(MIXED[0])[: len(run.tokens(bad))] != []
    assert run.tokens(good) == alone(MIXED[2])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (512,)}, "token_ids"),
        ({"token_ids": (-1,)}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_bad_requests_are_refused_by_field(change, message):
    core = EngineCore(tiny_model(), options())
    with pytest.raises(EngineError, match=message) as caught:
        core.preparer.sequence(Request(**({"token_ids": (5,), "max_tokens": 4} | change)), print)
    assert caught.value.kind == "invalid"


@pytest.mark.parametrize(
    "change",
    [
        {"max_active": 0},
        {"max_active": 17},
        {"context": 1},
        {"pool_tokens": 1},
        {"prefill_chunk": 0},
    ],
)
def test_bad_options_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        EngineCore(tiny_model(), options(**change))


# ---------------------------------------------------------------------- what a request asks for


def test_log_probabilities_are_those_of_the_logits():
    ids = recorded("tiny_runs")["b13.input_ids"].tolist()
    run = Run(bounded=False)
    number = run.add(request(ids, 3, top_logprobs=5))
    beside = run.add(request(prompt(1, 20), 3))
    run.finish()
    first = next(e for e in run.events[number] if isinstance(e, Token))
    logits = recorded("tiny_runs")["b13.prefill_logits"][-1].astype(np.float64)
    wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    best = np.argsort(-wanted, kind="stable")[:5]
    assert [i for i, _ in first.logprobs.top] == best.tolist()
    np.testing.assert_allclose([p for _, p in first.logprobs.top], wanted[best], atol=0.05)
    assert first.logprobs.logprob == first.logprobs.top[0][1]
    assert all(e.logprobs is None for e in run.events[beside] if isinstance(e, Token))


def test_stop_tokens_end_and_the_end_token_can_be_ignored():
    wanted = alone(MIXED[0])
    run = Run()
    stop = wanted[6]
    number = run.add(request(MIXED[0].token_ids, 12, stop_token_ids=(stop,)))
    run.finish()
    assert run.tokens(number) == wanted[: wanted.index(stop) + 1]
    assert run.last(number).reason == "stop"


@pytest.mark.parametrize("dspark", [False, True])
def test_no_end_before_the_least_number_of_tokens(dspark):
    """A stop token is not chosen before; until it would have been, the output is the same."""
    wanted = alone(MIXED[0])
    stop, at = wanted[6], wanted.index(wanted[6])
    run = Run(dspark=dspark)
    short = run.add(request(MIXED[0].token_ids, 12, stop_token_ids=(stop,), min_tokens=at))
    long = run.add(request(MIXED[0].token_ids, 12, stop_token_ids=(stop,), min_tokens=at + 3))
    run.finish()
    assert run.tokens(short) == wanted[: at + 1]
    tokens = run.tokens(long)
    assert tokens[:at] == wanted[:at] and len(tokens) >= at + 3
    assert stop not in tokens[: at + 3] and 1 not in tokens[: at + 3]


def test_usage_adds_up():
    run = Run()
    numbers = [run.add(r) for r in MIXED]
    run.finish()
    counters = run.core.counters
    assert counters.prompt_tokens == sum(len(r.token_ids) for r in MIXED)
    assert counters.emitted_tokens == sum(len(run.tokens(n)) for n in numbers)
    for n, r in zip(numbers, MIXED, strict=True):
        last = run.last(n)
        assert last.prompt_tokens == len(r.token_ids)
        assert last.completion_tokens == len(run.tokens(n))
        assert 0 <= last.accepted <= last.drafted
