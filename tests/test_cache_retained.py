"""The prefix cache as a whole: random histories with contents checked, eviction, pins, limits."""

import hypothesis.strategies as st
import numpy as np
import pytest
from cache_simulator import LAYOUT, WINDOW, ToyEngine
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ds41jax.cache.admission import Admission
from ds41jax.cache.host_tier import HostOptions
from ds41jax.cache.radix import Bank, Reuse
from ds41jax.cache.symbols import ImageSpan

TOKENS = st.lists(st.sampled_from([(1,), (1, 2, 3, 4), (2,) * 6, (3,) * 9]), min_size=1, max_size=4)


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def run(toy: ToyEngine, prompt: list[int], output: list[int] | None = None) -> None:
    """One request from beginning to end."""
    assert toy.submit(prompt, output or []).admission is Admission.ADMIT
    request = toy.running[-1]
    while request.pages.length < request.life.tokens:
        toy.step(request, 3, 2)
    toy.finish(request)


class CacheMachine(RuleBasedStateMachine):
    """Requests, drafts, cancels, host copies; an admitted request never lacks a page."""

    @initialize(
        mode=st.sampled_from(Reuse),
        host=st.sampled_from([None, True, False]),
        pages=st.integers(8, 60),
        prompt_bytes=st.sampled_from([None, 30]),
    )
    def build(self, mode: Reuse, host: bool | None, pages: int, prompt_bytes: int | None) -> None:
        options = None
        if host is not None:
            options = HostOptions(20, 3, min_tokens=6, write_behind=host, pacing=0.1)
        self.toy = ToyEngine(pages, mode=mode, host=options, prompt_bytes=prompt_bytes)
        self.said: list[list[int]] = []  # prompts with their outputs

    @rule(parts=TOKENS, image=st.sampled_from([b"a", b"b", b""]), output=st.integers(0, 9))
    def submit(self, parts: list[tuple[int, ...]], image: bytes, output: int) -> None:
        tokens = list(sum(parts, ()))
        spans = (ImageSpan(0, 2, image),) if image and len(tokens) > 2 else ()
        self.send(tokens, numbers(output, 50), spans)

    @rule(
        which=st.integers(0, 9),
        cut=st.integers(0, 9),
        more=st.integers(0, 9),
        output=st.integers(0, 9),
    )
    def continue_(self, which: int, cut: int, more: int, output: int) -> None:
        if self.said:
            tokens = self.said[-1 - which % len(self.said)]
            tokens = tokens[: max(1, len(tokens) - cut)] + numbers(more, 70)
            self.send(tokens, numbers(output, 90), ())

    def send(self, tokens: list[int], output: list[int], spans: tuple[ImageSpan, ...]) -> None:
        decision = self.toy.submit(tokens, output, spans)
        if decision.admission is Admission.WAIT:
            assert self.toy.running, "an idle engine must not wait"
        if not spans:
            self.said.append(tokens + output)

    @rule(which=st.integers(0, 9), width=st.integers(1, 5), accepted=st.integers(1, 5))
    def step(self, which: int, width: int, accepted: int) -> None:
        if self.toy.running:
            request = self.toy.running[which % len(self.toy.running)]
            self.toy.step(request, width, min(width, accepted))

    @rule(which=st.integers(0, 9), completed=st.booleans())
    def finish(self, which: int, completed: bool) -> None:
        if self.toy.running:
            self.toy.finish(self.toy.running[which % len(self.toy.running)], completed)

    @rule(latency=st.sampled_from([0.0, 0.3, 2.0]), start=st.booleans(), finish=st.booleans())
    def weather(self, latency: float, start: bool, finish: bool) -> None:
        copier = self.toy.copier
        copier.latency, copier.fail_start, copier.fail_finish = latency, start, finish and start

    @rule()
    def pace(self) -> None:
        if self.toy.host:
            self.toy.host.pace()
            self.toy.cache.tick()

    @rule(pages=st.integers(1, 30))
    def pressure(self, pages: int) -> None:
        available = self.toy.pool.free + self.toy.cache.evictable_pages()
        before = self.toy.cache.stats().evicted
        assert self.toy.cache.evict_for(pages) == (pages <= available)
        if pages > available:
            assert self.toy.cache.stats().evicted == before
        else:
            assert self.toy.pool.free >= pages

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "toy"):
            self.toy.check()
            stats = self.toy.cache.stats()
            assert stats.prompts <= 3 and stats.turns <= 3
            if not self.toy.running:
                free = stats.free_pages + stats.evictable_pages
                assert free == self.toy.pool.size

    def teardown(self) -> None:
        if hasattr(self, "toy"):
            for request in list(self.toy.running):
                self.toy.finish(request, False)
            assert self.toy.cache.evict_for(self.toy.pool.size)
            self.toy.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("mode", [Reuse.EXACT, Reuse.BOUNDED])
def test_a_conversation_grows_turn_by_turn(mode: Reuse) -> None:
    toy = ToyEngine(200, mode=mode)
    history = numbers(20)
    cached = []
    for turn in range(4):
        toy.submit(history, numbers(9, 100 * turn + 100))
        request = toy.running[-1]
        cached.append(request.hit.start if request.hit else 0)
        while request.pages.length < request.life.tokens:
            toy.step(request, 2, 1)
        toy.finish(request)
        history = [*request.path.tolist(), *numbers(3, 900 + turn)]
    assert cached == [0, 29, 41, 53]


