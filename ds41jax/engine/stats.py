"""What an engine has done and holds, as plain numbers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ds41jax.engine.observer import StepTimes


@dataclass
class Counters:
    """Totals since the engine began; only the loop thread writes them.

    `times` sums where the steps' wall time went, in seconds.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted_tokens: int = 0
    prefill_steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    times: StepTimes = field(default_factory=StepTimes)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
      active, waiting: requests; max_active, max_queue: their limits.
      draining, healthy: whether new requests are refused, whether the loop is alive.
      pool_pages, free_pages: of the page pool.
      compiled_after_ready: programs compiled since readiness; anything but 0 is a fault.
      totals: counters by name.
      cache: gauges and counters of the prefix cache.
      policy: the drafting policy's own block.
    """

    active: int
    waiting: int
    max_active: int
    max_queue: int
    draining: bool
    healthy: bool
    pool_pages: int
    free_pages: int
    compiled_after_ready: int
    totals: dict[str, Any]
    cache: dict[str, Any]
    policy: dict[str, Any]
