"""Random checkpoints of any geometry, for tests, benchmarks and the embedded default model.

Each tensor is drawn from a generator seeded by (seed, tensor name): the same seed gives the same
bytes whatever else the checkpoint holds, with any numpy. Weights are scaled so that a forward pass
stays well conditioned: matrices keep their input's variance, sub-layers write little next to the
stream. Quantised weights are drawn as codes: encoding values would be far slower.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from tqdm import tqdm

from ds41jax.checkpoint.presets import tokenizer_for
from ds41jax.checkpoint.reader import expected_entries
from ds41jax.checkpoint.safetensors_files import DTYPES, CheckpointError, TensorEntry
from ds41jax.checkpoint.writer import plan_shards, write_checkpoint
from ds41jax.config import ModelConfig, parse_config
from ds41jax.formats import Format
from ds41jax.formats.quantized import E4M3, decode_e2m1, encode_e2m1, pack_nibbles
from ds41jax.model.engram_hash import TOKEN_MAP_FILE, compressed_token_map, token_map_json
from ds41jax.model.params import engram_table_specs, param_specs, spec_leaves
from ds41jax.model.tensors import TensorSpec
from ds41jax.tokenizer import FILE_NAME as TOKENIZER_FILE
from ds41jax.tokenizer import Tokenizer

_PIECE = 1 << 22  # elements drawn at a time
_OTHER_FILES_BYTES = 64 << 20  # at most, for tokenizer, index and headers

# (name, mean, standard deviation) of weights that are no projections
_FIXED = (
    (r"norm\d?\.weight$|engram\.[qk]_weight$", 1.0, 0.1),
    (r"hc_\w+_scale$", 1.0, 0.2),
    (r"hc_\w+_base$", 0.0, 0.3),
    (r"attn_sink$", 0.0, 0.3),
    (r"\.bias(_vl)?$", 0.0, 0.1),
    (r"(^|head\.|engram\.)embed\.weight$|^image_", 0.0, 1.0),
)
# (name, gain) of projections; their standard deviation is gain / sqrt(inputs), gain 1 by default
_GAINS = (
    (r"hc_\w+_fn$", 0.7),
    (r"ffn\.gate\.weight$", 1.7),
    (r"^head\.weight$", 4.0),
    (r"markov_head\.head\.weight$", 2.0),
    (r"attn\.wo_b\.weight$|experts\..*w2\.weight$|engram\.wkv\.weight$", 0.4),
)
_COMB_DIAGONAL = 2.0  # each residual stream mostly keeps itself


def make_checkpoint(
    path: str | Path, config_json: Mapping[str, Any], seed: int = 0, progress: bool = True
) -> None:
    """Writes a random checkpoint with its tokenizer.

    Args:
      path: the folder to make; must not exist.
      config_json: contents of an official-layout `config.json`.
      seed: of every draw.
      progress: shows the bytes written on stderr.

    Raises:
      ConfigError: for an unusable geometry.
      CheckpointError: if `path` exists or the disk is too small.
    """
    config = parse_config(config_json)
    specs = (param_specs(config), engram_table_specs(config))
    shards = plan_shards(expected_entries(specs))
    total = sum(entry.nbytes for shard in shards for entry in shard)
    _check_space(Path(path), total)
    leaves = {name: leaf for leaf in spec_leaves(specs) for name, *_ in leaf.files()}
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=not progress) as bar:

        def tensors() -> Iterator[tuple[str, Iterator[np.ndarray]]]:
            for shard in shards:
                for entry in shard:
                    yield entry.name, draw_tensor(entry, leaves[entry.name], seed)
                    bar.update(entry.nbytes)

        write_checkpoint(path, config_json, tensors(), shards, _text_files(config))


def _check_space(path: Path, total: int) -> None:
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < total + _OTHER_FILES_BYTES:
        raise CheckpointError(f"{path} needs {total / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def _text_files(config: ModelConfig) -> dict[str, bytes]:
    tokenizer = tokenizer_for(config.vocab_size)
    files = {TOKENIZER_FILE: tokenizer.to_json()}
    if config.engram_layer_ids:
        token_map = _token_map(tokenizer, config.engram_compressed_vocab_size)
        files[TOKEN_MAP_FILE] = json.dumps(token_map_json(token_map, config)).encode()
    return files


def _token_map(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """The tokenizer's own map, or an arbitrary one where the configuration asks another size."""
    token_map = compressed_token_map(tokenizer)
    if token_map.max() + 1 == size:
        return token_map
    return np.arange(tokenizer.vocab_size, dtype=np.int32) % size


