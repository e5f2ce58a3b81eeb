"""Lazy reading of a sharded safetensors folder: memory-mapped views, or copies into a buffer.

Owns the file format: which files belong to a checkpoint, where each tensor lies in them, and that
all of this is consistent before anything is read. Knows nothing of the model. Whatever comes from
the files is bounded and checked; anything wrong raises `CheckpointError`.

A file is 8 bytes of header length (little-endian), a JSON header `{name: {dtype, shape,
data_offsets}}`, and the data, which the tensors cover without gaps or overlaps.
"""

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
MAX_INDEX_BYTES = 64 << 20  # the official index has 96,085 entries in about 9 MB
MAX_DIMENSIONS = 8
MAX_REPORTED = 20  # tensors listed per kind of problem
_LENGTH_BYTES = 8

# E8M0 exponents and packed FP4 pairs are handled as bytes.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the files or tensors and the fault."""


@dataclass(frozen=True)
class TensorEntry:
    """Name, safetensors dtype and shape of one tensor on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StoredTensor(TensorEntry):
    """A `TensorEntry` and where its bytes lie: `offset` counts from the start of `file`."""

    file: Path
    offset: int


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors of an opened checkpoint folder by name, read read on demand."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    _maps: dict[Path, np.memmap] = field(default_factory=dict, repr=False)

    def view(self, name: str) -> np.ndarray:
        """A read-only view of tensor `name` in its file, of the dtype in `DTYPES`."""
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            self._maps[tensor.file] = np.memmap(tensor.file, np.uint8, mode="r")
        data = self._maps[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        return np.asarray(data).view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def read_into(self, name: str, target: np.ndarray) -> None:
        """Copies tensor `name` into `target`, C-contiguous and of the tensor's dtype and shape.

        Reads instead of mapping, so that a large load leaves no mapped pages behind and a file
        that has shrunk since it was opened is an error, not a signal.

        Raises:
          CheckpointError: if the file cannot be read or ends early.
        """
        tensor = self.tensors[name]
        if target.dtype != DTYPES[tensor.dtype] or target.shape != tensor.shape:
            raise TypeError(f"{tensor} read into {target.dtype} {list(target.shape)}")
        rest = target.reshape(-1).view(np.uint8).data
        try:
            with open(tensor.file, "rb", buffering=0) as handle:
                handle.seek(tensor.offset)
                while rest and (count := handle.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise CheckpointError(f"cannot read {tensor.file}: {error.strerror}") from error
        if rest:
            raise CheckpointError(f"{tensor.file} has been truncated since it was opened")


def open_checkpoint(path: str | Path) -> CheckpointFiles:
    """Opens a folder with `model.safetensors.index.json`, or with one `model.safetensors`.

    Reads headers only.

    Raises:
      CheckpointError: for unreadable, malformed, truncated or contradictory files.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder")
    if (path / INDEX_NAME).exists():
        return CheckpointFiles(path, _indexed_tensors(path))
    if (path / SINGLE_NAME).exists():
        file = _plain_file(path, SINGLE_NAME)
        return CheckpointFiles(path, {tensor.name: tensor for tensor in read_header(file)})
    raise CheckpointError(f"{path} holds neither {INDEX_NAME} nor {SINGLE_NAME}")


def report(title: str, problems: Mapping[str, list[str]]) -> CheckpointError:
    """One error that lists every kind of problem with its count and its first entries."""
    lines = [title]
    for kind, entries in problems.items():
        if entries:
            lines.append(f"  {kind} ({len(entries)}):")
            lines += [f"    {entry}" for entry in entries[:MAX_REPORTED]]
            if len(entries) > MAX_REPORTED:
                lines.append(f"    ... and {len(entries) - MAX_REPORTED} more")
    return CheckpointError("\n".join(lines))


def read_header(file: Path) -> Iterator[StoredTensor]:
    """Yields the tensors of one safetensors file in the order of their data.

    Raises:
      CheckpointError: unless they cover the file's data exactly.
    """
    try:
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointError(
                    f"{file}: header of {length} bytes in a file of {size} bytes "
                    f"(limit {MAX_HEADER_BYTES}); is it truncated, or not safetensors?"
                )
            header = _json_object(handle.read(length), str(file))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    tensors = [_parse_entry(file, start, name, entry) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(file, tensors, start, size)
    yield from tensors


def _check_cover(file: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "follows a gap"
            raise CheckpointError(f"{file}: data of {tensor.name} {what}")
        end += tensor.nbytes
    if end != size:
        what = "truncated" if size < end else "followed by foreign bytes"
        raise CheckpointError(f"{file} is {what}: {size} bytes where the header says {end}")


def _parse_entry(file: Path, start: int, name: str, entry: Any) -> StoredTensor:
    def fail(message: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {message}")

    if not isinstance(entry, dict):
        raise fail(f"expected an object, got {str(entry)[:80]}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(f"dtype {str(dtype)[:80]!r} is not one of {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise fail(f"malformed shape {str(shape)[:80]}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise fail(f"malformed data_offsets {str(offsets)[:80]}")
    tensor = StoredTensor(name, dtype, tuple(shape), file, start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise fail(f"{offsets[1] - offsets[0]} bytes for {dtype} {shape}")
    return tensor


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )


def _indexed_tensors(path: Path) -> dict[str, StoredTensor]:
    weight_map, total_size = _read_index(path)
    shards = {name: _plain_file(path, name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, StoredTensor] = {}
    unlisted, elsewhere = [], []
    for shard, file in shards.items():
        for tensor in read_header(file):
            listed = weight_map.get(tensor.name)
            if listed == shard:
                tensors[tensor.name] = tensor
            elif listed is None:
                unlisted.append(f"{tensor.name} in {shard}")
            else:
                elsewhere.append(f"{tensor.name} in {shard}, listed for {listed}")
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in tensors]
    problems = {
        "tensors missing from the shard that the index names": absent,
        "tensors that the index does not list": unlisted,
        "tensors in a second shard": elsewhere,
    }
    if any(problems.values()):
        raise report(f"{path}: the index and the shards disagree", problems)
    found = sum(tensor.nbytes for tensor in tensors.values())
    if found != total_size:
        raise CheckpointError(
            f"{path / INDEX_NAME}: metadata.total_size is {total_size}, the tensors have {found}"
        )
    return tensors


def _read_index(path: Path) -> tuple[dict[str, str], int]:
    file = _plain_file(path, INDEX_NAME)
    try:
        with open(file, "rb") as handle:
            raw = handle.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    if len(raw) > MAX_INDEX_BYTES:
        raise CheckpointError(f"{file} is larger than {MAX_INDEX_BYTES} bytes")
    index = _json_object(raw, str(file))
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{file}: weight_map must map tensor names to file names")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total, int) or isinstance(total, bool):
        raise CheckpointError(f"{file}: metadata.total_size must be an integer")
    return weight_map, total


def _plain_file(folder: Path, name: str) -> Path:
    """The regular file `name` of `folder`; refuses any way out of the folder."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise CheckpointError(f"{folder}: {name[:200]!r} is not a plain file name")
    file = folder / name
    try:
        resolved = file.resolve(strict=True)
        regular = stat.S_ISREG(resolved.stat().st_mode)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder}: {name[:200]!r} is named but cannot be read") from error
    if not resolved.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{file} is a link to {resolved}, outside the checkpoint folder; copy the file instead"
        )
    if not regular:
        raise CheckpointError(f"{file} is not a regular file")
    return file


def _json_object(raw: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{where}: {twice[:200]!r} appears twice")
        return table

    try:
        data = json.loads(raw, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} does not hold valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} must hold a JSON object")
    return data
