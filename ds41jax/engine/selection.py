"""The end of a step, on the device: choose tokens, accept drafts, draft the next block.

Letters: T rows, B sequences, V vocabulary, K drafts a block.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ds41jax.config import ModelConfig
from ds41jax.engine.grammar_masks import apply_masks
from ds41jax.engine.sampling import SamplingRows, choose_tokens
from ds41jax.kernels.compute import Compute
from ds41jax.kernels.rows import map_rows
from ds41jax.model import drafter
from ds41jax.model.params import Params
from ds41jax.model.sharding import over_cards
from ds41jax.model.state import KVState

TOP_LOGPROBS = 20
MAX_ROWS_EACH = 8  # an anchor and up to seven drafts


@struct.dataclass
class Choices:
    """What is asked of a step's rows.

    Attributes:
      sampling: of each row [T].
      masks: [T, ceil(V / 32)] int32 bits of allowed tokens.
      masked, logprobs: scalars, whether any row has a mask or wants log probabilities.
      token_ids: [T] the rows' tokens.
      slots, starts: [B] cache slots, and positions of the first rows.
      first_rows, counts: [B] where a sequence's rows lie; count 0 for an unused place.
    """

    sampling: SamplingRows
    masks: jax.Array
    masked: jax.Array
    logprobs: jax.Array
    token_ids: jax.Array
    slots: jax.Array
    starts: jax.Array
    first_rows: jax.Array
    counts: jax.Array


@struct.dataclass
class Outcome:
    """What came out, to be read by the host once.

    Attributes:
      tokens: [T] what the target chose after each row.
      agreed: [B] drafts of each sequence that the target would have chosen.
      logprobs: [T] natural log probabilities of the choices; top_ids, top_logprobs: [T, 20].
      draft_ids, confidence: [B, K] the block after the last accepted token; None without drafter.
    """

    tokens: Any
    agreed: Any
    logprobs: Any
    top_ids: Any
    top_logprobs: Any
    draft_ids: Any
    confidence: Any


@partial(jax.jit, static_argnames=("config", "compute", "dspark"))
@over_cards
def select_step(
    params: Params,
    state: KVState,
    logits: jax.Array,
    choices: Choices,
    config: ModelConfig,
    compute: Compute,
    dspark: bool,
) -> Outcome:
    """Chooses a token for every row of logits [T, V], and drafts on from the accepted ones."""
    allowed = lax.cond(
        choices.masked, apply_masks, lambda logits, masks: logits, logits, choices.masks
    )
    tokens = choose_tokens(allowed, choices.sampling)
    agreed = count_agreed(tokens, choices)
    logprobs, top_ids, top_logprobs = lax.cond(
        choices.logprobs, log_probabilities, _no_log_probabilities, logits, tokens
    )
    draft_ids = confidence = None
    if dspark:
        last = jnp.maximum(choices.first_rows + agreed, 0)
        made = drafter.draft(
            params.drafter,
            params.embed,
            params.head,
            state,
            choices.slots,
            tokens[last],
            choices.starts + agreed + 1,
            config,
            compute,
        )
        draft_ids, confidence = made.token_ids, made.confidence
    return Outcome(tokens, agreed, logprobs, top_ids, top_logprobs, draft_ids, confidence)


def count_agreed(tokens: jax.Array, choices: Choices) -> jax.Array:
    """[B] leading drafts that equal the target's choice at the row before them."""
    place = jnp.arange(MAX_ROWS_EACH - 1)
    row = choices.first_rows[:, None] + place
    last = tokens.shape[0] - 1
    chosen = tokens[jnp.minimum(row, last)]
    drafted = choices.token_ids[jnp.minimum(row + 1, last)]
    agrees = (chosen == drafted) & (place < choices.counts[:, None] - 1)
    return jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1)


def log_probabilities(
    logits: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Natural log probabilities of tokens [T], and the best [T, TOP_LOGPROBS] with their ids."""

    def one(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = jax.nn.log_softmax(logits, axis=-1)
        top, ids = lax.top_k(scores, min(TOP_LOGPROBS, logits.shape[-1]))
        return jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0], ids, top

    return map_rows(Compute(), one, logits, tokens, tile=1)


def _no_log_probabilities(
    logits: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (logits.shape[0], min(TOP_LOGPROBS, logits.shape[-1]))
    return (
        jnp.zeros(shape[0], jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
    )


def read(outcome: Outcome) -> Outcome:
    """The same in numpy: the one point where a round waits for the device."""
    return jax.tree.map(np.asarray, jax.device_get(outcome))
