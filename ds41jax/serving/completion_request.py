"""`POST /v1/completions`: a text, or token ids, continued as it stands."""

from typing import Any

from ds41jax.serving.answer_format import read_response_format
from ds41jax.serving.errors import invalid
from ds41jax.serving.fields import CompletionFields, read_fields
from ds41jax.serving.incoming import Incoming
from ds41jax.serving.settings import Settings, common_settings


def read_completion(body: dict[str, Any]) -> Incoming:
    """Reads a request; raises `ApiError` naming the field at fault."""
    fields = read_fields(CompletionFields, body)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true.")
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    settings = Settings(
        **common_settings(fields),  # type: ignore[arg-type]
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        max_tokens=fields.max_tokens,
        stop=tuple(stop),
        top_logprobs=fields.logprobs,
    )
    answer = read_response_format(fields.response_format, "response_format")
    return Incoming(settings, prompt=read_prompt(fields.prompt, "prompt"), answer=answer)


def read_prompt(prompt: Any, param: str) -> str | tuple[int, ...]:
    """A text or the ids of one prompt; raises `ApiError`."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(id) is int for id in prompt):
        raise invalid(param, f"{param} must be one text or one list of token ids.")
    return tuple(prompt)
