"""The indexer: which global rows each query attends to.

An index source scores every visible global row of its KV source with a few light heads and keeps
the best `index_topk`. The candidate source also keeps the best blocks of rows; later index sources
choose inside those blocks only. Layers in between reuse the last selection.

Letters: T rows, H index heads, I index width, N rows of a sequence, K selected, B candidate blocks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ds41jax.config import ModelConfig, SelectRole
from ds41jax.formats import Format, QuantizedArray, values
from ds41jax.kernels.compute import REFERENCE, Compute
from ds41jax.kernels.index_select import (
    PagedKeys,
    best_blocks,
    best_rows,
    candidate_blocks,
    index_scores,
    paged_index_scores,
    top_rows,
)
from ds41jax.kernels.linear import linear, operand, quantized_linear
from ds41jax.kernels.quantize import Input
from ds41jax.kernels.rows import map_rows
from ds41jax.model.rope import compressed_frequencies, rotate
from ds41jax.model.state import PAGE_ROWS, KVState, StepBatch, slots_of
from ds41jax.model.tensors import spec

CHOSEN = "chosen"  # name of what a training step keeps instead of choosing again


@struct.dataclass
class IndexerWeights:
    """Stacked over the index sources."""

    wq_b: QuantizedArray  # [H * I, q_lora_rank]
    weights_proj: jax.Array  # [H, hidden]


@struct.dataclass
class Selection:
    """What index sources hand on to later layers.

    Attributes:
      rows: [T, K] int32 global rows of the sequence, ascending, then -1.
      blocks: [T, B] bool candidate blocks.
      scores: in training, the scores [T, K] of `rows`, for attention to teach; otherwise None.
    """

    rows: jax.Array
    blocks: jax.Array
    scores: jax.Array | None = None


def indexer_specs(config: ModelConfig) -> IndexerWeights:
    prefix, layers = "layers.{i}.attn.indexer", config.index_source_layer_ids
    width = config.index_n_heads * config.index_head_dim
    return IndexerWeights(
        wq_b=spec(
            f"{prefix}.wq_b.weight", (width, config.q_lora_rank), Format.FP8_BLOCK, layers=layers
        ),
        weights_proj=spec(
            f"{prefix}.weights_proj.weight",
            (config.index_n_heads, config.hidden_size),
            "bf16",
            layers=layers,
        ),
    )


def empty_selection(batch: StepBatch, config: ModelConfig) -> Selection:
    """A selection of nothing, of the shapes that the layers carry."""
    rows = batch.positions.shape[0]
    blocks = -(-sequence_rows(batch, 1) // config.candidate_block_size)
    return Selection(
        rows=jnp.full((rows, config.index_topk), -1, jnp.int32),
        blocks=jnp.zeros((rows, blocks), bool),
    )


def sequence_rows(batch: StepBatch, ratio: int) -> int:
    """Global rows of `ratio` tokens that the page tables can hold for one sequence."""
    pages = batch.page_tables.shape[-1]
    return -(-pages // ratio) * PAGE_ROWS


def index_queries(
    x: Input,
    q_latent: Input,
    positions: jax.Array,
    weights: IndexerWeights,
    config: ModelConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Quantised index queries [T, H, I] as values, and scaled head weights [T, H].

    Args:
      x: [T, hidden] attention input; q_latent: [T, q_lora_rank] normalised low-rank query.
      weights: of one index source.
    """
    heads, width = config.index_n_heads, config.index_head_dim
    wq_b = operand(weights.wq_b, compute)
    projection = operand(weights.weights_proj, compute)
    frequencies = compressed_frequencies(config)
    scale = width**-0.5 * heads**-0.5

    def tile(x: jax.Array, latent: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = quantized_linear(latent, wq_b, compute).reshape(-1, heads, width)
        q = rotate(q, positions, frequencies, compute)
        head_weights = linear(x, projection, compute).astype(jnp.float32) * scale
        return compute.fake_quantize(q, Format.MXFP4), compute.round(head_weights)

    return map_rows(compute, tile, x, q_latent, positions)


def sequence_keys(
    state: KVState,
    batch: StepBatch,
    source: jax.Array | int,
    ratio: int,
    compute: Compute = REFERENCE,
) -> jax.Array | PagedKeys:
    """Index keys of every sequence's rows, in order: values [B, N, I], on a GPU where they lie.

    In training of every slot's rows, [S, N, I]: there a slot holds several documents.
    """
    pages = sequence_rows(batch, ratio) // PAGE_ROWS
    table = batch.page_tables[source][:, :pages]
    if compute.differentiable:
        table = table[batch.sequences.reshape(slots_of(state), -1)[:, 0]]
    if compute.on_gpu:
        assert isinstance(state.index_pages, QuantizedArray)
        return PagedKeys(state.index_pages, table)
    keys = values(jax.tree.map(lambda x: x[table], state.index_pages))
    return keys.reshape(table.shape[0], pages * PAGE_ROWS, -1)


def select(
    q: jax.Array,
    head_weights: jax.Array,
    keys: jax.Array | PagedKeys,
    batch: StepBatch,
    selection: Selection,
    role: SelectRole,
    ratio: int,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Selection, jax.Array]:
    """Scores and selects one row at a time, so that long contexts stay small in memory.

    Args:
      q: [T, H, I]; head_weights: [T, H]; keys: of `sequence_keys`, [B, N, I] or in their pages.
      selection: of earlier layers; its blocks bound a SELECT_WITHIN.

    Returns:
      The new selection, and the scores [T, N] (-inf where not visible) for those who look inside.
    """
    if compute.differentiable:
        assert not isinstance(keys, PagedKeys)
        return _select_in_training(
            q, head_weights, keys, batch, selection, role, ratio, config, compute
        )
    sequences = jnp.minimum(batch.sequences, batch.starts.shape[0] - 1)
    if isinstance(keys, PagedKeys):
        visible = (batch.positions + 1) // ratio
        scores = paged_index_scores(q, head_weights, keys, sequences, visible, compute)
        chosen = _choose_on_gpu(scores, visible, selection.blocks, role, config, compute)
        return chosen, scores
    n = keys.shape[1]

    def one(
        q: jax.Array,
        head_weights: jax.Array,
        sequence: jax.Array,
        position: jax.Array,
        blocks: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        visible = (position[0] + 1) // ratio
        mine = lax.dynamic_index_in_dim(keys, sequence[0], keepdims=False)
        scores = index_scores(q[0], head_weights[0], mine, compute)
        scores = jnp.where(jnp.arange(n) < visible, scores, -jnp.inf)
        rows, kept = _choose(scores, visible, blocks[0], role, config)
        return rows[None], kept[None], scores[None]

    rows, blocks, scores = map_rows(
        compute, one, q, head_weights, sequences, batch.positions, selection.blocks, tile=1
    )
    return Selection(rows=rows, blocks=blocks), scores


def _select_in_training(
    q: jax.Array,
    head_weights: jax.Array,
    keys: jax.Array,
    batch: StepBatch,
    selection: Selection,
    role: SelectRole,
    ratio: int,
    config: ModelConfig,
    compute: Compute,
) -> tuple[Selection, jax.Array]:
    """`select` for whole batches: equal numbers of rows T / S in each of the slots of keys [S, N,
    I]. The chosen rows' scores are computed again with a gradient; no choice has one."""
    slots, n, _ = keys.shape
    by_slot = partial(jnp.reshape, shape=(slots, -1))

    def all_scores(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, weights, keys = inputs
        return compute.round(_weighted_scores("thi,ni->thn", q, keys, weights, compute))

    q, head_weights = (x.reshape(slots, -1, *x.shape[1:]) for x in (q, head_weights))
    scores = lax.map(all_scores, jax.tree.map(lax.stop_gradient, (q, head_weights, keys)))
    scores = scores.reshape(-1, n).astype(jnp.float32)
    visible = (batch.positions + 1) // ratio
    lowest = -(-batch.per_row(batch.starts) // ratio)
    row = jnp.arange(n)[None, :]
    seen = (row < visible[:, None]) & (row >= lowest[:, None])
    scores = jnp.where(seen, scores, -jnp.inf)
    if compute.selecting.on_gpu:
        chosen = _choose_on_gpu(scores, visible, selection.blocks, role, config, compute.selecting)
        rows, blocks = chosen.rows, chosen.blocks
    else:
        choose = partial(_choose, role=role, config=config)
        rows, blocks = jax.vmap(choose)(scores, visible, selection.blocks)
    rows, blocks = checkpoint_name(rows, CHOSEN), checkpoint_name(blocks, CHOSEN)
    safe = by_slot(jnp.maximum(rows, 0))[..., None]
    mine = jnp.take_along_axis(keys, safe, axis=1).reshape(*q.shape[:2], -1, keys.shape[2])
    taught = _weighted_scores("sthi,stki->sthk", q, mine, head_weights, compute).reshape(rows.shape)
    return Selection(rows=rows, blocks=blocks, scores=taught), scores


def _weighted_scores(
    expression: str,
    q: jax.Array,
    keys: jax.Array,
    head_weights: jax.Array,
    compute: Compute,
) -> jax.Array:
    """Sum over heads of weight * relu(q . k), unrounded."""
    q, keys = q.astype(compute.dtype), keys.astype(compute.dtype)
    products = jnp.einsum(expression, q, keys, preferred_element_type=jnp.float32)
    return (jax.nn.relu(products) * head_weights.astype(jnp.float32)[..., None]).sum(-2)


def _choose(
    scores: jax.Array, visible: jax.Array, blocks: jax.Array, role: SelectRole, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """The rows [K] and candidate blocks [B] of one query's scores [N]."""
    block = config.candidate_block_size
    if role is SelectRole.SELECT_AND_FILTER:
        blocks = candidate_blocks(scores, visible, config.candidate_topk_blocks, block)
    elif role is SelectRole.SELECT_WITHIN:
        inside = jnp.repeat(blocks, block)[: scores.shape[0]]
        scores = jnp.where(inside, scores, -jnp.inf)
    return top_rows(scores, config.index_topk), blocks


def _choose_on_gpu(
    scores: jax.Array,
    visible: jax.Array,
    blocks: jax.Array,
    role: SelectRole,
    config: ModelConfig,
    compute: Compute,
) -> Selection:
    """`_choose` of all queries: scores [T, N], visible [T], blocks [T, B]."""
    block, among = config.candidate_block_size, scores
    if role is SelectRole.SELECT_AND_FILTER:
        count = blocks.shape[1]
        kept = best_blocks(scores, visible, config.candidate_topk_blocks, block, compute)
        blocks = jnp.pad(kept, ((0, 0), (0, count - kept.shape[1])))
    elif role is SelectRole.SELECT_WITHIN:
        inside = jnp.repeat(blocks, block, axis=1)[:, : scores.shape[1]]
        among = jnp.where(inside, scores, -jnp.inf)
    return Selection(rows=best_rows(among, config.index_topk, compute), blocks=blocks)
