"""The fields of each route's request, with their types and bounds.

A field that is not listed is refused by name. Some are accepted only at the value that asks for
nothing (`n: 1`, penalties of 0); some are labels without an effect on the answer.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ds41jax.serving.errors import invalid

MAX_STOPS = 16
MAX_TOKENS_FIELD = (1 << 63) - 1

Text = Annotated[str, Meta(max_length=1 << 20)]
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS_FIELD)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopIds = Annotated[list[Annotated[int, Meta(ge=0, le=1 << 31)]], Meta(max_length=MAX_STOPS)]
Labels = dict[str, Any]
Fields = TypeVar("Fields", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is to be framed."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What all routes share."""

    model: Annotated[str, Meta(max_length=256)]
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopIds | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_FIELD)] | None = None
    metadata: Labels | None = None


class OpenAIFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What the two completion routes share."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: Stops = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    user: Text | None = None


class ThinkingField(Struct, forbid_unknown_fields=True):
    """The thinking switch; a budget is accepted for compatibility and not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


Effort = str | Annotated[int, Meta(ge=1, le=100)]


class ChatFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=100_000)]
    max_completion_tokens: Count | None = None
    thinking: ThinkingField | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_decoding_assistance: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class CompletionFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`: a text, or token ids, continued as it stands."""

    prompt: str | list[Any]
    echo: Literal[False] | None = None
    logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None


class MessagesFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`, and its token count."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=100_000)]
    max_tokens: Count | None = None
    system: Any = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    thinking: ThinkingField | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    service_tier: Text | None = None


class ReasoningField(Struct, forbid_unknown_fields=True):
    """The effort of a Responses request; there are no summaries."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`; nothing is stored, so nothing can be continued by its id."""

    input: str | list[Any]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    reasoning: ReasoningField | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    user: Text | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class TokenizeFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize` with a text; with `messages` it takes the fields of chat."""

    model: Text | None = None
    text: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


def read_fields(kind: type[Fields], body: dict[str, Any]) -> Fields:
    """The body as typed fields.

    Raises:
      ApiError: 400 naming the first field that is missing, unknown, ill-typed or out of bounds.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        if "field `" in message:
            name = message.split("`")[1]
            param = name if param is None else f"{param}.{name}"
        code = "unknown_field" if "unknown field" in message else "invalid_value"
        raise invalid(param, f"{param or 'body'}: {message}.", code) from error
