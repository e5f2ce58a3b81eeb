"""Master weights to a checkpoint in the official layout."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds41jax.checkpoint.reader import expected_entries
from ds41jax.checkpoint.safetensors_files import DTYPES
from ds41jax.checkpoint.writer import plan_shards, write_checkpoint
from ds41jax.config import ModelConfig, parse_config
from ds41jax.formats import Format, QuantizedArray
from ds41jax.formats.quantized import encode
from ds41jax.model.engram_hash import TOKEN_MAP_FILE, compressed_token_map, token_map_json
from ds41jax.model.params import Params, param_specs, spec_leaves
from ds41jax.model.tensors import TensorSpec
from ds41jax.tokenizer import FILE_NAME as TOKENIZER_FILE
from ds41jax.tokenizer import Tokenizer
from ds41jax.training.masters import Masters, master_specs


def encoded_params(masters: Masters, config: ModelConfig) -> Params:
    """The weights as a loaded checkpoint holds them."""
    params: Params = jax.tree.map(_encoded, param_specs(config), masters.params)
    return params


def _encoded(leaf: TensorSpec, master: Any) -> Any:
    if isinstance(leaf.format, Format):
        return encode(master, leaf.format)
    return master.astype(np.float32 if leaf.format == "f32" else jnp.bfloat16)


def export_checkpoint(
    path: Path,
    masters: Masters,
    config_json: Mapping[str, Any],
    tokenizer: Tokenizer,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes the folder `path`, which must not exist, as `load_model` reads it."""
    config = parse_config(config_json)
    specs = master_specs(config)
    arrays: dict[str, np.ndarray] = {}
    for leaf, master in zip(spec_leaves(specs), jax.tree.leaves(masters), strict=True):
        arrays |= _tensors(leaf, _encoded(leaf, np.asarray(master, np.float32)))
    shards = plan_shards(expected_entries(specs))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for shard in shards:
            for entry in shard:
                stored = arrays[entry.name]
                yield entry.name, stored.view(DTYPES[entry.dtype])

    token_map = token_map_json(compressed_token_map(tokenizer), config)
    files = {TOKENIZER_FILE: tokenizer.to_json(), TOKEN_MAP_FILE: json.dumps(token_map).encode()}
    write_checkpoint(path, config_json, tensors(), shards, files | dict(extra_files or {}))


def _tensors(leaf: TensorSpec, encoded: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name, values on disk) of every checkpoint tensor of a leaf."""
    for index, name, scale in leaf.stored():
        if isinstance(encoded, QuantizedArray):
            yield name, np.asarray(encoded.codes[index])
            yield scale, np.asarray(encoded.scales[index])
        else:
            yield name, np.asarray(encoded[index])
