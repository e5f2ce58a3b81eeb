"""Choosing a token from logits, on the device, per row.

Order: temperature, min_p, top_k, top_p, draw. A draw depends on the request's seed and the index of
the emitted token alone, so neither the batch nor a rejected draft can change it. Ties go to the
lowest id.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ds41jax.kernels.compute import REFERENCE
from ds41jax.kernels.rows import map_rows

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses its tokens; temperature 0 is greedy.

    Raises:
      ValueError: naming the field that is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = [
            ("temperature", 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", 0 <= self.seed <= MAX_SEED, "an unsigned 64-bit integer"),
        ]
        for name, ok, what in checks:
            if not ok or math.isnan(getattr(self, name)):
                raise ValueError(f"{name} must be {what}, not {getattr(self, name)}")


@struct.dataclass
class SamplingRows:
    """Sampling parameters of each row, and the index of the token it emits; all [T]."""

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seed: jax.Array  # [T, 2] uint32, high and low word
    index: jax.Array  # int32


def sampling_rows(params: list[SamplingParams], index: list[int]) -> SamplingRows:
    """Rows as numpy arrays, one per entry."""
    columns: dict[str, Any] = {
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seed": np.array([divmod(p.seed, 1 << 32) for p in params], np.uint32).reshape(-1, 2),
        "index": np.array(index, np.int32),
    }
    return SamplingRows(**columns)


@jax.jit
def choose_tokens(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Token ids [T] int32 for logits [T, V] float32; -inf forbids a token."""
    filtered = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    return map_rows(REFERENCE, partial(_choose, filtered=filtered), logits, rows, tile=1)


def _choose(logits: jax.Array, row: SamplingRows, filtered: jax.Array) -> jax.Array:
    logits, row = logits[0], jax.tree.map(lambda x: x[0], row)
    greedy = jnp.argmax(logits)
    scaled = logits / jnp.where(row.temperature > 0, row.temperature, 1)
    scaled = jnp.where(scaled >= scaled.max() + jnp.log(row.min_p), scaled, -jnp.inf)
    kept = jax.lax.cond(filtered, _keep_top, lambda scaled, row: scaled, scaled, row)
    key = jax.random.fold_in(jax.random.wrap_key_data(row.seed, impl="threefry2x32"), row.index)
    drawn = jnp.argmax(kept + jax.random.gumbel(key, kept.shape))
    return jnp.where(row.temperature > 0, drawn, greedy).astype(jnp.int32)[None]


def _keep_top(scaled: jax.Array, row: SamplingRows) -> jax.Array:
    """Sets what top_k and top_p leave out to -inf; of equals, the lowest ids stay."""
    order = jnp.argsort(-scaled, stable=True)
    ranked = scaled[order]
    place = jnp.arange(ranked.shape[0])
    ranked = jnp.where((row.top_k == 0) | (place < row.top_k), ranked, -jnp.inf)
    mass = jax.nn.softmax(ranked)
    before = jnp.cumsum(mass) - mass
    ranked = jnp.where((before < row.top_p) | (place == 0), ranked, -jnp.inf)
    return jnp.full_like(scaled, -jnp.inf).at[order].set(ranked)
