"""Lifetime admission: the arithmetic, the mid-stream failure, the wedge, the idle engine."""

import pytest
from cache_simulator import ToyEngine

from ds41jax.cache.admission import (
    Admission,
    Lifetime,
    decide,
    lifetime_pages,
    new_need,
    remaining_need,
)
from ds41jax.cache.pool import PageLayout, PagePool
from ds41jax.cache.sequence_pages import SequencePages, reserve

OFFICIAL = PageLayout((2, 2, 2, 1), 256)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages"),
    [
        (1, 1, (1, 1, 1, 1)),
        (512, 1, (1, 1, 1, 2)),
        (512, 2, (2, 2, 2, 3)),
        (256, 257, (1, 1, 1, 2)),
        (2049, 0, (5, 5, 5, 9)),
    ],
)
def test_lifetime_pages(prompt: int, max_tokens: int, pages: tuple[int, ...]) -> None:
    assert lifetime_pages(OFFICIAL, Lifetime(prompt, max_tokens)) == pages


def test_need_counts_owned_pages_and_tails() -> None:
    pool = PagePool(100)
    pages = SequencePages(pool, OFFICIAL)
    life = Lifetime(600, 425, snapshots=False)  # 1,024 tokens: 2 + 2 + 2 + 4 pages
    assert new_need(OFFICIAL, life) == 10
    reserve(pool, [(pages, 600)]).apply([600])
    assert remaining_need(OFFICIAL, life, pages) == 1
    sharer = SequencePages.sharing(pool, OFFICIAL, pages.tables, 600)
    assert remaining_need(OFFICIAL, life, pages) == 5
    sharer.release()
    assert remaining_need(OFFICIAL, Lifetime(600, 425), pages) == 5
    reserve(pool, [(pages, 1024)]).apply([1024])
    assert remaining_need(OFFICIAL, Lifetime(600, 425), pages) == 0


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_prompts_that_fit_but_outputs_that_do_not_wait() -> None:
    toy = ToyEngine(pages=16)  # 32 tokens
    first = toy.submit(numbers(8), numbers(15, 50), snapshots=False)
    second = toy.submit(numbers(8, 100), numbers(15, 150), snapshots=False)
    assert (first.admission, second.admission) == (Admission.ADMIT, Admission.WAIT)
    request = toy.running[0]
    while request.pages.length < request.life.tokens:
        toy.step(request, 4, 1)  # never lacks a page
    toy.finish(request)
    second = toy.submit(numbers(8, 100), numbers(15, 150), snapshots=False)
    assert second.admission is Admission.ADMIT


def test_shared_pages_do_not_count_as_free() -> None:
    toy = ToyEngine(pages=20, active=3)
    toy.submit(numbers(16), [])
    toy.finish(toy.running[-1])  # 8 pages, retained
    decisions = [toy.submit(numbers(16), numbers(n, 100 * n)).admission for n in (13, 14, 15)]
    assert decisions == [Admission.ADMIT, Admission.WAIT, Admission.WAIT]
    for request in list(toy.running):
        while request.pages.length < request.life.tokens:
            toy.step(request, 5, 5)
    toy.check()


def test_what_never_fits_is_refused_and_an_idle_engine_never_waits() -> None:
    toy = ToyEngine(pages=16)
    assert toy.submit(numbers(33), []).admission is Admission.NEVER
    decision = toy.submit(numbers(32), [])  # leaves no page for a copy
    assert (decision.admission, decision.snapshots) == (Admission.ADMIT, False)
    toy.finish(toy.running[-1])
    decision = toy.submit(numbers(31), [7])  # the retained turn's tail could not be copied
    assert decision.admission is Admission.ADMIT
    request = toy.running[-1]
    toy.step(request, 1, 1)
    assert request.pages.length == 32


def test_a_decision_changes_nothing() -> None:
    toy = ToyEngine(pages=16)
    before = toy.cache.stats()
    decide(toy.cache, Lifetime(8, 8), None, [])
    assert toy.cache.stats() == before