def draw_tensor(entry: TensorEntry, leaf: TensorSpec, seed: int) -> Iterator[np.ndarray]:
    """Draws one tensor of a checkpoint, in flat pieces.

    Args:
      entry: the tensor on disk.
      leaf: the weight that it belongs to; `entry` is its values, its codes or its scales.
      seed: with the tensor's name, decides every byte.
    """
    digest = hashlib.sha256(f"{seed}/{entry.name}".encode()).digest()
    source = np.random.PCG64(int.from_bytes(digest[:8], "little"))
    mean, std = _distribution(leaf)
    size = math.prod(entry.shape)
    for start in range(0, size, _PIECE):
        count = min(_PIECE, size - start)
        if not isinstance(leaf.format, Format):
            values = _normal_table()[_random(source, count, np.uint16)] * np.float32(std)
            values += _comb_offset(count) if leaf.name.endswith("_base") else np.float32(mean)
            yield values.astype(DTYPES[entry.dtype])
        elif entry.dtype == "F8_E8M0":
            yield _draw_scales(source, count, std / _code_table(leaf.format)[1])
        else:
            codes = _code_table(leaf.format)[0][_random(source, count, np.uint8)]
            yield codes.view(DTYPES[entry.dtype])


def _random(source: np.random.PCG64, count: int, dtype: type) -> np.ndarray:
    """Uniform integers from the raw generator, whose output no numpy version may change."""
    words = -(-count * np.dtype(dtype).itemsize // 8)
    return source.random_raw(words).astype("<u8").view(dtype)[:count]


@cache
def _normal_table() -> np.ndarray:
    """[65536] float32 quantiles of the normal distribution, for indexing by random uint16."""
    return _normal_quantiles(1 << 16)


def _normal_quantiles(count: int) -> np.ndarray:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], np.float32)


def _distribution(leaf: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of a weight's values."""
    for pattern, mean, std in _FIXED:
        if re.search(pattern, leaf.name):
            return mean, std
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, leaf.name)), 1.0)
    return 0.0, gain / math.sqrt(leaf.shape[-1])


def _comb_offset(mixes: int) -> np.ndarray:
    """Raises the diagonal of the combination in a hyper-connection's base [S * (2 + S)]."""
    streams = math.isqrt(mixes + 1) - 1
    diagonal = np.float32(_COMB_DIAGONAL) * np.eye(streams, dtype=np.float32)
    return np.concatenate([np.zeros(2 * streams, np.float32), diagonal.reshape(-1)])


@cache
def _code_table(format: Format) -> tuple[np.ndarray, float]:
    """[256] code bytes that random bytes index to draw normally distributed codes; their RMS."""
    if format.packed:
        nibbles = encode_e2m1(_normal_quantiles(16) * 3)
        pairs = np.stack([np.tile(nibbles, 16), np.repeat(nibbles, 16)], axis=-1)
        codes, values = np.asarray(pack_nibbles(pairs))[:, 0], np.asarray(decode_e2m1(nibbles))
    else:
        rounded = (_normal_quantiles(256) * 100).astype(E4M3)
        codes, values = rounded.view(np.uint8), rounded.astype(np.float32)
    return codes, float(np.sqrt(np.mean(np.square(values))))


def _draw_scales(source: np.random.PCG64, count: int, step: float) -> np.ndarray:
    """E8M0 codes of the two powers of two around `step`, mixed so that their mean square is its."""
    low = math.floor(math.log2(step))
    share = ((step / 2.0**low) ** 2 - 1) / 3
    raised = _random(source, count, np.uint16) < share * 65536
    return (127 + low + raised).astype(np.uint8)
