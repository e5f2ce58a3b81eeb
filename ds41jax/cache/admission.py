"""Lifetime admission: a request begins only if every page it may ever need can be had.

Counting prompts alone fails requests mid-stream; counting shared pages as free wedges the engine
with every page live and every request one short. So each active request counts with all pages up to
its last token, less those in its tables, plus the copies of tails that it shares or will share.
"""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ds41jax.cache.pool import PageLayout
from ds41jax.cache.retained import PrefixCache
from ds41jax.cache.sequence_pages import SequencePages
from ds41jax.cache.snapshots import Hit


class Admission(enum.Enum):
    """What to do with a request now."""

    ADMIT = "admit"
    WAIT = "wait"
    NEVER = "never"  # it does not fit into the whole pool


@dataclass(frozen=True)
class Lifetime:
    """What a request may grow to.

    Attributes:
      prompt: tokens.
      max_tokens: tokens that it may emit; the last is never fed back.
      snapshots: whether it will be retained before its end, so that its tails come to be shared.
    """

    prompt: int
    max_tokens: int
    snapshots: bool = True

    @property
    def tokens(self) -> int:
        """Positions that are ever fed."""
        return self.prompt + max(0, self.max_tokens - 1)


def lifetime_pages(layout: PageLayout, life: Lifetime) -> tuple[int, ...]:
    """Pages of each source up to the last token, counting a trailing half pair as a row."""
    rows = [-(-life.tokens // ratio) for ratio in layout.ratios]
    return tuple(-(-count // layout.page_rows) for count in rows)


def remaining_need(layout: PageLayout, life: Lifetime, pages: SequencePages) -> int:
    """Pages that a running request may still ask for."""
    total = lifetime_pages(layout, life)
    missing = sum(max(0, n - len(table)) for n, table in zip(total, pages.tables, strict=True))
    return missing + _tail_copies(layout, life, pages)


def _tail_copies(layout: PageLayout, life: Lifetime, pages: SequencePages) -> int:
    """One copy a source at most: at a second snapshot, the first's tail is evictable already."""
    if life.snapshots:
        now, end = layout.rows(pages.length), layout.rows(life.tokens)
        return sum(rows < last for rows, last in zip(now, end, strict=True))
    return len(pages.shared_tails(life.tokens))


def new_need(layout: PageLayout, life: Lifetime, hit: Hit | None = None) -> int:
    """Pages that a request may ask for if it is admitted with this hit.

    A hit on the host brings no page along: those that its restore takes are counted here.
    """
    shared = (
        layout.pages(hit.shared) if hit and not hit.on_host else tuple(0 for _ in layout.ratios)
    )
    total = lifetime_pages(layout, life)
    copied = len(total) if life.snapshots or hit else 0
    return sum(max(0, n - owned) for n, owned in zip(total, shared, strict=True)) + copied


@dataclass(frozen=True)
class Decision:
    """Whether a request may begin, with which hit, and whether with snapshots before its end."""

    admission: Admission
    hit: Hit | None = None
    snapshots: bool = False


def decide(
    cache: PrefixCache, life: Lifetime, hit: Hit | None, active_needs: Sequence[int]
) -> Decision:
    """Decides on one request, given `remaining_need` of every active one.

    Where pages are short, the request is taken without snapshots of its own. An idle engine never
    waits: it takes whatever fits into the pool, if need be without the hit.
    """
    layout, pool = cache.layout, cache.pool
    if sum(lifetime_pages(layout, life)) > pool.size:
        return Decision(Admission.NEVER)
    attempts = [(hit, life.snapshots), (hit, False)]
    if not active_needs:
        attempts.append((None, False))
    for hit, snapshots in attempts:
        need = new_need(layout, dataclasses.replace(life, snapshots=snapshots), hit)
        shared = [] if hit is None else [page for table in hit.tables(layout) for page in table]
        if sum(active_needs) + need <= pool.free + cache.evictable_pages(shared):
            return Decision(Admission.ADMIT, hit, snapshots)
    return Decision(Admission.WAIT)
