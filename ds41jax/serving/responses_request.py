"""`POST /v1/responses`: from its JSON to what all protocols share."""

from typing import Any

import deepseek_recipe as recipe

from ds41jax.serving.answer_format import read_response_format, read_schema
from ds41jax.serving.chat_request import effort_name, read_tools
from ds41jax.serving.conversation import RECIPE_MODEL, AnswerFormat, ConversationInput, ToolChoice
from ds41jax.serving.errors import from_recipe, invalid
from ds41jax.serving.fields import ResponsesFields, read_fields
from ds41jax.serving.incoming import Incoming
from ds41jax.serving.settings import Settings, common_settings

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")


def read_responses(body: dict[str, Any]) -> Incoming:
    """Reads a request; raises `ApiError` naming the field at fault."""
    fields = read_fields(ResponsesFields, body)
    include = fields.include or []
    if any(name not in _INCLUDES for name in include):
        raise invalid("include", f"include may hold {' and '.join(_INCLUDES)}.")
    logprobs = _LOGPROBS in include or bool(fields.top_logprobs)
    settings = Settings(
        **common_settings(fields),  # type: ignore[arg-type]
        max_tokens=fields.max_output_tokens,
        top_logprobs=(fields.top_logprobs or 0) if logprobs else None,
    )
    answer, name = _answer(fields.text), None
    effort = effort_name(fields.reasoning.effort if fields.reasoning else None, "reasoning.effort")
    out: dict[str, Any] = {"model": RECIPE_MODEL, "input": fields.input}
    out |= {"instructions": fields.instructions} if fields.instructions is not None else {}
    out |= {"tools": read_tools(fields.tools)} if fields.tools else {}
    out |= {"reasoning": {"effort": effort}} if effort is not None else {}
    out |= {"text": {"format": {"type": "json_object"}}} if answer.kind == "json_object" else {}
    mode = fields.tool_choice
    if isinstance(mode, dict):
        name, kind, mode = mode.get("name"), mode.get("type"), "required"
        if kind != "function" or not isinstance(name, str):
            raise invalid("tool_choice", "tool_choice must name a function.")
    choice = ToolChoice(
        mode="auto" if mode is None else mode,
        name=name,
        parallel=fields.parallel_tool_calls is not False,
    )
    conversation = ConversationInput(
        request=recipe.ResponsesRequest, body=out, choice=choice, answer=answer
    )
    return Incoming(settings, conversation, max_effort=effort == "max")


def echo_of(body: dict[str, Any]) -> recipe.ResponsesEcho:
    """The settings that a response repeats; raises `ApiError`."""
    try:
        return recipe.ResponsesRequest({**body, "model": RECIPE_MODEL}).echo()
    except (recipe.ConversionError, ValueError, OverflowError) as error:
        raise from_recipe(error) from error


def namespaces_of(conversation: ConversationInput) -> dict[str, tuple[str, str]]:
    """The function names that stand for tools in a namespace; raises `ApiError`."""
    try:
        request = recipe.ResponsesRequest(conversation.body)
        return request.namespace_tool_map(recipe.ConversionOptions())
    except (recipe.ConversionError, ValueError, OverflowError) as error:
        raise from_recipe(error) from error


def _answer(text: dict[str, Any] | None) -> AnswerFormat:
    if text is None:
        return AnswerFormat()
    if text.get("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity", "text.verbosity is not supported.")
    unknown = sorted(set(text) - {"format", "verbosity"})
    if unknown:
        name = f"text.{unknown[0]}"
        raise invalid(name, f"{name}: unknown field.", "unknown_field")
    value = text.get("format")
    if value is not None and not isinstance(value, dict):
        raise invalid("text.format", "text.format must be an object.")
    if value is not None and value.get("type") == "json_schema":
        schema = {key: item for key, item in value.items() if key != "type"}
        return read_schema(schema, "text.format")
    return read_response_format(value, "text.format")
