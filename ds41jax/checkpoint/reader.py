"""Official checkpoint to `Params`: every tensor checked against the specs, then stacked.

Weights stay quantised exactly as stored. The host never holds a second copy: on the CPU each
stacked leaf is one buffer that the tensors are read into and that jax takes over; on other devices
a leaf is filled in place, one layer's slab at a time, and over several cards each takes its share.
Engram tables stay on disk.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from ds41jax.checkpoint.engram_tables import EngramTable
from ds41jax.checkpoint.safetensors_files import (
    CheckpointError,
    CheckpointFiles,
    StoredTensor,
    TensorEntry,
    open_checkpoint,
    report,
)
from ds41jax.config import ModelConfig
from ds41jax.kernels.cards import Cards
from ds41jax.model.params import Params, engram_table_specs, param_specs
from ds41jax.model.sharding import check_split, partition
from ds41jax.model.tensors import TensorSpec

ALIGNMENT = 64  # what jax's CPU client asks of a buffer that it takes over instead of copying
_CHECK_ELEMENTS = 1 << 20  # tensors are searched for NaN in pieces that stay in cache

Sources = list[tuple[tuple[int, ...], StoredTensor]]  # (index in the leaf, tensor)
Read = Callable[[StoredTensor, np.ndarray], None]
Target: TypeAlias = "jax.Device | NamedSharding"
Fill = Callable[[jax.ShapeDtypeStruct, Sources, Target, Read], jax.Array]


def expected_entries(specs: Any) -> Iterator[TensorEntry]:
    """Every tensor on disk that a tree of `TensorSpec` stands for."""
    for leaf in jax.tree.leaves(specs):
        for entry in leaf.files():
            yield TensorEntry(*entry)


def check_checkpoint(path: str | Path, config: ModelConfig, specs: Any) -> CheckpointFiles:
    """Opens a checkpoint and compares the name, dtype and shape of every tensor.

    Args:
      path: the checkpoint's folder.
      config: the model, for the Engram tables that are no part of `specs`.
      specs: tree of `TensorSpec`.

    Raises:
      CheckpointError: listing all missing, unexpected and malformed tensors.
    """
    files = open_checkpoint(path)
    tables = engram_table_specs(config)
    expected = {entry.name: entry for entry in expected_entries((specs, tables))}
    problems: dict[str, list[str]] = {
        "missing": [str(e) for e in expected.values() if e.name not in files.tensors],
        "unexpected": [str(t) for n, t in files.tensors.items() if n not in expected],
        "malformed": [
            f"{files.tensors[name]}, expected {wanted.dtype} {list(wanted.shape)}"
            for name, wanted in expected.items()
            if name in files.tensors and not _matches(files.tensors[name], wanted)
        ],
    }
    if any(problems.values()):
        raise report(f"{path}: the tensors do not fit config.json", problems)
    return files


def _matches(found: TensorEntry, wanted: TensorEntry) -> bool:
    packed = wanted.dtype == "I8" and found.dtype == "U8"
    return found.shape == wanted.shape and (packed or found.dtype == wanted.dtype)


def load_params(
    path: str | Path,
    config: ModelConfig,
    *,
    progress: bool = True,
    device: jax.Device | None = None,
    cards: Cards | None = None,
    local_layers: int | None = None,
) -> Params:
    """Loads all weights but the Engram tables.

    Args:
      path: the checkpoint's folder.
      config: its parsed `config.json`.
      progress: shows the bytes read on stderr.
      device: where the weights go; jax's default device if None.
      cards: over which they are split instead.
      local_layers: routed experts of the layers from here on stay unread; None to read all.

    Raises:
      CheckpointError: if a tensor does not fit the configuration or holds a NaN or an infinity.
      ValueError: if the weights cannot be split over the cards.
    """
    specs = param_specs(config, local_layers)
    if cards is not None:
        check_split(config, cards)
    files = check_checkpoint(path, config, param_specs(config))
    device = jax.local_devices()[0] if device is None else device
    fill = _filler(device)
    total = sum(entry.nbytes for entry in expected_entries(specs))
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not progress) as bar:

        def load(leaf: TensorSpec) -> Any:
            abstract, tree = jax.tree.flatten(leaf.abstract())
            stored = [(index, names) for index, *names in leaf.stored()]
            target = device if cards is None else NamedSharding(cards.mesh, partition(leaf, cards))
            arrays = []
            for part, shape in enumerate(abstract):
                sources = [(index, files.tensors[names[part]]) for index, names in stored]
                arrays.append(fill(shape, sources, target, _reader(files, bar)))
            return jax.tree.unflatten(tree, arrays)

        loaded: Params = jax.tree.map(load, specs)
        return loaded


def _reader(files: CheckpointFiles, bar: tqdm) -> Read:
    """A function that reads and checks one tensor into a slice of a buffer."""

    def read(tensor: StoredTensor, target: np.ndarray) -> None:
        files.read_into(tensor.name, target)
        check_finite(tensor, target)
        bar.update(tensor.nbytes)

    return read


def _filler(device: jax.Device) -> Fill:
    return _fill_whole if device.platform == "cpu" else _fill_by_layer


def _fill_whole(
    shape: jax.ShapeDtypeStruct, sources: Sources, target: Target, read: Read
) -> jax.Array:
    buffer = aligned_empty(shape.shape, shape.dtype)
    for index, tensor in sources:
        read(tensor, buffer[index])
    return _put(buffer, target)


def _put(buffer: np.ndarray, target: Target) -> jax.Array:
    """A buffer on a device, which may take it over, or each card's share of it on that card."""
    if isinstance(target, NamedSharding):
        return jax.make_array_from_callback(buffer.shape, target, buffer.__getitem__)
    return jax.device_put(buffer, target, may_alias=True)


