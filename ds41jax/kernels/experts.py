"""Routed experts: MXFP4 gate, up and down products of the rows that chose each expert.

The definition takes one (row, expert) pair at a time, so a pair's result cannot depend on the
others.

Letters: T rows, D hidden size, F expert width, E experts, K experts a row.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ds41jax.formats import QuantizedArray, values
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.linear import quantized_linear
from ds41jax.kernels.rows import map_rows


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in float32."""
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)


def expert_mlp(
    x: jax.Array,
    matrices: tuple[jax.Array, jax.Array, jax.Array],
    weight: jax.Array | None,
    limit: float,
    compute: Compute,
) -> jax.Array:
    """One expert, (gate, down, up) as values, on rows x [..., D].

    `weight` scales the hidden layer before that is quantised.
    """
    w1, w2, w3 = matrices
    gate = quantized_linear(x, w1, compute)
    up = quantized_linear(x, w3, compute)
    hidden = swiglu(gate, up, limit)
    if weight is not None:
        hidden = hidden * weight
    return quantized_linear(compute.round(hidden), w2, compute)


def routed_experts(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[QuantizedArray, QuantizedArray, QuantizedArray],
    limit: float,
    compute: Compute,
) -> jax.Array:
    """Sum over a row's experts, in the order of its choices.

    Args:
      x: [T, D] in the activation dtype.
      expert_ids: [T, K] int32.
      weights: [T, K] float32 routing weights, applied before the down projection.
      matrices: gate [E, F, D], down [E, D, F] and up [E, F, D] in MXFP4; stacks of layers may be
        pointed into (`QuantizedArray.layer`).
      limit: clamp of the SwiGLU inputs.

    Returns:
      [T, D] float32.
    """
    rows, choices = expert_ids.shape

    def pair(x: jax.Array, expert: jax.Array, weight: jax.Array) -> jax.Array:
        w1, w2, w3 = (values(_expert(w, expert[0])) for w in matrices)
        return expert_mlp(x, (w1, w2, w3), weight[:, None], limit, compute)

    each = map_rows(
        compute,
        pair,
        jnp.repeat(x, choices, axis=0),
        expert_ids.reshape(-1),
        weights.reshape(-1),
        tile=1,
    ).reshape(rows, choices, -1)

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        return total + each[:, k].astype(jnp.float32)

    return lax.fori_loop(1, choices, add, each[:, 0].astype(jnp.float32))


def _expert(stack: QuantizedArray, expert: jax.Array) -> QuantizedArray:
    if stack.layer is None:
        return stack.map(lambda x: x[expert])
    layer = stack.layer
    return dataclasses.replace(
        stack, codes=stack.codes[layer, expert], scales=stack.scales[layer, expert], layer=None
    )
