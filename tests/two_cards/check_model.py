"""The tiny model over two devices: what equals one device bit for bit, and what is only near.

Run by `tests/test_two_cards.py` in a process that has two devices.
"""

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracle import (
    BOTH,
    assert_same,
    assert_within,
    logit_error,
    max_abs,
    recorded,
    rel_rms,
    tiny_model,
)
from paths import GOLDEN
from split_runs import LAYOUTS, cards_agree, layout_name, results, split_model

from ds41jax.cache.planner import split_placements, weight_bytes
from ds41jax.checkpoint import reader
from ds41jax.kernels.cards import ALL_PARTS, AXIS, Part, sum_of_cards
from ds41jax.kernels.compute import FLOAT32, REFERENCE, Compute
from ds41jax.kernels.sparse_attention import sparse_attention
from ds41jax.model import attention
from ds41jax.model.sharding import check_split, find_cards, partitions
from ds41jax.model.tensors import at_layer
from ds41jax.model.text_layer import layer_frequencies

SMOOTH_LIMIT, LOGIT_LIMIT = 1e-3, 0.10  # of the golden data: float32 absolute, reference relative
VOCABULARY = frozenset({Part.VOCABULARY})


def test_there_are_two_devices() -> None:
    assert jax.device_count() == 2


@pytest.mark.parametrize("compute", BOTH)
def test_one_card_is_no_cards(compute: Compute) -> None:
    assert_same(results("b13", compute, 1), results("b13", compute, 0))


@pytest.mark.parametrize("compute", BOTH)
def test_a_split_vocabulary_is_exact(compute: Compute) -> None:
    assert_same(results("b13", compute, 2, VOCABULARY), results("b13", compute, 0))


@pytest.mark.parametrize("parts", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("compute", BOTH)
def test_cards_hold_the_same_bits(compute: Compute, parts: frozenset[Part]) -> None:
    assert cards_agree(results("b13", compute, 2, parts)["state"])


@pytest.mark.parametrize("parts", LAYOUTS, ids=layout_name)
def test_float32_logits_are_the_recorded_ones(parts: frozenset[Part]) -> None:
    found, golden = results("b13", FLOAT32, 2, parts), recorded("tiny_runs")
    expected = [golden["b13.smooth.prefill_logits"], golden["b13.smooth.decode_logits"][:4]]
    assert_within(max_abs, found["logits"], np.concatenate(expected), SMOOTH_LIMIT)
    one = results("b13", FLOAT32, 0)
    assert_within(max_abs, found["draft_logits"], one["draft_logits"], SMOOTH_LIMIT)
    assert_within(max_abs, found["confidence"], one["confidence"], SMOOTH_LIMIT)
    assert_same(found["drafts"], one["drafts"])


@pytest.mark.parametrize("parts", LAYOUTS, ids=layout_name)
def test_reference_logits_are_near_the_recorded_ones(parts: frozenset[Part]) -> None:
    found, golden = results("b13", REFERENCE, 2, parts), recorded("tiny_runs")
    expected = [golden["b13.prefill_logits"], golden["b13.decode_logits"][:4]]
    assert_within(logit_error, found["logits"], np.concatenate(expected), LOGIT_LIMIT)


@pytest.mark.parametrize("compute", BOTH)
def test_split_heads_are_near_before_the_output_projection(compute: Compute) -> None:
    """Queries and attended values of each head.

    Mathematically nothing is split before the projection, but XLA's product may order the sums of
    fewer outputs otherwise, so not every last bit is equal.
    """
    model, cards = split_model(2, frozenset({Part.ATTENTION}))
    config, index = model.config, 2
    split = dataclasses.replace(compute, cards=cards)
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (6, config.hidden_size)).astype(compute.dtype)
    rows = jax.random.normal(keys[1], (90, config.head_dim)).astype(jnp.float32)
    chosen = jnp.arange(6)[:, None] * 3 + jnp.arange(70)[None, :]

    def heads(layers: attention.AttentionWeights, compute: Compute) -> tuple[jax.Array, ...]:
        weights = at_layer(layers, index)
        frequencies = layer_frequencies(config, index)
        _, q = attention.queries(x, jnp.arange(6) + 40, weights, frequencies, config, compute)
        out = sparse_attention(q, ((rows, chosen),), weights.attn_sink, 0.1, compute)
        return q, out

    whole = jax.jit(functools.partial(heads, compute=compute))(tiny_model().params.layers.attn)
    shared = jax.shard_map(
        functools.partial(heads, compute=split),
        mesh=cards.mesh,
        in_specs=(partitions(config, cards).layers.attn,),
        out_specs=P(None, AXIS),
        check_vma=False,
    )
    limit = 1e-6 if compute is FLOAT32 else 1e-3
    for found, expected in zip(jax.jit(shared)(model.params.layers.attn), whole, strict=True):
        assert_within(rel_rms, found, expected, limit)


def test_sums_are_in_the_order_of_the_cards() -> None:
    cards = find_cards(2)
    parts = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    added = jax.shard_map(
        sum_of_cards, mesh=cards.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    found = jax.jit(added)(parts.reshape(6, 5))
    assert_same(found, np.tile(parts[0] + parts[1], (2, 1)))


@pytest.mark.parametrize("by_layer", [False, True])
def test_loading_over_cards_is_loading_and_splitting(
    by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cards = split_model(2, ALL_PARTS)
    if by_layer:  # as on a GPU
        monkeypatch.setattr(reader, "_filler", lambda device: reader._fill_by_layer)
    loaded = reader.load_params(GOLDEN / "tiny", model.config, progress=False, cards=cards)
    assert_same(loaded, model.params)
    for found, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(model.params), strict=True):
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
    halves = {shard.data.shape for shard in loaded.head.addressable_shards}
    assert halves == {(model.config.vocab_size // 2, model.config.hidden_size)}


def test_what_does_not_split_is_refused_by_name() -> None:
    config = tiny_model().config
    with pytest.raises(
        ValueError, match=r"ffn\.experts\.\{e\}\.w1\.weight: 96 rows, in units of 32"
    ):
        check_split(dataclasses.replace(config, moe_intermediate_size=96), find_cards(2))
    check_split(
        dataclasses.replace(config, moe_intermediate_size=96),
        find_cards(2, frozenset({Part.ATTENTION, Part.VOCABULARY})),
    )
    with pytest.raises(ValueError, match=r"head\.weight: 513 rows"):
        check_split(dataclasses.replace(config, vocab_size=513), find_cards(2))


def test_the_plan_counts_the_bytes_that_each_card_holds() -> None:
    model, cards = split_model(2, ALL_PARTS)
    each, other = split_placements(model.config, cards)
    assert each == other
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(model.params))
    sizes = weight_bytes(model.config)
    shares = {f.name: getattr(each, f.name) for f in dataclasses.fields(each)}
    routed = sizes.routed_layer * model.config.num_hidden_layers * shares.pop("routed")
    planned = routed + sum(getattr(sizes, name) * share for name, share in shares.items())
    norms = 2 * 2 * model.config.num_hidden_layers * model.config.hidden_size
    assert abs(planned - held) <= norms  # which the plan takes for split like the rest
    assert each.routed == each.embeddings == Fraction(1, 2)


def test_more_cards_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 cards are wanted, but JAX sees 2 device"):
        find_cards(3)