def _fill_by_layer(
    shape: jax.ShapeDtypeStruct, sources: Sources, target: Target, read: Read
) -> jax.Array:
    if not sources or not sources[0][0]:
        return _fill_whole(shape, sources, target, read)
    leaf = jnp.zeros(shape.shape, shape.dtype, device=target)
    slab_target = target
    if isinstance(target, NamedSharding):
        slab_target = NamedSharding(target.mesh, P(*target.spec[1:]))
    for first, group in itertools.groupby(sources, key=lambda source: source[0][0]):
        slab = aligned_empty(shape.shape[1:], shape.dtype)
        for index, tensor in group:
            read(tensor, slab[index[1:]])
        leaf = _place(leaf, _put(slab, slab_target), first)
        leaf.block_until_ready()  # so that no second slab is alive on the host
    return leaf


@functools.partial(jax.jit, donate_argnums=0)
def _place(leaf: jax.Array, slab: jax.Array, index: int) -> jax.Array:
    return lax.dynamic_update_index_in_dim(leaf, slab, index, axis=0)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that jax's CPU client takes over instead of copying."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def check_finite(tensor: TensorEntry, values: np.ndarray) -> None:
    """Raises `CheckpointError` naming `tensor` if `values` hold a NaN or an infinity.

    Args:
      tensor: name and safetensors dtype.
      values: C-contiguous, of the dtype in `safetensors_files.DTYPES`.
    """
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHECK_ELEMENTS):
        if _has_nonfinite(tensor.dtype, flat[start : start + _CHECK_ELEMENTS]):
            raise CheckpointError(f"{tensor}: holds a NaN or an infinity")


def _has_nonfinite(dtype: str, values: np.ndarray) -> bool:
    match dtype:
        case "F32":
            return not np.isfinite(values).all()
        case "BF16":
            return bool(((values.view(np.uint16) & 0x7F80) == 0x7F80).any())
        case "F8_E4M3":
            return bool(((values.view(np.uint8) & 0x7F) == 0x7F).any())
        case "F8_E8M0":
            return bool(values.max(initial=0) == 0xFF)
    return False  # every packed FP4 byte is two finite values


def open_engram_tables(path: str | Path, config: ModelConfig) -> tuple[EngramTable, ...]:
    """Maps the Engram tables, one per Engram layer in ascending order; reads no rows.

    Raises:
      CheckpointError: if a table is missing or does not fit the configuration.
    """
    specs = engram_table_specs(config)
    if not specs:
        return ()
    files = open_checkpoint(path)
    _check_tables(files, expected_entries(specs))
    return tuple(
        EngramTable(name, files.view(name).view(np.uint8), files.view(scale))
        for spec in specs
        for _, name, scale in spec.stored()
    )


def _check_tables(files: CheckpointFiles, expected: Iterable[TensorEntry]) -> None:
    wrong = [
        str(wanted)
        for wanted in expected
        if wanted.name not in files.tensors or not _matches(files.tensors[wanted.name], wanted)
    ]
    if wrong:
        raise report(f"{files.path}: Engram tables", {"missing or malformed": wrong})
