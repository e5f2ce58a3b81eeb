"""A toy engine around the prefix cache: pages and slots hold what a real one's would stand for.

Row r of a KV source with ratio k holds the hash of the first k * (r + 1) symbols, so any missing
copy, stale page or wrong share shows as a wrong hash.
"""

from dataclasses import dataclass, field

import numpy as np

from ds41jax.cache.admission import Admission, Decision, Lifetime, decide, remaining_need
from ds41jax.cache.host_tier import HostOptions, HostTier, RestoreTicket, StoreTicket
from ds41jax.cache.pool import PageLayout, PagePool
from ds41jax.cache.radix import Bank, Reuse
from ds41jax.cache.retained import PrefixCache
from ds41jax.cache.sequence_pages import SequencePages
from ds41jax.cache.snapshots import BankLimits, CacheOptions, Hit
from ds41jax.cache.symbols import ImageSpan

LAYOUT = PageLayout((2, 2, 1), 4)  # groups of 8 tokens, 4 pages
WINDOW = 4


def prefix_hashes(symbols: np.ndarray) -> np.ndarray:
    """Hash of every prefix of length 0 .. n."""
    hashes = [0]
    for symbol in symbols.tolist():
        hashes.append(hash((hashes[-1], symbol)))
    return np.array(hashes, np.int64)


class FakeCopier:
    """Copies arrive `latency` seconds after they began, on a clock that only waiting moves."""

    def __init__(self, toy: "ToyEngine"):
        self.toy, self.latency, self.now = toy, 0.0, 0.0
        self.fail_start = self.fail_finish = False
        self.begun: dict[StoreTicket | RestoreTicket, float] = {}

    def clock(self) -> float:
        return self.now

    def start(self, ticket: StoreTicket | RestoreTicket) -> None:
        if self.fail_start:
            raise OSError("no pinned memory")
        self.begun[ticket] = self.now

    def finish(self, ticket: StoreTicket | RestoreTicket, timeout: float) -> bool:
        if self.fail_finish:
            raise OSError("the copy broke")
        wait = max(0.0, self.begun[ticket] + self.latency - self.now)
        self.now += min(wait, timeout)
        if wait > timeout:
            return False
        self.move(ticket)
        del self.begun[ticket]
        return True

    def cancel(self, ticket: StoreTicket | RestoreTicket) -> None:
        self.begun.pop(ticket, None)

    def move(self, ticket: StoreTicket | RestoreTicket) -> None:
        toy = self.toy
        if isinstance(ticket, StoreTicket):
            for copy in ticket.copies:
                toy.host_pages[copy.target, : copy.rows] = toy.pages[copy.source, : copy.rows]
                toy.host_pages[copy.target, copy.rows :] = -7
            toy.host_slots[ticket.host.slot] = toy.slots[ticket.arena_slot]
        else:
            for copy in ticket.copies:
                toy.pages[copy.target] = toy.host_pages[copy.source]
            toy.slots[ticket.arena_slot] = toy.host_slots[ticket.host.slot]


@dataclass(eq=False)
class Running:
    """An active request."""

    symbols: np.ndarray  # of its prompt, as the cache named them
    output: np.ndarray  # what it will say
    slot: int
    life: Lifetime
    pages: SequencePages
    hit: Hit | None
    path: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.path = np.concatenate([self.symbols, self.output.astype(np.uint32)])


