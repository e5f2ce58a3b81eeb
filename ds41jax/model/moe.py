"""Mixture of experts: router, routed experts, shared expert.

Letters: T rows, D hidden size, F expert width, E experts, K experts a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ds41jax.config import ModelConfig
from ds41jax.formats import Format, QuantizedArray
from ds41jax.kernels.cards import Part, sum_of_cards
from ds41jax.kernels.compute import REFERENCE, Compute
from ds41jax.kernels.experts import expert_mlp, routed_experts
from ds41jax.kernels.linear import operand, project, project_parts
from ds41jax.kernels.quantize import Input, values_of
from ds41jax.kernels.routing import choose_experts, choose_of_parts, expert_scores
from ds41jax.kernels.rows import map_rows
from ds41jax.model.state import StepBatch
from ds41jax.model.tensors import Split, choose, lookup, spec


@struct.dataclass
class RouterWeights:
    """Scores of the experts; text and image rows have selection biases of their own."""

    weight: jax.Array  # [E, D]
    bias: jax.Array  # [E]
    bias_vl: jax.Array  # [E]


@struct.dataclass
class ExpertWeights:
    """Gate (w1), down (w2) and up (w3) matrices of one expert or a stack of them."""

    w1: QuantizedArray  # [F, D]
    w2: QuantizedArray  # [D, F]
    w3: QuantizedArray  # [F, D]


@struct.dataclass
class MoeWeights:
    gate: RouterWeights
    experts: ExpertWeights
    shared_experts: ExpertWeights


def _expert_specs(
    config: ModelConfig, prefix: str, format: Format, **stack: object
) -> ExpertWeights:
    d, f = config.hidden_size, config.moe_intermediate_size
    # A hidden column's gate, up and down weights go together, its scale's 32 columns too.
    rows, columns = Split(Part.EXPERTS, 0, 32), Split(Part.EXPERTS, 1, 32)
    return ExpertWeights(
        w1=spec(f"{prefix}.w1.weight", (f, d), format, split=rows, **stack),
        w2=spec(f"{prefix}.w2.weight", (d, f), format, split=columns, **stack),
        w3=spec(f"{prefix}.w3.weight", (f, d), format, split=rows, **stack),
    )


def moe_specs(
    config: ModelConfig,
    prefix: str,
    layers: tuple[int, ...],
    num_experts: int,
    expert_layers: tuple[int, ...] | None = None,
) -> MoeWeights:
    """`prefix` is "layers.{i}.ffn" or "mtp.{i}.ffn"; `expert_layers` those with experts here."""
    gate = RouterWeights(
        weight=spec(
            f"{prefix}.gate.weight", (num_experts, config.hidden_size), "bf16", layers=layers
        ),
        bias=spec(f"{prefix}.gate.bias", (num_experts,), "f32", layers=layers),
        bias_vl=spec(f"{prefix}.gate.bias_vl", (num_experts,), "f32", layers=layers),
    )
    return MoeWeights(
        gate=gate,
        experts=_expert_specs(
            config,
            f"{prefix}.experts.{{e}}",
            Format.MXFP4,
            layers=layers if expert_layers is None else expert_layers,
            experts=num_experts,
        ),
        shared_experts=_expert_specs(
            config, f"{prefix}.shared_experts", Format.FP8_BLOCK, layers=layers
        ),
    )


def router_scores(x: jax.Array, weight: jax.Array, compute: Compute = REFERENCE) -> jax.Array:
    """sqrt(softplus(x . w)) in float32: x [T, D], weight [E, D] -> [T, E]."""
    return expert_scores(project(x, weight, compute))


def route(
    x: Input,
    is_image: jax.Array,
    weights: RouterWeights,
    k: int,
    config: ModelConfig,
    compute: Compute = REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by biased score, weighs them by unbiased score.

    Args:
      x: [T, D] normalised FFN input.
      is_image: [T] bool; image rows use `bias_vl`.
      k: experts a row.

    Returns:
      expert ids [T, K] int32, best first, ties to the lower id, and weights [T, K] float32.
    """
    normalise, factor = config.norm_topk_prob, config.routed_scaling_factor
    if compute.on_gpu:
        parts = project_parts(x, weights.weight, compute)
        biases = weights.bias, weights.bias_vl
        return choose_of_parts(parts, biases, is_image, k, normalise, factor, compute)
    products = project(x, weights.weight, compute)
    bias = jnp.where(is_image[:, None], weights.bias_vl, weights.bias)
    return choose_experts(products, bias, k, normalise, factor, compute)


