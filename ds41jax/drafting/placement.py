"""Which layers are timed, where their experts lie and how many bytes an expert is."""

from dataclasses import dataclass, field

MXFP4_SCALE_BYTES, NVFP4_SCALE_BYTES = 1 / 32, 1 / 16  # per value
GROUP_ROWS = 16  # rows that share one reading of an expert


def expert_bytes(
    hidden_size: int = 5120,
    width: int = 2304,
    shards: int = 1,
    scale_bytes: float = MXFP4_SCALE_BYTES,
) -> int:
    """Bytes that one of `shards` reads for a routed expert: three matrices, half a byte and a share
    of a scale per value."""
    return int(3 * hidden_size * (width / shards) * (0.5 + scale_bytes))


@dataclass(frozen=True)
class LayerClass:
    """Layers whose experts are served alike.

    Attributes:
      name: "local" or "remote", or any other.
      layers: their indices, from 1; layer 0 belongs to the round's residual.
      expert_bytes: read per expert and group of 16 rows.
      prior: microseconds per layer, per row and per megabyte, before anything is measured.
      usual_mb: megabytes that a layer reads in a usual round; sets how weak the prior is.
    """

    name: str
    layers: tuple[int, ...]
    expert_bytes: int
    prior: tuple[float, float, float]
    usual_mb: float

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"class {self.name}: layers {self.layers}, expected indices from 1")
        if self.expert_bytes <= 0:
            raise ValueError(f"class {self.name}: {self.expert_bytes} bytes per expert")


def local_layers(layers: tuple[int, ...], expert_bytes: int) -> LayerClass:
    """Layers whose experts lie in the coordinator's own device memory."""
    return LayerClass("local", layers, expert_bytes, (700.0, 15.0, 0.8), 300.0)


def remote_layers(layers: tuple[int, ...], expert_bytes: int) -> LayerClass:
    """Layers whose experts are on other machines."""
    return LayerClass("remote", layers, expert_bytes, (900.0, 15.0, 5.7), 100.0)


@dataclass(frozen=True)
class Placement:
    """The timed layers of a deployment. Without classes only whole rounds are timed."""

    classes: tuple[LayerClass, ...] = field(default=())
    num_experts: int = 384
    experts_per_token: int = 6

    def __post_init__(self) -> None:
        layers = self.layers
        if len(set(layers)) != len(layers):
            raise ValueError("a layer is in two classes")
        if len({c.name for c in self.classes}) != len(self.classes):
            raise ValueError("two classes have the same name")

    @property
    def layers(self) -> tuple[int, ...]:
        """All timed layers, class by class."""
        return tuple(layer for c in self.classes for layer in c.layers)
