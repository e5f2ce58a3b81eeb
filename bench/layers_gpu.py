"""Layers of the official geometry on a GPU: a decode step's time for each kind, against its bytes.

Six layers stand for the forty: window only, KV source of token pairs, its reader, KV source of
every token with candidate blocks, its reader, and a selection within the candidates. Weights and
caches are random; a step's rows belong to up to 16 sequences at one context length.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import compiled_seconds, copy_bandwidth, kernel_times, write_results

from ds41jax.config import ModelConfig, load_config
from ds41jax.formats import QuantizedArray
from ds41jax.kernels.compute import Compute, Kernels
from ds41jax.model import backbone, text_layer
from ds41jax.model.hyper_connections import initial_pre
from ds41jax.model.params import Params, param_specs
from ds41jax.model.state import PAGE_ROWS, CacheShape, KVState, StepBatch, init_state
from ds41jax.model.tensors import TensorSpec
from ds41jax.model.text_layer import Carry

OFFICIAL = Path(__file__).parent.parent / "configs" / "deepseek-v4.1-flash.json"
KINDS = ("window", "pair source", "pair reader", "source", "reader", "within candidates")
STEPS = ((1, 1), (6, 1), (16, 16), (96, 16))  # rows, sequences


def six_layers() -> ModelConfig:
    """The official configuration with one layer of each kind and nothing beside the layers."""
    return dataclasses.replace(
        load_config(OFFICIAL),
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        vision=None,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def noise(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Well-mixed bytes of any shape, without a counter that would overflow."""
    mixed = jnp.full(shape, seed * 2654435761 % 2**32, jnp.uint32)
    for axis in range(len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        mixed = (mixed ^ (place + axis * 40503)) * jnp.uint32(2246822519)
        mixed = mixed ^ (mixed >> 15)
    return (mixed >> 11).astype(jnp.uint8)


def random_leaf(spec: TensorSpec, seed: int) -> Any:
    """Weights of moderate size in the spec's format."""
    like = spec.abstract()
    if isinstance(like, QuantizedArray):
        codes = noise(like.codes.shape, seed)
        if not like.format.packed:
            codes = (codes & 0x80) | (0x28 + (codes & 0x1F))
            codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        scales = 116 + noise(like.scales.shape, seed + 1) % 3
        return QuantizedArray(codes, scales, format=like.format)
    if len(spec.shape) == 1:
        return jnp.ones(like.shape, like.dtype)
    return ((noise(like.shape, seed).astype(jnp.float32) - 127.5) / 4096).astype(like.dtype)


def random_params(config: ModelConfig) -> Params:
    specs = param_specs(config)
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, TensorSpec))
    made = [random_leaf(spec, 7 * i + 1) for i, spec in enumerate(leaves)]
    params: Params = jax.tree.unflatten(tree, made)
    return params


def random_caches(state: KVState) -> KVState:
    """Random codes where rows are stored; scales near one."""

    def fill(rows: Any, seed: int) -> Any:
        codes = noise(rows.codes.shape, seed)
        if rows.codes.dtype != jnp.uint8:
            codes = (codes & 0x80) | (0x28 + (codes & 0x1F))
            codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        if rows.scales.dtype == jnp.uint8:
            scales = 124 + noise(rows.scales.shape, seed + 1) % 3
        else:
            scales = jnp.full(rows.scales.shape, 0.25, rows.scales.dtype)
        return dataclasses.replace(rows, codes=codes, scales=scales)

    return dataclasses.replace(
        state,
        window=fill(state.window, 3),
        pages=fill(state.pages, 5),
        index_pages=fill(state.index_pages, 9),
    )


def decode_batch(rows: int, sequences: int, context: int, config: ModelConfig) -> StepBatch:
    """Equal shares of the rows for every sequence, at the end of `context` tokens."""
    each, pages = rows // sequences, -(-context // PAGE_ROWS)
    owner = np.repeat(np.arange(sequences), each)
    sources = len(config.kv_source_layer_ids)
    tables = np.random.default_rng(0).permutation(sources * sequences * pages)
    start = np.full(sequences, context - each)
    zero = np.zeros(sequences)

    def ints(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.int32)

    return StepBatch(
        token_ids=ints(np.zeros(rows)),
        positions=ints(start[owner] + np.tile(np.arange(each), sequences)),
        sequences=ints(owner),
        is_image=jnp.zeros(rows, bool),
        image_embeds=None,
        engram=None,
        slots=ints(np.arange(sequences)),
        starts=ints(start),
        ends=ints(start + each),
        window_floor=ints(zero),
        decoder_floor=ints(zero),
        global_floor=ints(zero),
        page_tables=ints(tables.reshape(sources, sequences, pages)),
        logit_rows=ints(np.arange(rows)),
    )


def start_carry(batch: StepBatch, state: KVState, config: ModelConfig, compute: Compute) -> Carry:
    rows = batch.positions.shape[0]
    shape = (rows, config.hc_mult, config.hidden_size)
    stream = jax.random.normal(jax.random.key(rows), shape, jnp.bfloat16)
    return backbone.start(stream, initial_pre(rows, config), state, batch, config, compute)


def layer_seconds(
    index: int,
    params: Params,
    carry: Carry,
    batch: StepBatch,
    config: ModelConfig,
    compute: Compute,
) -> tuple[float, dict[str, tuple[int, float]], Carry]:
    """Seconds of one layer, queued back to back; its kernels; and what it hands on."""

    def step(carry: Carry, params: Params, batch: StepBatch) -> tuple[Carry, jax.Array]:
        carry = text_layer.layer(carry, index, params, batch, config, compute)
        return carry, carry.pre + 0  # to wait for: the carry itself is given away

    compiled = jax.jit(step, donate_argnums=0).lower(carry, params, batch).compile()
    held = [carry]

    def run() -> jax.Array:
        held[0], done = compiled(held[0], params, batch)
        return done

    seconds = compiled_seconds(run, [()])
    return seconds, kernel_times(run), held[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[65536])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 16, 96])
    parser.add_argument("--layers", type=int, nargs="+", default=list(range(len(KINDS))))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config, compute = six_layers(), Compute(kernels=Kernels.PALLAS)
    bandwidth = copy_bandwidth(2)
    params = random_params(config)
    records: list[dict[str, Any]] = []
    for context in options.context:
        for rows, sequences in STEPS:
            if rows not in options.rows:
                continue
            batch = decode_batch(rows, sequences, context, config)
            pages = int(batch.page_tables.size)
            state = random_caches(init_state(config, CacheShape(sequences, pages), compute))
            carry = start_carry(batch, state, config, compute)
            for index, kind in ((i, KINDS[i]) for i in options.layers):
                begun = time.perf_counter()
                seconds, kernels, carry = layer_seconds(
                    index, params, carry, batch, config, compute
                )
                busy = sum(count * us for count, us in kernels.values())
                finite = bool(jnp.isfinite(carry.stream.astype(jnp.float32)).all())
                record = {
                    "layer": kind,
                    "rows": rows,
                    "context": context,
                    "us": round(seconds * 1e6, 1),
                    "kernel_us": round(busy, 1),
                    "launches": sum(count for count, _ in kernels.values()),
                    "kernels": kernels,
                    "finite": finite,
                }
                records.append(record)
                top = sorted(kernels.items(), key=lambda item: -item[1][0] * item[1][1])[:14]
                print({**record, "kernels": dict(top)}, round(time.perf_counter() - begun, 1))
                write_results(options.out, records, copy_bytes_per_second=bandwidth)
            del state, carry


if __name__ == "__main__":
    main()
