"""Writes the official layout: safetensors shards, their index and `config.json`.

Tensors stream to disk one at a time, or in pieces, so a checkpoint may be larger than memory. The
folder appears under its name only when it is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ds41jax.checkpoint.safetensors_files import DTYPES, INDEX_NAME, CheckpointError, TensorEntry

Tensor = np.ndarray | Iterator[np.ndarray]  # whole, or as consecutive pieces in C order

_ENGRAM = re.compile(r"layers\.(\d+)\.engram\.")
_NUMBERED = re.compile(r"(layers|mtp)\.(\d+)\.")


def plan_shards(entries: Iterable[TensorEntry]) -> list[list[TensorEntry]]:
    """Splits tensors as the release does.

    Vision; embedding; one shard per layer; norm and head; one per draft stage; one per Engram
    layer. Absent parts leave no shard.
    """
    shards: dict[tuple[int, int], list[TensorEntry]] = {}
    for entry in entries:
        shards.setdefault(_shard_of(entry.name), []).append(entry)
    return [shards[key] for key in sorted(shards)]


def _shard_of(name: str) -> tuple[int, int]:
    if match := _ENGRAM.match(name):
        return 5, int(match[1])
    if match := _NUMBERED.match(name):
        return (2 if match[1] == "layers" else 4), int(match[2])
    if name in ("norm.weight", "head.weight"):
        return 3, 0
    return (1 if name == "embed.weight" else 0), 0


def write_checkpoint(
    path: str | Path,
    config_json: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shards: Sequence[Sequence[TensorEntry]],
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a checkpoint folder; nothing is left behind if it fails.

    Args:
      path: the folder to make; must not exist.
      config_json: contents of `config.json`.
      tensors: (name, values) in exactly the order of `shards`, with dtypes as in
        `safetensors_files.DTYPES`.
      shards: what each file holds; see `plan_shards`.
      extra_files: other files of the folder, such as `tokenizer.json`.

    Raises:
      CheckpointError: if `path` exists, or `tensors` differ from what `shards` announce.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} already exists; remove it or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        _write_shards(partial, iter(tensors), shards)
        (partial / "config.json").write_text(json.dumps(config_json, indent=1) + "\n")
        for name, data in (extra_files or {}).items():
            (partial / name).write_bytes(data)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_shards(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    shards: Sequence[Sequence[TensorEntry]],
) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {entry.name: file for entry in shard}
        with open(folder / file, "wb") as handle:
            handle.write(_header(shard))
            for entry in shard:
                _write_tensor(handle, entry, next(tensors, None))
    if (extra := next(tensors, None)) is not None:
        raise CheckpointError(f"tensor {extra[0]} belongs to no shard")
    total = sum(entry.nbytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def _header(shard: Sequence[TensorEntry]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in shard:
        start, end = end, end + entry.nbytes
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % 64)  # so that mapped tensors start aligned
    return len(raw).to_bytes(8, "little") + raw


def _write_tensor(handle: BinaryIO, entry: TensorEntry, tensor: tuple[str, Tensor] | None) -> None:
    name, values = tensor if tensor is not None else (None, iter(()))
    if name != entry.name:
        raise CheckpointError(f"expected tensor {entry.name}, got {name}")
    if isinstance(values, np.ndarray):
        if values.shape != entry.shape:
            raise CheckpointError(f"{entry}: got shape {list(values.shape)}")
        values = iter((values,))
    written = 0
    for piece in values:
        if piece.dtype != DTYPES[entry.dtype]:
            raise CheckpointError(f"{entry}: got dtype {piece.dtype}")
        handle.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        written += piece.nbytes
    if written != entry.nbytes:
        raise CheckpointError(f"{entry}: got {written} bytes of {entry.nbytes}")
