"""All weights of the model in one pytree, and their declaration."""

from typing import Any

import jax
from flax import struct

from ds41jax.config import ModelConfig
from ds41jax.formats import Format
from ds41jax.kernels.cards import Part
from ds41jax.model.block import BlockWeights, block_specs
from ds41jax.model.compressor import CompressorWeights, compressor_specs
from ds41jax.model.drafter import DrafterWeights, drafter_specs
from ds41jax.model.engram import EngramWeights, engram_specs
from ds41jax.model.indexer import IndexerWeights, indexer_specs
from ds41jax.model.tensors import Split, TensorSpec, spec
from ds41jax.model.vision import VisionWeights, vision_specs


@struct.dataclass
class Params:
    """Weights stacked by kind; quantised ones stay as the checkpoint stores them.

    Parts that a geometry lacks are None. Engram tables are not here: they stay on disk.
    """

    embed: jax.Array  # [vocabulary, hidden]
    layers: BlockWeights
    compressor: CompressorWeights | Any
    indexer: IndexerWeights | Any
    engram: EngramWeights | Any
    norm: jax.Array  # [hidden]
    head: jax.Array  # [vocabulary, hidden]
    drafter: DrafterWeights | Any
    vision: VisionWeights | Any


def param_specs(config: ModelConfig, local_layers: int | None = None) -> Params:
    """The `Params` tree with a `TensorSpec` in place of every weight.

    With `local_layers`, only the layers below it have their routed experts here.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    layers = tuple(range(config.num_hidden_layers))
    rows = Split(Part.VOCABULARY, 0)
    return Params(
        embed=spec("embed.weight", vocabulary, "bf16", split=rows),
        layers=block_specs(
            config, "layers.{i}", layers, config.n_routed_experts, layers[:local_layers]
        ),
        compressor=compressor_specs(config) if config.kv_source_layer_ids else None,
        indexer=indexer_specs(config) if config.index_source_layer_ids else None,
        engram=engram_specs(config) if config.engram_layer_ids else None,
        norm=spec("norm.weight", (config.hidden_size,), "bf16"),
        head=spec("head.weight", vocabulary, "bf16", split=rows),
        drafter=drafter_specs(config) if config.num_nextn_predict_layers else None,
        vision=vision_specs(config) if config.vision else None,
    )


def engram_table_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tables on disk: E4M3 rows with one E8M0 scale per 32 columns of each row."""
    return tuple(
        TensorSpec(
            f"layers.{layer}.engram.embed.weight", (rows, config.engram_head_dim), Format.FP8_GROUP
        )
        for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    )


def spec_leaves(specs: Any) -> list[TensorSpec]:
    """The declarations of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(specs) if isinstance(leaf, TensorSpec)]
