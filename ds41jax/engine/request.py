"""What crosses the engine's face: requests in, events out.

Everything here is plain data, so that a server or a notebook needs nothing else from the engine.
"""

from dataclasses import dataclass, field

import numpy as np

from ds41jax.engine.constraints import Constraint
from ds41jax.engine.sampling import SamplingParams

MAX_TOP_LOGPROBS = 20


class EngineError(Exception):
    """Why a request was refused or failed; `kind` is stable, the message is for people.

    Kinds: "invalid" (the request can never be served), "queue_full", "draining", "closed",
    "capacity" (the cache has no room for it), "unavailable" (remote experts did not answer),
    "internal".
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ImageSpan:
    """An image of a prompt: where its span lies and what it shows.

    Attributes:
      start: position of the span's first token.
      patches: [grid_h * grid_w, 3, patch_size, patch_size], normalised.
      grid_h, grid_w: rows and columns of patches.
      identity: hash of the pixels and the grid; equal images share cached prefixes.
    """

    start: int
    patches: np.ndarray
    grid_h: int
    grid_w: int
    identity: bytes


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
      token_ids: the prompt; every position of an image span holds the image token.
      images: spans in ascending order of position.
      max_tokens: emitted at most.
      sampling: how tokens are chosen.
      constraint: what the output must look like, or None.
      top_logprobs: None for no log probabilities, else how many alternatives come with each token.
      stop_token_ids: end the sequence besides the model's end token.
      ignore_eos: go on after the model's end token.
      min_tokens: emitted at least: neither the model's end token nor a stop token is chosen before,
        unless the constraint allows nothing else.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    images: tuple[ImageSpan, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    top_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities before temperature and filters.

    Attributes:
      logprob: of the chosen token.
      top: (token id, log probability) of the most likely ones, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Started:
    """The request has begun; `cached_tokens` of its prompt need no computing."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Token:
    """One emitted token. The end token is emitted too."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Finished:
    """The last event of a served request.

    Attributes:
      reason: "stop" (end or stop token, or a finished constraint), "length" or "cancelled".
      drafted: draft tokens that were verified; accepted: those among them that were emitted.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be finished."""

    error: EngineError


Event = Started | Token | Finished | Failed