class ToyEngine:
    """Active slots first, then the arena."""

    def __init__(
        self,
        pages: int = 40,
        active: int = 3,
        arena: int = 4,
        limits: tuple[int, int] = (3, 3),
        mode: Reuse = Reuse.BOUNDED,
        host: HostOptions | None = None,
        prompt_bytes: int | None = None,
    ):
        self.pool = PagePool(pages)
        self.copier = FakeCopier(self)
        self.host = host and HostTier(host, LAYOUT, self.pool, self.copier, self.copier.clock)
        options = CacheOptions(
            WINDOW,
            mode,
            BankLimits(limits[0], prompt_bytes),
            BankLimits(limits[1]),
            slot_bytes=10,
            page_bytes=1,
        )
        slots = range(active, active + arena)
        self.cache = PrefixCache(self.pool, LAYOUT, slots, options, self.host)
        self.pages = np.full((pages, LAYOUT.page_rows), -1, np.int64)
        self.slots = np.full(active + arena, -1, np.int64)  # hash of the tokens fed so far
        if host:
            self.host_pages = np.full((host.pages, LAYOUT.page_rows), -1, np.int64)
            self.host_slots = np.full(host.slots, -1, np.int64)
        self.free = list(range(active))
        self.running: list[Running] = []

    def submit(
        self,
        token_ids: list[int],
        output: list[int],
        spans: tuple[ImageSpan, ...] = (),
        snapshots: bool = True,
    ) -> Decision:
        """Admits a request, if it can be, and prefills its whole prompt."""
        symbols = self.cache.symbols(token_ids, spans)
        life = Lifetime(len(symbols), len(output) + 1, snapshots)
        decision = self._admit(symbols, life)
        if decision.admission is not Admission.ADMIT:
            self.cache.release_symbols(symbols)
            return decision
        request = self._begin(symbols, np.array(output), life, decision)
        self.running.append(request)
        if request.pages.length < len(symbols):
            self.grow(request, len(symbols), len(symbols))
        if decision.snapshots:
            self.retain(request, Bank.PROMPT, logits=True)
        self.cache.tick()
        return decision

    def _admit(self, symbols: np.ndarray, life: Lifetime) -> Decision:
        if not self.free:
            return Decision(Admission.WAIT)
        needs = [remaining_need(LAYOUT, r.life, r.pages) for r in self.running]
        return decide(self.cache, life, self.cache.lookup(symbols), needs)

    def _begin(
        self, symbols: np.ndarray, output: np.ndarray, life: Lifetime, decision: Decision
    ) -> Running:
        hit = decision.hit
        if hit is not None:
            self.cache.pin(hit)
            if hit.on_host and self.cache.restore(hit) is None:
                self.cache.unpin(hit)
                hit = None
        pages = self.cache.open(hit)
        slot = self.free.pop()
        self.slots[slot] = -1
        if hit is not None:
            if hit.exact:
                assert hit.arena_slot is not None
                self.slots[slot] = self.slots[hit.arena_slot]
            self.cache.unpin(hit)
        life = Lifetime(life.prompt, life.max_tokens, decision.snapshots)
        request = Running(symbols, output, slot, life, pages, hit)
        self.verify(request)
        state = prefix_hashes(request.path)[pages.length]
        if hit is not None and hit.exact:
            assert self.slots[slot] == state
        elif hit is not None:
            self.slots[slot] = state  # positions from hit.start to hit.shared are computed again
        return request

    def grow(self, request: Running, end: int, accepted: int) -> None:
        """Writes rows up to `end` tokens and commits `accepted`; the rest is garbage."""
        with_lock = self.cache.reserve([(request.pages, end)])
        for copy in with_lock.copies:
            self.pages[copy.target, : copy.rows] = self.pages[copy.source, : copy.rows]
        tables = np.full((len(LAYOUT.ratios), 64), self.pool.size)
        request.pages.write_into(tables)
        for change in with_lock.changes[0]:
            tables[change.source, change.place] = change.page
        hashes = prefix_hashes(request.path)
        for source, ratio in enumerate(LAYOUT.ratios):
            for row in range(request.pages.length // ratio, end // ratio):
                last = ratio * (row + 1)
                value = hashes[last] if last <= accepted else -99
                self.pages[tables[source, row // 4], row % 4] = value
        with_lock.apply([accepted])
        self.slots[request.slot] = hashes[accepted]
        self.verify(request)

    def step(self, request: Running, width: int, accepted: int) -> None:
        """One verification round of at most `width` rows."""
        last = min(request.life.tokens, len(request.path))
        end = min(request.pages.length + width, last)
        self.grow(request, end, min(request.pages.length + accepted, end))

    def retain(self, request: Running, bank: Bank, logits: bool) -> int | None:
        """Keeps a request's state as it is."""
        length = request.pages.length
        row = np.zeros(1, np.float32) if logits else None
        partial = request.hit is not None and not request.hit.exact
        slot = self.cache.retain(
            request.path[:length], request.pages, bank, row, approximate=partial
        )
        if slot is not None:
            self.slots[slot] = self.slots[request.slot]
        return slot

    def finish(self, request: Running, completed: bool = True) -> None:
        """Ends a request; a cancelled one is not retained."""
        if completed:
            self.retain(request, Bank.TURN, logits=False)
        self.running.remove(request)
        request.pages.release()
        self.cache.release_symbols(request.symbols)
        self.free.append(request.slot)
        self.cache.tick()

    def verify(self, request: Running) -> None:
        """Every committed row of a request is its own."""
        hashes = prefix_hashes(request.path)
        for source, ratio in enumerate(LAYOUT.ratios):
            for row in range(request.pages.length // ratio):
                page = request.pages.tables[source][row // 4]
                assert self.pages[page, row % 4] == hashes[ratio * (row + 1)]

    def check(self) -> None:
        """The books and everybody's rows."""
        self.cache.check([r.pages for r in self.running])
        for request in self.running:
            self.verify(request)
