"""How an engine is sized: requests, rows, cache, reuse."""

from dataclasses import dataclass, field

from ds41jax.cache.host_tier import HostOptions
from ds41jax.cache.radix import Reuse
from ds41jax.config import ModelConfig
from ds41jax.drafting.fixed import FixedPolicy
from ds41jax.drafting.policy import Policy
from ds41jax.kernels.cards import ALL_PARTS, Cards, Part
from ds41jax.kernels.compute import Compute, default_compute
from ds41jax.model.sharding import check_split, find_cards
from ds41jax.model.state import PAGE_ROWS

MAX_ACTIVE = 16


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and choices of an engine; everything is allocated once, before the first request.

    Attributes:
      max_active: requests that run at once, 1 to 16.
      max_queue: requests that may wait; more are refused.
      context: positions of the longest sequence, prompt and output together.
      pool_tokens: tokens of all sequences and snapshots together that the page pool holds.
      prefill_chunk: prompt rows a step; a running request waits for one such step at most.
      bounded: prefill the layers past the last KV source on a prompt's last window only.
      dspark: draft with the checkpoint's drafter, if it has one.
      policy: how many drafts to verify.
      reuse: what a prompt may take from earlier ones.
      retained: snapshots of prompts, and as many of finished turns, kept on the device.
      host_snapshots, host_tokens: snapshots kept in host memory once the device gives them up, and
        tokens of all of them together; 0 for none.
      host_min_tokens, host_max_tokens: shorter and longer snapshots are not kept there; None for
        the window's length and for no limit.
      host_write_behind: copy a snapshot when it is made, not when the device gives it up.
      host_evict_seconds, host_restore_seconds, host_pace_seconds: patience with its copies, as
        `HostOptions` has it.
      snapshot_every: in exact reuse, tokens between snapshots inside a long prompt.
      warm_up: compile every program before the first request.
      compute: rounding and kernels; Pallas kernels on an NVIDIA GPU unless something else is given.
      cards: GPUs that hold the model together; caches are whole on each.
      split: what is split over them; each holds all of the rest.
    """

    max_active: int = MAX_ACTIVE
    max_queue: int = 64
    context: int = 4096
    pool_tokens: int = 65536
    prefill_chunk: int = 256
    bounded: bool = True
    dspark: bool = True
    policy: Policy = field(default_factory=lambda: FixedPolicy(5))
    reuse: Reuse = Reuse.BOUNDED
    retained: int = 8
    host_snapshots: int = 0
    host_tokens: int = 65536
    host_min_tokens: int | None = None
    host_max_tokens: int | None = None
    host_write_behind: bool = True
    host_evict_seconds: float = 1.0
    host_restore_seconds: float = 0.5
    host_pace_seconds: float = 0.0
    snapshot_every: int = 2048
    warm_up: bool = True
    compute: Compute = field(default_factory=default_compute)
    cards: int = 1
    split: frozenset[Part] = ALL_PARTS

    def find_cards(self) -> Cards | None:
        """The cards to split over, or None for one; raises `ValueError` if they are not there."""
        return None if self.cards == 1 else find_cards(self.cards, self.split)

    def host_options(self, config: ModelConfig, pages: int) -> HostOptions:
        """The host tier's part, with so many pages."""
        least = self.host_min_tokens
        return HostOptions(
            pages=pages,
            slots=self.host_snapshots,
            min_tokens=config.sliding_window if least is None else least,
            max_tokens=self.host_max_tokens,
            write_behind=self.host_write_behind,
            evict_wait=self.host_evict_seconds,
            restore_timeout=self.host_restore_seconds,
            pacing=self.host_pace_seconds,
        )

    def check(self, config: ModelConfig) -> None:
        """Raises `ValueError` naming the option that does not fit the model."""
        limit = config.max_position_embeddings
        checks = [
            ("max_active", 1 <= self.max_active <= MAX_ACTIVE, f"from 1 to {MAX_ACTIVE}"),
            ("max_queue", self.max_queue >= 0, "at least 0"),
            ("context", 2 <= self.context <= limit, f"from 2 to {limit}"),
            ("pool_tokens", self.pool_tokens >= 2 * PAGE_ROWS, f"at least {2 * PAGE_ROWS}"),
            ("prefill_chunk", self.prefill_chunk >= 1, "at least 1"),
            ("retained", self.retained >= 0, "at least 0"),
            ("host_snapshots", self.host_snapshots >= 0, "at least 0"),
            ("host_tokens", self.host_tokens >= PAGE_ROWS, f"at least {PAGE_ROWS}"),
            ("snapshot_every", self.snapshot_every >= 1, "at least 1"),
            ("cards", self.cards >= 1, "at least 1"),
        ]
        for name, ok, what in checks:
            if not ok:
                raise ValueError(f"{name} must be {what}, not {getattr(self, name)}")
        cards = self.find_cards()
        if cards is not None:
            check_split(config, cards)


@dataclass(frozen=True)
class RoundShape:
    """A compiled size of a decode round: sequences and rows."""

    width: int
    rows: int


def round_shapes(max_active: int, rows_each: int, adaptive: bool) -> tuple[RoundShape, ...]:
    """Sizes of decode rounds, ascending: a whole verification of each sequence, and one row each.

    A policy that always verifies what it can needs the second only for a single sequence (a first
    token, a last one): leaving the others out halves what has to be compiled.
    """
    shapes = []
    width = 1
    while True:
        width = min(width, max_active)
        if adaptive or width == 1:
            shapes.append(RoundShape(width, width))
        shapes.append(RoundShape(width, width * rows_each))
        if width == max_active:
            return tuple(dict.fromkeys(shapes))
        width *= 4


def round_shape(shapes: tuple[RoundShape, ...], sequences: int, rows: int) -> RoundShape:
    """The smallest compiled size that holds a round."""
    return next(s for s in shapes if s.width >= sequences and s.rows >= rows)
