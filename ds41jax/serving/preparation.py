"""From a checked request to the engine's: prompt, images, limits, constraint."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ds41jax.engine.constraints import Constraint
from ds41jax.engine.request import ImageSpan, Request
from ds41jax.serving.answer_format import constraint_of, response_constraint
from ds41jax.serving.conversation import AnswerFormat, Prompt, render
from ds41jax.serving.errors import invalid
from ds41jax.serving.images import load_images, place_images
from ds41jax.serving.incoming import Incoming
from ds41jax.serving.output import ParsePlan
from ds41jax.serving.server import Server
from ds41jax.serving.settings import default_max_tokens, resolve_max_tokens
from ds41jax.tokenizer import TokenizerError

THREAD_ABOVE = 16 << 10
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Prepared:
    """What the engine is to do, how its output is read, and what the output must be."""

    request: Request
    plan: ParsePlan
    answer: AnswerFormat
    prompt: Prompt | None
    must_call: bool = False


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids with its images in place, and its text where it has one."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    prompt: Prompt | None = None


async def off_loop(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Does work on so many bytes, in a thread if they are many, so that other requests go on."""
    if size > THREAD_ABOVE:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


async def encode_prompt(server: Server, incoming: Incoming, size: int) -> EncodedPrompt:
    """The token ids that go to the model; raises `ApiError`.

    Args:
      size: bytes of the request, which tell how long this may take.
    """
    prompt, ids = await off_loop(size, _encode, server, incoming)
    if prompt is None:
        return EncodedPrompt(ids)
    private = server.options.private_urls
    images = await load_images(prompt.images, server.config.vision, server.decoders, private)
    placed_ids, placed = place_images(ids, images, server.config.image_token_id)
    return EncodedPrompt(placed_ids, placed, prompt)


def _encode(server: Server, incoming: Incoming) -> tuple[Prompt | None, list[int]]:
    config = server.config
    if incoming.conversation is not None:
        prompt = render(incoming.conversation)
        try:
            return prompt, prompt.encode(server.tokenizer)
        except TokenizerError as error:
            raise invalid("messages", str(error)) from error
    if isinstance(incoming.prompt, str):
        return None, [config.bos_token_id, *server.tokenizer.encode(incoming.prompt)]
    ids = list(incoming.prompt)
    if not ids or not all(0 <= id < server.tokenizer.vocab_size for id in ids):
        message = f"prompt must hold token ids below {server.tokenizer.vocab_size}, at least one."
        raise invalid("prompt", message)
    if config.image_token_id in ids:
        raise invalid("prompt", "prompt holds the image token, but no image goes with it.")
    return None, ids


async def prepare(server: Server, incoming: Incoming, size: int) -> Prepared:
    """The engine's request and how to read its output; raises `ApiError`."""
    encoded = await encode_prompt(server, incoming, size)
    settings, prompt, options = incoming.settings, encoded.prompt, server.options
    thinking = prompt is not None and prompt.thinking
    limit = resolve_max_tokens(
        settings.max_tokens,
        len(encoded.ids),
        options.context,
        options.max_output_tokens,
        default_max_tokens(thinking, incoming.max_effort),
    )
    constraint: Constraint | None
    if prompt is None or incoming.conversation is None:
        answer, must_call = incoming.answer, False
        plan = ParsePlan(start="text", stop=settings.stop)
        constraint = response_constraint(answer, False, options.guided)
    else:
        answer, choice = incoming.conversation.answer, incoming.conversation.choice
        must_call = choice.mode == "required" and bool(prompt.tools)
        plan = ParsePlan(
            prompt.start, bool(prompt.tools), answer.kind == "json_object", settings.stop
        )
        constraint = constraint_of(prompt, choice, answer, server.options.guided)
    request = Request(
        token_ids=tuple(encoded.ids),
        max_tokens=limit,
        images=encoded.images,
        sampling=settings.sampling(options.sampling),
        constraint=constraint,
        top_logprobs=settings.top_logprobs,
        stop_token_ids=settings.stop_token_ids,
        ignore_eos=settings.ignore_eos,
        min_tokens=min(settings.min_tokens, limit),
    )
    return Prepared(request, plan, answer, prompt, must_call)
