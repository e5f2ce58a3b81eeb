"""Number formats: encode, decode, packing; `QuantizedArray` and the static `Numerics` choice."""

from ds41jax.formats.numerics import Numerics, values
from ds41jax.formats.quantized import Format, QuantizedArray, decode, encode

__all__ = ["Format", "Numerics", "QuantizedArray", "decode", "encode", "values"]