def test_the_entry_about_to_be_used_is_never_evicted() -> None:
    toy = ToyEngine(200, limits=(1, 0), arena=1)
    run(toy, numbers(20))
    symbols = toy.cache.symbols(numbers(24))
    hit = toy.cache.lookup(symbols)
    assert hit is not None
    toy.cache.pin(hit)
    run(toy, numbers(30, 500))  # its own snapshot finds no place
    assert not toy.cache.evict_for(toy.pool.size)
    assert toy.cache.lookup(symbols) == hit
    toy.cache.unpin(hit)
    run(toy, numbers(30, 500))
    assert toy.cache.lookup(symbols) is None


def test_a_full_cache_still_serves_an_old_prefix() -> None:
    toy = ToyEngine(200, limits=(2, 0), arena=2)
    for start in (0, 500):
        run(toy, numbers(20, start))
    toy.submit(numbers(26), [])
    assert toy.running[-1].hit is not None and toy.running[-1].hit.start == 20


def test_snapshots_that_free_nothing_stay() -> None:
    toy = ToyEngine(60, limits=(3, 3))
    toy.submit(numbers(40), numbers(3, 100))  # its snapshot's pages are held by itself
    run(toy, numbers(8, 500))
    assert toy.cache.evict_for(toy.pool.free + 1)
    assert toy.cache.stats().prompts == 1
    assert toy.cache.lookup(toy.cache.symbols(numbers(40))) is not None


def test_snapshots_that_share_pages_go_together_only_if_they_must() -> None:
    toy = ToyEngine(100, limits=(3, 3))
    run(toy, numbers(16), numbers(8, 100))  # prompt and turn share full pages
    run(toy, numbers(8, 700))
    free = toy.pool.free
    assert toy.cache.evict_for(free + 4)
    assert toy.cache.stats().prompts + toy.cache.stats().turns >= 2


def test_old_and_short_goes_before_new_and_long() -> None:
    toy = ToyEngine(200, limits=(2, 0), arena=4)
    run(toy, numbers(4, 900))
    run(toy, numbers(40))
    run(toy, numbers(20, 500))
    assert toy.cache.lookup(toy.cache.symbols(numbers(41))) is not None
    assert toy.cache.lookup(toy.cache.symbols([*numbers(4, 900), 1])) is None


def test_byte_limits_hold_and_too_large_a_snapshot_is_not_kept() -> None:
    toy = ToyEngine(200, limits=(3, 0), prompt_bytes=30)  # a slot 10, a page 1
    run(toy, numbers(16))  # 18 bytes
    run(toy, numbers(16, 300))
    assert toy.cache.stats().prompts == 1
    run(toy, numbers(80, 600))  # 50 bytes
    assert toy.cache.stats().prompts == 1
    toy.check()


def test_switched_off_banks_keep_nothing() -> None:
    toy = ToyEngine(limits=(0, 0))
    run(toy, numbers(20), numbers(4, 100))
    assert toy.cache.stats().prompts == toy.cache.stats().turns == 0
    assert toy.pool.free == toy.pool.size


def test_the_same_key_replaces() -> None:
    toy = ToyEngine(200)
    for _ in range(3):
        run(toy, numbers(20))
    stats = toy.cache.stats()
    assert (stats.prompts, stats.turns, stats.evicted) == (1, 1, 0)


def test_chunk_boundaries_serve_exact_reuse() -> None:
    toy = ToyEngine(200, mode=Reuse.EXACT)
    symbols = toy.cache.symbols(numbers(40))
    pages = toy.cache.open()
    for end in (16, 32, 40):
        toy.cache.reserve([(pages, end)]).apply([end])
        assert toy.cache.retain(symbols, pages, Bank.PROMPT) is not None
    hit = toy.cache.lookup(np.array([*numbers(33), 7, 7], np.uint32))
    assert hit is not None and hit.start == 32 and hit.exact
    pages.release()


def test_a_tail_that_only_a_snapshot_shares_needs_no_page_in_the_end() -> None:
    toy = ToyEngine(pages=5)
    pages = toy.cache.open()
    toy.cache.reserve([(pages, 6)]).apply([6])
    assert toy.cache.retain(np.arange(6, dtype=np.uint32), pages, Bank.PROMPT) is not None
    assert toy.pool.free == 1 and len(pages.shared_tails(8)) == 3
    reservation = toy.cache.reserve([(pages, 8)])
    assert not reservation.copies and toy.cache.stats().evicted == 1
    reservation.apply([8])
    toy.cache.check([pages])


def test_window_must_fit_into_a_partial_hit() -> None:
    toy = ToyEngine(200)
    run(toy, numbers(20))
    assert toy.cache.lookup(toy.cache.symbols([*numbers(WINDOW + 1), 99])) is None
    hit = toy.cache.lookup(toy.cache.symbols([*numbers(WINDOW + 3), 99]))
    assert hit is not None and hit.start == 2 and hit.shared == WINDOW + 2
    assert [len(t) for t in hit.tables(LAYOUT)] == [1, 1, 2]
