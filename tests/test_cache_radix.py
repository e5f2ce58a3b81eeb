"""Radix index against a brute-force oracle, image identities, the worked examples."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ds41jax.cache.pool import PageLayout, PagePool
from ds41jax.cache.radix import Bank, Entry, RadixIndex, Reuse
from ds41jax.cache.retained import PrefixCache
from ds41jax.cache.sequence_pages import SequencePages, reserve
from ds41jax.cache.snapshots import CacheOptions
from ds41jax.cache.symbols import FIRST_IMAGE_SYMBOL, ImageSpan, ImageSymbols

LAYOUT = PageLayout((2, 2, 2, 1), 256)
PIECE = st.sampled_from([(1,), (2,), (1, 2, 3), (FIRST_IMAGE_SYMBOL,) * 2, (7,) * 5])
SEQUENCE = st.lists(PIECE, min_size=1, max_size=6).map(lambda parts: sum(parts, ()))


def array(symbols: object) -> np.ndarray:
    return np.array(symbols, np.uint32)


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(SEQUENCE, st.sampled_from(Bank), st.booleans()), max_size=12), SEQUENCE)
def test_matches_equal_the_oracle(
    history: list[tuple[tuple[int, ...], Bank, bool]], query: tuple[int, ...]
) -> None:
    index = RadixIndex()
    kept: dict[tuple[tuple[int, ...], Bank], Entry] = {}
    for symbols, bank, removed in history:
        entry = index.find(array(symbols), bank)
        assert entry is kept.get((symbols, bank))
        if entry is None:
            entry = kept[symbols, bank] = Entry(bank, len(symbols))
            index.insert(array(symbols), entry)
        if removed:
            index.remove(kept.pop((symbols, bank)))
        index.check()
    found = {entry: common for entry, common in index.matches(array(query))}
    assert found == {e: c for (s, _), e in kept.items() if (c := shared(s, query))}
    for (symbols, _), entry in kept.items():
        assert tuple(index.symbols(entry).tolist()) == symbols
        others = [
            len(s) if shared(s, symbols) == len(s) else max(0, shared(s, symbols) // 2 * 2 - 2)
            for (s, _), e in kept.items()
            if e is not entry
        ]
        assert index.saved(entry, 2) == len(symbols) - max(others, default=0)
    for entry in kept.values():
        index.remove(entry)
    assert not index.root.children


def cache(mode: Reuse = Reuse.BOUNDED) -> PrefixCache:
    return PrefixCache(PagePool(200), LAYOUT, range(1, 9), CacheOptions(128, mode))


def keep(
    cache: PrefixCache, symbols: np.ndarray, bank: Bank = Bank.PROMPT, logits: bool = True
) -> None:
    pages = SequencePages(cache.pool, LAYOUT)
    reserve(cache.pool, [(pages, len(symbols))]).apply([len(symbols)])
    assert cache.retain(symbols, pages, bank, np.zeros(1) if logits else None) is not None
    pages.release()


def numbers(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint32)


def test_partial_hit_of_the_upstream_example() -> None:
    c = cache()
    keep(c, numbers(512))
    query = np.concatenate([numbers(451), numbers(100, 5000)])
    hit = c.lookup(query)
    assert hit is not None
    assert (hit.shared, hit.start, hit.exact, hit.arena_slot) == (450, 322, False, None)
    assert [len(t) for t in hit.tables(LAYOUT)] == [1, 1, 1, 2]
    keep(c, numbers(384))
    hit = c.lookup(query)
    assert hit is not None and (hit.start, hit.exact) == (384, True)


def test_a_short_common_prefix_is_a_miss() -> None:
    c = cache()
    keep(c, numbers(512))
    assert c.lookup(np.concatenate([numbers(128), numbers(9, 900)])) is None
    hit = c.lookup(np.concatenate([numbers(130), numbers(9, 900)]))
    assert hit is not None and (hit.shared, hit.start) == (130, 2)


def test_the_whole_prompt_needs_saved_logits() -> None:
    c = cache()
    keep(c, numbers(300), logits=False)
    hit = c.lookup(numbers(300))
    assert hit is not None and (hit.start, hit.exact, hit.logits) == (172, False, None)
    keep(c, numbers(300))
    hit = c.lookup(numbers(300))
    assert hit is not None and hit.start == 300 and hit.logits is not None


def test_exact_mode_takes_ends_on_the_path_only() -> None:
    c = cache(Reuse.EXACT)
    keep(c, numbers(512))
    keep(c, numbers(256), logits=False)  # a chunk boundary
    hit = c.lookup(numbers(500))
    assert hit is not None and (hit.start, hit.exact) == (256, True)
    assert c.lookup(numbers(256)) is None
    assert c.lookup(numbers(500), Reuse.OFF) is None
    partial = c.lookup(numbers(500), Reuse.BOUNDED)
    assert partial is not None and partial.start == 372


def test_a_snapshot_made_by_replay_is_no_exact_frontier() -> None:
    c = cache()
    pages = SequencePages(c.pool, LAYOUT)
    reserve(c.pool, [(pages, 400)]).apply([400])
    c.retain(numbers(400), pages, Bank.TURN, approximate=True)
    assert c.lookup(numbers(600), Reuse.EXACT) is None
    hit = c.lookup(numbers(600), Reuse.BOUNDED)
    assert hit is not None and hit.exact


def test_ties_prefer_a_turn_and_then_the_most_recent_below_a_split() -> None:
    c = cache()
    for tail in (1000, 2000, 3000):
        keep(c, np.concatenate([numbers(300), numbers(50, tail)]))
    old = c.lookup(np.concatenate([numbers(300), numbers(50, 1000)]))
    assert old is not None
    c.pin(old)
    c.unpin(old)
    hit = c.lookup(np.concatenate([numbers(300), numbers(50, 4000)]))
    assert hit is not None and hit.entry is old.entry and hit.start == 172
    keep(c, numbers(400, 0), Bank.PROMPT)
    keep(c, numbers(400, 0), Bank.TURN, logits=False)
    hit = c.lookup(numbers(500))
    assert hit is not None and hit.entry.bank is Bank.TURN


def test_images_diverge_at_their_first_position_and_numbers_are_recycled() -> None:
    images = ImageSymbols()
    ids = [5, 9, 9, 9, 6]
    a = images.encode(ids, [ImageSpan(1, 4, b"a")])
    again = images.encode(ids, [ImageSpan(1, 4, b"a")])
    b = images.encode(ids, [ImageSpan(1, 4, b"b")])
    assert (a == again).all() and shared(tuple(a), tuple(b)) == 1 and len(images) == 2
    images.release(a)
    assert images.encode(ids, [ImageSpan(1, 4, b"a")])[1] == a[1]
    images.release(b)
    assert len(images) == 1
    c = images.encode(ids, [ImageSpan(1, 4, b"c")])
    assert c[1] == b[1] != a[1]


def test_a_retained_image_keeps_its_number_until_the_entry_goes() -> None:
    c = cache()
    spans = [ImageSpan(10, 290, b"cat")]
    symbols = c.symbols([1] * 300, spans)
    keep(c, symbols)
    c.release_symbols(symbols)
    same, other = c.symbols([1] * 300, spans), c.symbols([1] * 300, [ImageSpan(10, 290, b"dog")])
    assert c.lookup(same) is not None and c.lookup(other) is None
    c.release_symbols(same)
    c.release_symbols(other)
    assert c.stats().images == 1
    assert c.evict_for(c.pool.size) and c.stats().images == 0


@pytest.mark.parametrize(
    ("ids", "spans"),
    [
        ([-1], []),
        ([1 << 31], []),
        ([1, 2], [ImageSpan(1, 3, b"")]),
        ([1, 2, 3], [ImageSpan(0, 2, b""), ImageSpan(1, 3, b"")]),
        ([1, 2], [ImageSpan(1, 1, b"")]),
    ],
)
def test_bad_keys_are_refused(ids: list[int], spans: list[ImageSpan]) -> None:
    images = ImageSymbols()
    with pytest.raises(ValueError):
        images.encode(ids, spans)
    assert len(images) == 0
