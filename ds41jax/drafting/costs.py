"""What rounds cost in the simulator: published latencies of the seed systems, or a single device.

A layer is a turn on the coordinator (attention) and then a turn where its experts lie. The expert
turns use the published numbers: a worker takes 160 us and 22 us per group of rows on an expert; a
resident layer 160 us, 36 us per group and 6.6 us per row. The coordinator's turns are ours, set so
that one row without drafts takes the published 16.7 ms of a round.
"""

from dataclasses import dataclass, field

from ds41jax.drafting.placement import Placement, expert_bytes, local_layers, remote_layers


@dataclass(frozen=True)
class LayerCost:
    """Microseconds of a layer's experts: fixed, per group of up to 16 rows, and per row."""

    fixed: float
    per_group: float
    per_row: float = 0.0
    remote: bool = True

    def us(self, groups: int, rows: int) -> float:
        return self.fixed + self.per_group * groups + self.per_row * rows


WORKER = LayerCost(160.0, 22.0)
RESIDENT = LayerCost(160.0, 36.0, 6.6, remote=False)


@dataclass(frozen=True)
class RoundCost:
    """A deployment's costs in microseconds.

    Attributes:
      layers: per layer, where its experts are and what they cost.
      attention: fixed and per row, a layer's turn on the coordinator.
      round: fixed, per row and per request, outside the layers.
      draft: per round at width 5, and what width 7 adds.
      timed: layers are timed one by one and routes are seen; else the policy sees whole rounds.
      jitter: relative standard deviation of an expert turn; stalls: chance of a round to lose
        `stall_us` once.
    """

    name: str
    layers: tuple[LayerCost, ...]
    attention: tuple[float, float] = (100.0, 4.0)
    round: tuple[float, float, float] = (1000.0, 140.0, 200.0)
    draft: tuple[float, float] = (2900.0, 450.0)
    timed: bool = True
    jitter: float = 0.03
    stalls: float = 0.0
    stall_us: float = 50_000.0
    placement: Placement = field(default_factory=Placement)

    def draft_us(self, width: int) -> float:
        return self.draft[0] + (self.draft[1] if width > 5 else 0.0)


def one_coordinator(layers: int = 40) -> RoundCost:
    """All experts on four workers, tensor-parallel."""
    remote = remote_layers(tuple(range(1, layers)), expert_bytes(shards=4))
    return RoundCost("remote", (WORKER,) * layers, placement=Placement((remote,)))


def two_devices(layers: int = 40) -> RoundCost:
    """The first half of the layers on the coordinator's two devices, the rest on workers."""
    half = layers // 2
    local = local_layers(tuple(range(1, half)), expert_bytes(shards=2))
    remote = remote_layers(tuple(range(half, layers)), expert_bytes(shards=4))
    return RoundCost(
        "mixed",
        (RESIDENT,) * half + (WORKER,) * (layers - half),
        placement=Placement((local, remote)),
    )


def single_device(layers: int = 40) -> RoundCost:
    """All experts resident and the round one program: only its whole time is seen."""
    return RoundCost("resident", (RESIDENT,) * layers, timed=False)
