"""Whole layers of the official geometry on the kernels, lowered for a GPU that is not there."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from lowering import DEVICES, gpu_mesh, lower_for_gpu

from ds41jax.config import ModelConfig, load_config
from ds41jax.formats import Numerics
from ds41jax.kernels.cards import AXIS, Cards
from ds41jax.kernels.compute import Compute, Kernels, Phase
from ds41jax.model import backbone, text_layer
from ds41jax.model.hyper_connections import initial_pre
from ds41jax.model.params import param_specs
from ds41jax.model.sharding import partitions
from ds41jax.model.state import CacheShape, StepBatch, init_state
from ds41jax.model.tensors import TensorSpec
from ds41jax.model.text_layer import Carry

CONFIG = load_config(Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json")
SEQUENCES, PAGES = 4, 64
KINDS = {"window": 0, "pair source": 2, "pair reader": 3, "source": 20, "within candidates": 24}


def batch_of(rows: int) -> StepBatch:
    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    per_sequence = {
        name: ints(SEQUENCES)
        for name in ("slots", "starts", "ends", "window_floor", "decoder_floor", "global_floor")
    }
    return StepBatch(
        token_ids=ints(rows),
        positions=ints(rows),
        sequences=ints(rows),
        is_image=jnp.zeros(rows, bool),
        image_embeds=None,
        engram=None,
        page_tables=ints(len(CONFIG.kv_source_layer_ids), SEQUENCES, PAGES),
        logit_rows=ints(rows),
        **per_sequence,
    )


def start(rows: int, config: ModelConfig, compute: Compute) -> Carry:
    state = init_state(config, CacheShape(SEQUENCES, SEQUENCES * PAGES), compute)
    stream = jnp.zeros((rows, config.hc_mult, config.hidden_size), compute.dtype)
    pre = initial_pre(rows, config)
    return backbone.start(stream, pre, state, batch_of(rows), config, compute)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "phase"), [(6, Phase.DECODE), (256, Phase.PREFILL)])
def test_layers_lower_for_gpus(kind: str, rows: int, phase: Phase) -> None:
    compute = Compute(kernels=Kernels.PALLAS, phase=phase)
    specs = param_specs(dataclasses.replace(CONFIG, engram_layer_ids=()))
    is_spec = partial(lambda cls, leaf: isinstance(leaf, cls), TensorSpec)
    params: Any = jax.tree.map(lambda spec: spec.abstract(), specs, is_leaf=is_spec)
    config = dataclasses.replace(CONFIG, engram_layer_ids=())
    carry = jax.eval_shape(lambda: start(rows, config, compute))

    def run(carry: Carry, params: Any) -> Carry:
        return text_layer.layer(carry, KINDS[kind], params, batch_of(rows), config, compute)

    text = lower_for_gpu(run, carry, params, device=next(iter(DEVICES)))
    for kernel in ("matmul", "quantize", "route", "mixes", "sparse_attention", "expert_up"):
        assert f'"{kernel}"' in text
    assert ('"index_scores"' in text) == (KINDS[kind] in CONFIG.index_source_layer_ids)


@pytest.mark.parametrize(("rows", "phase"), [(6, Phase.DECODE), (256, Phase.PREFILL)])
def test_layers_lower_for_two_gpus(rows: int, phase: Phase) -> None:
    """A layer's kernels on each card's share, and the two places where the cards meet."""
    mesh = gpu_mesh(2, AXIS, next(iter(DEVICES)))
    compute = Compute(kernels=Kernels.PALLAS, phase=phase, cards=Cards(mesh))
    config = dataclasses.replace(CONFIG, engram_layer_ids=())
    is_spec = partial(lambda cls, leaf: isinstance(leaf, cls), TensorSpec)
    specs = param_specs(config)
    params: Any = jax.tree.map(lambda spec: spec.abstract(), specs, is_leaf=is_spec)
    carry = jax.eval_shape(lambda: start(rows, config, compute))

    def run(carry: Carry, params: Any) -> Carry:
        return text_layer.layer(carry, KINDS["source"], params, batch_of(rows), config, compute)

    split = partitions(config, compute.cards)
    over_cards = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), split), out_specs=P(), check_vma=False
    )
    text = lower_for_gpu(over_cards, carry, params, device=next(iter(DEVICES)), mesh=mesh)
    assert text.count('"stablehlo.all_gather"') == 2
    for kernel in ("matmul", "quantize", "route", "mixes", "sparse_attention", "expert_up"):
        assert f'"{kernel}"' in text


def test_kernels_refuse_float32_numerics() -> None:
    with pytest.raises(ValueError, match="float32"):
        Compute(Numerics.FLOAT32, Kernels.PALLAS)
