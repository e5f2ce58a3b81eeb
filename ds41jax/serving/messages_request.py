"""`POST /v1/messages` (Anthropic's API): from its JSON to what all protocols share."""

from typing import Any

import deepseek_recipe as recipe

from ds41jax.serving.answer_format import check
from ds41jax.serving.chat_request import effort_name, read_tools
from ds41jax.serving.conversation import RECIPE_MODEL, AnswerFormat, ConversationInput, ToolChoice
from ds41jax.serving.errors import invalid
from ds41jax.serving.fields import MessagesFields, read_fields
from ds41jax.serving.incoming import Incoming
from ds41jax.serving.settings import Settings, common_settings

_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def read_messages(body: dict[str, Any]) -> Incoming:
    """Reads a request; raises `ApiError` naming the field at fault."""
    fields = read_fields(MessagesFields, body)
    settings = Settings(
        **common_settings(fields),  # type: ignore[arg-type]
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
    )
    config = dict(fields.output_config or {})
    effort = effort_name(config.pop("effort", None), "output_config.effort")
    answer = _answer(config.pop("format", None))
    if config:
        name = f"output_config.{min(config)}"
        raise invalid(name, f"{name}: unknown field.", "unknown_field")
    out: dict[str, Any] = {"model": RECIPE_MODEL, "messages": fields.messages}
    out |= {"system": fields.system} if fields.system is not None else {}
    out |= {"tools": read_tools(fields.tools)} if fields.tools else {}
    thinking = fields.thinking.type if fields.thinking is not None else None
    if effort == "none":
        thinking = thinking or "disabled"
    elif effort is not None:
        out["output_config"] = {"effort": effort}
    if thinking is not None:
        out["thinking"] = {"type": thinking}
        out["thinking"] |= {"budget_tokens": 1024} if thinking == "enabled" else {}
    conversation = ConversationInput(
        request=recipe.MessagesRequest, body=out, choice=_choice(fields.tool_choice), answer=answer
    )
    return Incoming(settings, conversation, max_effort=effort == "max")


def _choice(choice: dict[str, Any] | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    kind, name = choice.get("type"), choice.get("name")
    if not isinstance(kind, str) or kind not in _MODES or (kind == "tool") != isinstance(name, str):
        raise invalid("tool_choice", "tool_choice must be auto, any, none or a tool with its name.")
    parallel = choice.get("disable_parallel_tool_use") is not True
    return ToolChoice(mode=_MODES[kind], name=name, parallel=parallel)


def _answer(value: Any) -> AnswerFormat:
    param = "output_config.format"
    if value is None:
        return AnswerFormat()
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise invalid(param, f"{param} must be of type json_schema.")
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"{param}.schema", f"{param}.schema must be an object.")
    check(schema, False, f"{param}.schema")
    return AnswerFormat("json_schema", schema, param=f"{param}.schema")
