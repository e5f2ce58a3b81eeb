"""Host tier on a virtual clock: late copies, eviction while copying, time-outs, sharing, quota."""

from cache_simulator import ToyEngine

from ds41jax.cache.host_tier import HostOptions
from ds41jax.cache.radix import Bank


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def toy_engine(pages: int = 100, slots: int = 4, **options: object) -> ToyEngine:
    host = HostOptions(pages, slots, **{"min_tokens": 8, **options})  # type: ignore[arg-type]
    return ToyEngine(100, limits=(3, 0), host=host)


def run(toy: ToyEngine, prompt: list[int]) -> int:
    """Serves one request; tokens that it did not compute."""
    toy.submit(prompt, [])
    request = toy.running[-1]
    cached = request.hit.start if request.hit else 0
    toy.finish(request)
    return cached


def empty_device(toy: ToyEngine) -> None:
    """Evicts every snapshot, whether that frees a page or not."""
    for candidate in toy.cache._at.candidates():
        toy.cache._at.evict(candidate.entry)


def test_a_snapshot_survives_on_the_host() -> None:
    toy = toy_engine()
    run(toy, numbers(21))
    empty_device(toy)
    stats = toy.cache.stats()
    assert (stats.prompts, stats.host_entries) == (0, 1)
    assert run(toy, numbers(30)) == 21
    assert toy.cache.stats().restored == 1
    toy.check()


def test_storing_on_eviction() -> None:
    toy = toy_engine(write_behind=False)
    run(toy, numbers(21))
    assert toy.cache.stats().host_entries == 0
    empty_device(toy)
    assert toy.cache.stats().host_entries == 1 and run(toy, numbers(30)) == 21


def test_short_and_long_snapshots_are_filtered() -> None:
    assert HostOptions(1, 1).min_tokens == 512
    toy = toy_engine(max_tokens=30)
    for count in (7, 31):
        run(toy, numbers(count, 100 * count))
    empty_device(toy)
    assert toy.cache.stats().host_entries == 0


def test_a_late_copy_commits_at_a_later_tick() -> None:
    toy = toy_engine()
    toy.copier.latency = 3.0
    run(toy, numbers(20))
    assert toy.cache.stats().host_entries == 0 and toy.host and toy.host.copying == 1
    toy.copier.now += 3.0
    toy.cache.tick()
    assert toy.cache.stats().host_entries == 1


def test_eviction_waits_a_second_for_the_copy_and_no_longer() -> None:
    for latency, kept in ((0.9, 1), (1.1, 0)):
        toy = toy_engine()
        toy.copier.latency = latency
        run(toy, numbers(20))
        empty_device(toy)
        assert toy.cache.stats().host_entries == kept
        assert toy.copier.now == min(latency, 1.0)
        assert toy.host and toy.host.pool.free == 100 - (11 if kept else 0)
        toy.check()


def test_a_restore_that_times_out_falls_through_to_prefill() -> None:
    toy = toy_engine()
    run(toy, numbers(20))
    empty_device(toy)
    toy.copier.latency = 0.6
    assert run(toy, numbers(30)) == 0
    assert toy.cache.stats().failed_restores == 1
    toy.copier.latency = 0.0
    toy.check()
    empty_device(toy)
    assert run(toy, numbers(25)) == 20


def test_a_copy_that_ends_after_its_deadline_is_late() -> None:
    toy = toy_engine()
    run(toy, numbers(20))
    empty_device(toy)
    finish = toy.copier.finish

    def slow(*arguments: object) -> bool:
        toy.copier.now += 0.7
        return finish(*arguments)  # type: ignore[arg-type]

    toy.copier.finish = slow  # type: ignore[method-assign]
    assert run(toy, numbers(30)) == 0


def test_failures_cost_no_request() -> None:
    toy = toy_engine()
    toy.copier.fail_start = True
    run(toy, numbers(20))
    toy.copier.fail_start, toy.copier.fail_finish = False, True
    run(toy, numbers(20, 100))
    assert toy.cache.stats().failed_stores == 2
    toy.copier.fail_finish = False
    run(toy, numbers(20, 200))
    empty_device(toy)
    toy.copier.fail_start = True
    assert run(toy, numbers(25, 200)) == 0
    toy.check()


def test_snapshots_share_host_pages() -> None:
    toy = toy_engine()
    run(toy, numbers(16))  # 2 + 2 + 4 pages, all full
    run(toy, numbers(32))  # as many more
    assert toy.host and toy.host.pool.used == 16
    empty_device(toy)
    assert run(toy, numbers(40)) == 32
    assert toy.host.pool.used == 20  # restored pages keep their identity
    toy.check()


def test_pages_still_on_the_device_are_shared_by_a_restore() -> None:
    toy = toy_engine()
    run(toy, numbers(16))
    toy.submit(numbers(24), [])  # holds the first pages
    empty_device(toy)
    before = toy.pool.used
    assert run(toy, [*numbers(16), 99]) == 16
    assert toy.cache.stats().restored == 1 and toy.pool.used <= before + 7
    toy.check()


def test_a_page_that_grew_is_stored_again() -> None:
    toy = toy_engine()
    symbols = toy.cache.symbols(numbers(30))
    toy.submit(numbers(10), numbers(20, 10))
    request = toy.running[-1]
    empty_device(toy)  # the tail pages, no longer shared, will be extended in place
    tail = request.pages.tables[0][1]
    toy.grow(request, 14, 14)
    assert request.pages.tables[0][1] == tail
    toy.retain(request, Bank.PROMPT, logits=False)
    toy.cache.tick()
    toy.finish(request, completed=False)
    empty_device(toy)
    assert run(toy, symbols.tolist()) == 14  # its rows are verified when it is restored


def test_the_quota_holds_and_the_least_valuable_goes() -> None:
    toy = toy_engine(pages=24, slots=2)
    for start in (0, 100, 200):
        run(toy, numbers(16, start))
    assert toy.cache.stats().host_entries == 2
    run(toy, numbers(80, 300))  # 40 pages do not fit
    assert toy.cache.stats().host_entries <= 2
    toy.check()
    assert toy.host and toy.host.pool.used <= 24


def test_a_freed_host_page_is_no_longer_known_by_its_old_name() -> None:
    toy = toy_engine(slots=1)
    run(toy, numbers(16))
    run(toy, numbers(16, 100))
    toy.check()


def test_a_poor_device_hit_does_not_hide_a_full_host_hit() -> None:
    toy = toy_engine()
    run(toy, numbers(40))
    empty_device(toy)
    run(toy, numbers(8))
    assert toy.cache.lookup(toy.cache.symbols(numbers(50))).entry.end == 40  # type: ignore
    assert run(toy, numbers(50)) == 40


def test_pacing_waits_for_the_oldest_store() -> None:
    toy = toy_engine(pacing=0.5)
    toy.copier.latency = 0.8
    run(toy, numbers(20))
    assert toy.host
    toy.host.pace()
    assert toy.copier.now == 0.0
    toy.copier.now = 0.6
    toy.host.pace()
    assert abs(toy.copier.now - 0.8) < 1e-9 and toy.cache.stats().host_entries == 1
