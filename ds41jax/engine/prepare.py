"""From a request to a sequence: everything is checked before it can cost anybody anything."""

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ds41jax.engine.constraints import ConstraintCompiler
from ds41jax.engine.grammar_matcher import Matcher
from ds41jax.engine.loading import Model
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import MAX_TOP_LOGPROBS, EngineError, Event, Request
from ds41jax.engine.sequence import UNSET, Sequence
from ds41jax.model.vision import image_span, num_image_tokens
from ds41jax.tokenizer import TokenizerError

THINK_END = "</think>"


class Preparer:
    """Checks requests against a model and an engine's sizes. Thread-safe."""

    def __init__(self, model: Model, options: EngineOptions, block: int):
        """`block`: drafts that may stand after the last token."""
        self.model, self.options, self._block = model, options, block
        self._compiler: ConstraintCompiler | None = None
        self._lock = threading.Lock()

    def sequence(self, request: Request, emit: Callable[[Event], None]) -> Sequence:
        """A sequence that is not in the engine yet.

        Raises:
          EngineError: "invalid", naming the field of the request.
        """
        self._check(request)
        prompt = len(request.token_ids)
        capacity = prompt + request.max_tokens + self._block + 1
        tokens, is_image = np.zeros(capacity, np.int32), np.zeros(capacity, bool)
        tokens[:prompt] = request.token_ids
        for start, stop in self.image_spans(request):
            is_image[start:stop] = True
        return Sequence(
            number=UNSET,
            request=request,
            emit=emit,
            tokens=tokens,
            is_image=is_image,
            symbols=np.zeros(capacity, np.uint32),
            matcher=self._matcher(request),
            count=prompt,
        )

    def image_spans(self, request: Request) -> list[tuple[int, int]]:
        """[start, stop) of each image's span in the prompt."""
        if not request.images:
            return []
        vision = self.model.config.vision
        if vision is None:
            raise EngineError("invalid", "images: this checkpoint has no vision tower")
        ratio = vision.downsample_ratio
        return [
            (i.start, i.start + num_image_tokens(-(-i.grid_h // ratio), -(-i.grid_w // ratio)))
            for i in request.images
        ]

    def image_embeddings(self, request: Request) -> jax.Array | None:
        """[prompt, hidden] with the images' embeddings in place, on the device; None without."""
        config = self.model.config
        spans = self.image_spans(request)
        if not spans or config.vision is None:
            return None
        embeds = jnp.zeros((len(request.token_ids), config.hidden_size), jnp.float32)
        for (start, stop), image in zip(spans, request.images, strict=True):
            span = image_span(
                self.model.params.vision,
                image.patches,
                image.grid_h,
                image.grid_w,
                config.vision,
                self.options.compute,
            )
            embeds = embeds.at[start:stop].set(span.astype(jnp.float32))
        return embeds

    def _check(self, request: Request) -> None:
        config, prompt = self.model.config, len(request.token_ids)
        limit = self.options.context
        spans = self.image_spans(request)
        ends = [0, *(stop for _, stop in spans)]
        checks = [
            (prompt > 0, "token_ids: the prompt is empty"),
            (
                all(0 <= t < config.vocab_size for t in request.token_ids),
                f"token_ids: a token lies outside the vocabulary of {config.vocab_size}",
            ),
            (request.max_tokens >= 1, f"max_tokens: {request.max_tokens} is below 1"),
            (
                0 <= request.min_tokens <= request.max_tokens,
                f"min_tokens: {request.min_tokens} is not from 0 to max_tokens, "
                f"{request.max_tokens}",
            ),
            (
                prompt + request.max_tokens <= limit,
                f"max_tokens: {prompt} prompt tokens and {request.max_tokens} to generate exceed "
                f"the context of {limit}",
            ),
            (
                request.top_logprobs is None or 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS,
                f"top_logprobs: {request.top_logprobs} is not from 0 to {MAX_TOP_LOGPROBS}",
            ),
            (
                all(start >= end for (start, _), end in zip(spans, ends, strict=False))
                and ends[-1] <= prompt,
                "images: spans overlap or leave the prompt",
            ),
        ]
        for ok, message in checks:
            if not ok:
                raise EngineError("invalid", message)

    def _matcher(self, request: Request) -> Matcher | None:
        if request.constraint is None:
            return None
        try:
            return self.constraints.compile(request.constraint).matcher()
        except (ValueError, ImportError) as error:
            raise EngineError("invalid", f"constraint: {error}") from error

    @property
    def constraints(self) -> ConstraintCompiler:
        """The compiler of this model's constraints, made on first use."""
        with self._lock:
            if self._compiler is None:
                tokenizer, config = self.model.tokenizer, self.model.config
                if tokenizer is None:
                    raise EngineError("invalid", "constraint: the checkpoint has no tokenizer")
                try:
                    think_end = tokenizer.special_id(THINK_END)
                except TokenizerError:
                    think_end = None
                self._compiler = ConstraintCompiler(
                    tokenizer, config.vocab_size, (config.eos_token_id,), think_end
                )
            return self._compiler
