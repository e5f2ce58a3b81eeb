"""Which experts a row takes, and their weights, from the router's products.

Letters: T rows, E experts, K experts a row, P parts of a sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ds41jax.formats.numerics import steer
from ds41jax.kernels import gpu
from ds41jax.kernels.compute import Compute

ROUTING_EPS = 1e-20


def expert_scores(products: jax.Array) -> jax.Array:
    """sqrt(softplus(x . w)) in float32."""
    return jnp.sqrt(jax.nn.softplus(products))


def choose_experts(
    products: jax.Array,
    bias: jax.Array,
    k: int,
    normalise: bool,
    factor: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Chooses by biased score, weighs by unbiased score.

    Args:
      products: [T, E] float32 products with the router's weights; bias: [T, E].
      normalise: whether a row's weights sum to `factor`.

    Returns:
      expert ids [T, K] int32, best first, ties to the lower id, and weights [T, K] float32.
    """
    scores = expert_scores(products)
    _, ids = lax.top_k(scores + bias, k)
    chosen = jnp.take_along_axis(scores, ids, axis=1)
    if normalise:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + ROUTING_EPS)
    if compute.differentiable:
        chosen = steer(chosen, bias, _overload(ids, bias))
    return ids, chosen * factor


def _overload(ids: jax.Array, bias: jax.Array) -> jax.Array:
    """What steers a bias [T, E] towards even load: each expert's share of the choices above 1 / E.

    An optimiser that takes its sign is the balancing rule without an auxiliary loss (arXiv
    2408.15664).
    """
    rows, experts = bias.shape
    share = jnp.zeros(experts).at[ids.reshape(-1)].add(1.0) / ids.size
    return jnp.broadcast_to((share - 1 / experts) / rows, bias.shape)


def choose_of_parts(
    parts: jax.Array,
    biases: tuple[jax.Array, jax.Array],
    is_image: jax.Array,
    k: int,
    normalise: bool,
    factor: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """`choose_experts` of products in parts [P, T, E], with biases [E] of text and image rows."""
    if compute.on_gpu:
        return _choose_on_gpu(parts, biases, is_image, k, normalise, factor, compute)
    bias = jnp.where(is_image[:, None], biases[1], biases[0])
    return choose_experts(gpu.add_parts(parts), bias, k, normalise, factor, compute)


def _choose_on_gpu(
    parts: jax.Array,
    biases: tuple[jax.Array, jax.Array],
    is_image: jax.Array,
    k: int,
    normalise: bool,
    factor: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    _, rows, experts = parts.shape
    kernel = functools.partial(
        _kernel,
        experts=experts,
        width=max(32, pl.next_power_of_2(experts)),
        k=k,
        normalise=normalise,
        factor=factor,
    )
    shapes = (
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
    )
    run = gpu.call(kernel, compute, (rows,), shapes, warps=2, name="route")
    entries = [a for bias in biases for a in gpu.entry(bias)]
    ids, weights = run(parts, is_image.astype(jnp.int32), *entries)
    return ids, weights


def _kernel(
    parts_ref: Any,  # [P, T, E]
    image_ref: Any,  # [T]
    text_layer: Any,
    text_bias: Any,  # [L, E]
    image_layer: Any,
    image_bias: Any,  # [L, E]
    ids_ref: Any,  # [T, K]
    weights_ref: Any,
    *,
    experts: int,
    width: int,
    k: int,
    normalise: bool,
    factor: float,
) -> None:
    row, expert = pl.program_id(0), jnp.arange(width)
    live = expert < experts
    at = jnp.where(live, expert, 0)

    def load(ref: Any, *lead: Any) -> jax.Array:
        return triton.load(ref.at[(*lead, at)], mask=live, other=0.0)

    products = gpu.add_parts([load(parts_ref, p, row) for p in range(parts_ref.shape[0])])
    scores = jnp.sqrt(jnp.maximum(products, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(products))))
    of_image, of_text = load(image_bias, image_layer[0]), load(text_bias, text_layer[0])
    biased = scores + jnp.where(image_ref[row] > 0, of_image, of_text)
    biased = jnp.where(live, biased, -jnp.inf)
    ids, weights = [], []
    for _ in range(k):
        best = jnp.min(jnp.where(biased == jnp.max(biased), expert, width))
        ids.append(best)
        weights.append(jnp.sum(jnp.where(expert == best, scores, 0.0)))
        biased = jnp.where(expert == best, -jnp.inf, biased)
    total = sum(weights[1:], weights[0]) + ROUTING_EPS if normalise else 1.0
    for place in range(k):
        ids_ref[row, place] = ids[place]
        weights_ref[row, place] = weights[place] / total * factor
