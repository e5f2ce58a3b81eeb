"""Static choices of how the model computes: which rounding, which kernels."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ds41jax.formats import Format, Numerics, QuantizedArray


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


@dataclass(frozen=True)
class Compute:
    """Passed to every function of the model as a static argument."""

    numerics: Numerics = Numerics.REFERENCE
    kernels: Kernels = Kernels.JNP
    phase: Phase = Phase.DECODE

    def __post_init__(self) -> None:
        if self.on_gpu and self.numerics is not Numerics.REFERENCE:
            raise ValueError(
                f"the kernels round as trained, so not {self.numerics.value!r} numerics"
            )

    @property
    def defined(self) -> "Compute":
        """The same with the operations' definitions, for what has no kernel."""
        return dataclasses.replace(self, kernels=Kernels.JNP)

    @property
    def on_gpu(self) -> bool:
        """Whether the operations run as Pallas kernels."""
        return self.kernels is not Kernels.JNP

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations between operations."""
        return self.numerics.dtype

    def round(self, x: jax.Array) -> jax.Array:
        """See `Numerics.round`."""
        return self.numerics.round(x)

    def quantize(self, x: jax.Array, format: Format) -> QuantizedArray | jax.Array:
        """See `Numerics.quantize`."""
        return self.numerics.quantize(x, format)

    def fake_quantize(self, x: jax.Array, format: Format) -> Any:
        """See `Numerics.fake_quantize`."""
        return self.numerics.fake_quantize(x, format)


REFERENCE = Compute()
FLOAT32 = Compute(Numerics.FLOAT32)
