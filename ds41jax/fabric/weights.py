"""A rank's slice of the routed experts, read from a checkpoint in the official layout."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ds41jax.checkpoint.reader import aligned_empty, check_checkpoint, check_finite
from ds41jax.checkpoint.safetensors_files import CheckpointFiles
from ds41jax.config import ModelConfig
from ds41jax.fabric.topology import Placement
from ds41jax.formats import QuantizedArray
from ds41jax.model.moe import ExpertWeights
from ds41jax.model.params import param_specs
from ds41jax.model.tensors import TensorSpec


def load_slice(
    path: str | Path,
    config: ModelConfig,
    placement: Placement,
    rank: int,
    *,
    progress: bool = True,
    device: jax.Device | None = None,
) -> ExpertWeights:
    """The columns of a rank, of every expert of the remote layers: stacks [layers, experts, ...].

    Raises:
      CheckpointError: if the checkpoint does not fit its configuration.
    """
    specs = param_specs(config)
    files = check_checkpoint(path, config, specs)
    columns = placement.topology.columns(rank, placement.width)
    layers = tuple(range(placement.first_layer, placement.layers))
    device = jax.local_devices()[0] if device is None else device
    experts = jax.tree.map(
        lambda leaf: dataclasses.replace(leaf, layers=layers),
        specs.layers.ffn.experts,
        is_leaf=lambda leaf: isinstance(leaf, TensorSpec),
    )
    total = 3 * len(layers) * placement.experts
    with tqdm(total=total, unit="matrix", desc="loading experts", disable=not progress) as bar:

        def load(leaf: TensorSpec, by_rows: bool) -> QuantizedArray:
            return _load_leaf(leaf, columns, by_rows, files, device, bar)

        return ExpertWeights(
            w1=load(experts.w1, True), w2=load(experts.w2, False), w3=load(experts.w3, True)
        )


def _load_leaf(
    leaf: TensorSpec,
    columns: slice,
    by_rows: bool,
    files: CheckpointFiles,
    device: jax.Device,
    bar: Any,
) -> QuantizedArray:
    """Expert columns are rows of gate and up, and columns of down: two codes a byte, 32 a scale."""
    whole = leaf.abstract()
    codes, codes_cut = _cut(whole.codes, columns, None if by_rows else 2)
    scales, scales_cut = _cut(whole.scales, columns, None if by_rows else 32)
    for index, name, scale in leaf.stored():
        _copy(files, name, codes_cut, codes[index])
        _copy(files, scale, scales_cut, scales[index])
        bar.update()
    codes, scales = (jax.device_put(part, device, may_alias=True) for part in (codes, scales))
    return QuantizedArray(codes, scales, format=whole.format)


def _cut(
    whole: jax.ShapeDtypeStruct, columns: slice, packed: int | None
) -> tuple[np.ndarray, tuple[slice, slice]]:
    """A buffer for the slice of every matrix [rows, columns] of a stack, and where it is cut.

    `packed` values share an element along the last axis; None to cut rows.
    """
    *stack, rows, last = whole.shape
    if packed is None:
        cut = (columns, slice(None))
        rows = columns.stop - columns.start
    else:
        cut = (slice(None), slice(columns.start // packed, columns.stop // packed))
        last = cut[1].stop - cut[1].start
    return aligned_empty((*stack, rows, last), whole.dtype), cut


def _copy(files: CheckpointFiles, name: str, cut: tuple[slice, slice], target: np.ndarray) -> None:
    target[...] = files.view(name)[cut]
    check_finite(files.tensors[name], target)