def moe(
    x: Input,
    is_image: jax.Array,
    weights: MoeWeights,
    k: int,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    """Routed and shared experts of rows x [T, D], summed in float32 and rounded once.

    Cards that hold a share of every expert's hidden columns meet here.
    """
    limit, whole = config.swiglu_limit, not compute.splits(Part.EXPERTS)
    ids, routing = map_rows(
        compute, lambda x, image: route(x, image, weights.gate, k, config, compute), x, is_image
    )
    e = weights.experts
    routed = routed_experts(x, ids, routing, (e.w1, e.w2, e.w3), limit, compute, whole)
    s = weights.shared_experts
    dense = operand(s.w1, compute), operand(s.w2, compute), operand(s.w3, compute)

    def combine(x: jax.Array, routed: jax.Array) -> jax.Array:
        shared = expert_mlp(x, dense, None, limit, compute, whole)
        total = routed + shared.astype(jnp.float32)
        return compute.round(total) if whole else total

    total = map_rows(compute, combine, x, routed)
    return total if whole else compute.round(sum_of_cards(total))


@struct.dataclass
class ExpertsAway:
    """A layer's routed experts on their way, and what was computed since they left.

    Attributes:
      ticket: from the exchange's `send`.
      shared: [T, D] the shared expert's output.
    """

    ticket: Any
    shared: jax.Array


def send_experts(
    x: Input,
    is_image: jax.Array,
    live: jax.Array,
    layer: jax.Array | int,
    fault: jax.Array,
    weights: MoeWeights,
    config: ModelConfig,
    compute: Compute,
) -> ExpertsAway:
    """Starts `moe` with the routed experts behind an exchange; the shared expert runs meanwhile.

    Args:
      x: [T, D]; is_image: [T] bool; live: [T] bool, False for padding rows.
      layer: of the model.
      fault: int32 scalar, not 0 once an exchange of this step has failed.
    """
    exchange, limit, k = compute.exchange, config.swiglu_limit, config.num_experts_per_tok
    assert exchange is not None
    whole = not compute.splits(Part.EXPERTS)

    def choose_rows(x: Input, is_image: jax.Array) -> tuple[jax.Array, jax.Array]:
        return route(x, is_image, weights.gate, k, config, compute)

    ids, routing = map_rows(compute, choose_rows, x, is_image)
    ticket = exchange.send(values_of(x), ids, routing, layer, live, fault, compute)
    s = weights.shared_experts
    dense = operand(s.w1, compute), operand(s.w2, compute), operand(s.w3, compute)
    shared = map_rows(compute, lambda x: expert_mlp(x, dense, None, limit, compute, whole), x)
    shared = shared if whole else compute.round(sum_of_cards(shared))
    return ExpertsAway(ticket=ticket, shared=shared)


def await_experts(
    away: ExpertsAway,
    meanwhile: tuple[Any, ...],
    experts: ExpertWeights,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Ends what `send_experts` began.

    Args:
      meanwhile: arrays that are to be computed before this waits.
      experts: of the layer; only an exchange that computes them in this process reads them.

    Returns:
      [T, D], and the fault of this exchange.
    """
    assert compute.exchange is not None
    before = (away.shared, *meanwhile)
    routed, fault = compute.exchange.wait(
        away.ticket, before, experts, config.swiglu_limit, compute
    )

    def combine(routed: jax.Array, shared: jax.Array) -> jax.Array:
        return compute.round(routed + shared.astype(jnp.float32))

    return map_rows(compute, combine, routed, away.shared), fault


def exchanged_moe(
    x: Input,
    is_image: jax.Array,
    live: jax.Array,
    layer: jax.Array | int,
    fault: jax.Array,
    weights: MoeWeights,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """`moe` with the routed experts behind an exchange: see `send_experts`.

    Returns:
      [T, D], and the fault after this layer.
    """
    away = send_experts(x, is_image, live, layer, fault, weights, config, compute)
    return await_experts(away, (), weights.experts, config, compute)


def placed_moe(
    x: Input,
    layer: jax.Array | int,
    fault: jax.Array | None,
    weights: MoeWeights,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """A layer's experts, here or behind the exchange, and the step's fault after it."""
    assert compute.exchange is not None and fault is not None
    first, k = compute.exchange.first_layer, config.num_experts_per_tok

    def elsewhere() -> tuple[jax.Array, jax.Array]:
        mask = batch.is_image, batch.is_row
        return exchanged_moe(x, *mask, layer, fault, weights, config, compute)

    def here() -> tuple[jax.Array, jax.Array]:
        return moe(x, batch.is_image, weights, k, config, compute), fault

    is_remote = tuple(int(number >= first) for number in range(config.num_hidden_layers))
    return choose(lookup(is_remote, layer), (here, elsewhere)) if first else elsewhere()
