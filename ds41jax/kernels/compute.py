"""Static choices of how the model computes: which rounding, which kernels."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ds41jax.formats import Format, Numerics, QuantizedArray, values
from ds41jax.formats.numerics import straight_through
from ds41jax.kernels.cards import Cards, Part


class Kernels(enum.Enum):
    """Which implementation of the operations runs. JNP is their definition and runs everywhere.

    PALLAS is for GPUs; INTERPRET runs the same kernels in JAX's interpreter, for tests.
    """

    JNP = "jnp"
    PALLAS = "pallas"
    INTERPRET = "interpret"


class Phase(enum.Enum):
    """What a step's rows are for; it may choose between kernels, the number of rows never does."""

    DECODE = "decode"
    PREFILL = "prefill"


class Exchange(Protocol):
    """Routed experts that are computed elsewhere. Hashable; see `fabric.exchange` for its forms.

    Attributes:
      first_layer: layers from here on go through the exchange, those below do not.
      holds_experts: whether the weights of all experts are in the parameters all the same.
    """

    @property
    def first_layer(self) -> int: ...

    @property
    def holds_experts(self) -> bool: ...

    def send(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        layer: jax.Array | int,
        live: jax.Array,
        fault: jax.Array,
        compute: "Compute",
    ) -> Any:
        """Starts an exchange of rows [T, D] with choices [T, K]; returns what `wait` takes."""

    def wait(
        self,
        ticket: Any,
        meanwhile: tuple[Any, ...],
        experts: Any,
        limit: float,
        compute: "Compute",
    ) -> tuple[jax.Array, jax.Array]:
        """The experts' sums [T, D] float32 and the fault, once `meanwhile` is computed."""

    def describe(self, fault: int) -> str:
        """What a fault that is not 0 was, for people."""


@dataclass(frozen=True)
class Compute:
    """Passed to every function of the model as a static argument.

    `differentiable` is for training: the definitions in a form that `jax.grad` takes and that runs
    whole batches at once. Quantisers round as ever, with straight-through gradients, but hand on
    float32 values instead of codes; a row's bits may depend on the rows beside it. Of the kernels
    only those that need no gradient run.

    With `cards`, the functions run inside `shard_map` over them. With `exchange`, routed experts of
    the layers that it names are computed elsewhere; with two `lanes` one half of a step's rows is
    computed here while the other half's experts are away.
    """

    numerics: Numerics = Numerics.REFERENCE
    kernels: Kernels = Kernels.JNP
    phase: Phase = Phase.DECODE
    differentiable: bool = False
    cards: Cards | None = None
    exchange: Exchange | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        if self.kernels is not Kernels.JNP and self.numerics is not Numerics.REFERENCE:
            raise ValueError(
                f"the kernels round as trained, so not {self.numerics.value!r} numerics"
            )
        if self.exchange is not None and self.numerics is not Numerics.REFERENCE:
            raise ValueError(
                f"rows go to remote experts in FP8, so not with {self.numerics.value!r} numerics"
            )
        if self.exchange is not None and self.exchange.holds_experts and self.splits(Part.EXPERTS):
            raise ValueError(
                "an exchange that computes experts here needs them whole on every card"
            )
        if self.lanes not in ((1, 2) if self.exchange else (1,)):
            raise ValueError(
                f"lanes must be 1, or 2 with remote experts to wait for, not {self.lanes}"
            )

    @property
    def defined(self) -> "Compute":
        """The same with the operations' definitions, for what has no kernel."""
        return dataclasses.replace(self, kernels=Kernels.JNP)

    @property
    def on_gpu(self) -> bool:
        """Whether the operations run as Pallas kernels."""
        return self.kernels is not Kernels.JNP and not self.differentiable

    @property
    def selecting(self) -> "Compute":
        """The same for choices of the best few, which no gradient passes."""
        return dataclasses.replace(self, differentiable=False)

    @property
    def keeps_codes(self) -> bool:
        """Whether quantised values are held as codes, not as float32 values."""
        return self.numerics is Numerics.REFERENCE and not self.differentiable

    def splits(self, part: Part) -> bool:
        """Whether this card holds only its share of `part`."""
        return self.cards is not None and self.cards.splits(part)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations between operations."""
        return self.numerics.dtype

    def round(self, x: jax.Array) -> jax.Array:
        """See `Numerics.round`."""
        return self.numerics.round(x)

    def quantize(self, x: jax.Array, format: Format) -> QuantizedArray | jax.Array:
        """See `Numerics.quantize`."""
        if self.differentiable:
            x = x.astype(jnp.float32)
            return straight_through(x, self.numerics.fake_quantize(x, format))
        return self.numerics.quantize(x, format)

    def fake_quantize(self, x: jax.Array, format: Format) -> Any:
        """See `Numerics.fake_quantize`."""
        return values(self.quantize(x, format))

    def during(self, phase: Phase) -> "Compute":
        """The same for rows of a phase."""
        return dataclasses.replace(self, phase=phase)


def default_kernels(numerics: Numerics = Numerics.REFERENCE) -> Kernels:
    """PALLAS if JAX runs on an NVIDIA GPU and the numerics have kernels, else JNP."""
    cuda = "cuda" in jax.devices()[0].client.platform_version.lower()
    return Kernels.PALLAS if cuda and numerics is Numerics.REFERENCE else Kernels.JNP


def default_compute() -> Compute:
    """Rounding as trained, on the kernels of this machine."""
    return Compute(kernels=default_kernels())


REFERENCE = Compute()
FLOAT32 = Compute(Numerics.FLOAT32)
