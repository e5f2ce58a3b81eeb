"""`TensorSpec`: the one declaration of every weight, from which all else about it is derived.

Each mechanism's file declares its weights as a dataclass and a function that fills it with specs.
Abstract shapes, the checkpoint's table of names, the loader, the writer and random initialisation
are tree maps over those specs.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels.cards import Part
from ds41jax.kernels.gpu import StackEntry

T = TypeVar("T")
StorageFormat = str | Format  # "f32", "bf16" or a quantised format

_SAFETENSORS_DTYPES = {
    "f32": "F32",
    "bf16": "BF16",
    Format.FP8_BLOCK: "F8_E4M3",
    Format.MXFP4: "I8",
    Format.FP8_GROUP: "F8_E4M3",
}
_PLAIN_DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class Split:
    """How a weight is split over cards: along `axis` of its shape, in whole `unit`s."""

    part: Part
    axis: int
    unit: int = 1


@dataclass(frozen=True)
class TensorSpec:
    """One weight, possibly a stack of the checkpoint's tensors.

    Attributes:
      name: official tensor name; `{i}` stands for a layer or stage number, `{e}` for an expert.
      shape: shape of the values of one checkpoint tensor, [out, in] for matrices.
      format: "f32", "bf16" or the quantised format; a quantised `x.weight` comes with an `x.scale`.
      layers: values of `{i}`, stacked on the first axis; None for a single tensor.
      experts: number of `{e}`, stacked on the next axis; None if the name has none.
      split: how it lies on several cards; None if each holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    format: StorageFormat
    layers: tuple[int, ...] | None = None
    experts: int | None = None
    split: Split | None = None

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes added to `shape` by stacking."""
        layers = () if self.layers is None else (len(self.layers),)
        return layers if self.experts is None else (*layers, self.experts)

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix("weight") + "scale"

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape on disk of the tensor called `name`."""
        *lead, columns = self.shape
        packed = isinstance(self.format, Format) and self.format.packed
        return (*lead, columns // 2 if packed else columns)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape on disk of the scale tensor of a quantised weight."""
        rows, columns = self.shape
        if self.format is Format.FP8_BLOCK:
            return (-(-rows // 32), -(-columns // 32))
        return (rows, columns // 32)

    def stored(self) -> Iterator[tuple[tuple[int, ...], str, str]]:
        """Yields (index in the stack, tensor name, scale name) for every checkpoint tensor."""
        layers = [None] if self.layers is None else list(self.layers)
        experts = [None] if self.experts is None else list(range(self.experts))
        for (a, i), (b, e) in itertools.product(enumerate(layers), enumerate(experts)):
            index = (() if i is None else (a,)) + (() if e is None else (b,))
            yield index, self.name.format(i=i, e=e), self.scale_name.format(i=i, e=e)

    def files(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yields (tensor name, safetensors dtype, shape on disk) for everything that is stored."""
        for _, name, scale in self.stored():
            yield name, _SAFETENSORS_DTYPES[self.format], self.codes_shape
            if isinstance(self.format, Format):
                yield scale, "F8_E8M0", self.scales_shape

    def abstract(self) -> Any:
        """Shapes and dtypes in device memory: a ShapeDtypeStruct, or a `QuantizedArray` of them."""
        if not isinstance(self.format, Format):
            return jax.ShapeDtypeStruct((*self.stack, *self.shape), _PLAIN_DTYPES[self.format])
        codes = jnp.uint8 if self.format.packed else jnp.float8_e4m3fn
        return QuantizedArray(
            jax.ShapeDtypeStruct((*self.stack, *self.codes_shape), codes),
            jax.ShapeDtypeStruct((*self.stack, *self.scales_shape), jnp.uint8),
            format=self.format,
        )


def spec(name: str, shape: tuple[int, ...], format: StorageFormat, **stack: Any) -> Any:
    """A `TensorSpec`, typed as Any so that it can stand where a weight will be."""
    return TensorSpec(name, shape, format, **stack)


def at_layer(weights: Any, layer: Any, in_place: bool = False) -> Any:
    """Entry `layer` of every stacked weight; quantised ones are only pointed at, not moved.

    `in_place` points at the others too (`StackEntry`): for kernels, which read them there.
    """

    def take(leaf: Any) -> Any:
        if isinstance(leaf, QuantizedArray):
            return leaf.at_layer(layer)
        return StackEntry(leaf, layer) if in_place else leaf[layer]

    return jax.tree.map(take, weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))


def lookup(table: tuple[int, ...], index: Any) -> Any:
    """table[index] for an index that may be traced."""
    return table[index] if isinstance(index, int) else jnp.asarray(table, jnp.int32)[index]


def choose(index: Any, branches: Sequence[Callable[[], T]]) -> T:
    """The result of one branch, chosen while tracing if the index is known then."""
    if isinstance(index, int) or len(branches) == 1:
        return branches[int(index) if isinstance(index, int) else 0]()
    return lax.switch(index, branches)
