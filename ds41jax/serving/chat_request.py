"""`POST /v1/chat/completions`: from its JSON to what all protocols share."""

import json
from typing import Any

import deepseek_recipe as recipe

from ds41jax.serving.answer_format import read_response_format
from ds41jax.serving.conversation import RECIPE_MODEL, TASKS, ConversationInput, ToolChoice
from ds41jax.serving.errors import ApiError, invalid
from ds41jax.serving.fields import ChatFields, read_fields
from ds41jax.serving.incoming import EFFORTS, Incoming
from ds41jax.serving.settings import Settings, common_settings

MAX_TOOLS = 128
_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_PARTS = ("text", "image_url", "image")
_EMPTY_OF_OPENAI = ("refusal", "audio", "function_call", "annotations")
_MESSAGE_FIELDS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
    "reasoning_text", "prefix", "task",
}  # fmt: skip


def read_chat(body: dict[str, Any]) -> Incoming:
    """Reads a request; raises `ApiError` naming the field at fault."""
    fields = read_fields(ChatFields, body)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true.")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    limit = fields.max_completion_tokens or fields.max_tokens
    settings = Settings(
        **common_settings(fields),  # type: ignore[arg-type]
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        max_tokens=limit,
        stop=tuple(stop),
        top_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )
    messages, task = _messages(fields.messages)
    thinking, effort, number = _thinking(fields)
    out: dict[str, Any] = {"model": RECIPE_MODEL, "messages": messages}
    out |= {"logprobs": True} if fields.logprobs else {}
    out |= {"tools": read_tools(fields.tools)} if fields.tools else {}
    out |= {"thinking": {"type": thinking}} if thinking is not None else {}
    out |= {"reasoning_effort": effort} if effort is not None else {}
    answer = read_response_format(fields.response_format, "response_format")
    out |= {"response_format": {"type": "json_object"}} if answer.kind == "json_object" else {}
    conversation = ConversationInput(
        request=recipe.ChatCompletionRequest,
        body=out,
        choice=_choice(fields),
        answer=answer,
        effort=number,
        task=task,
    )
    return Incoming(settings, conversation, max_effort=effort == "max" or (number or 0) > 75)


def _thinking(fields: ChatFields) -> tuple[str | None, str | None, int | None]:
    """(thinking type, effort's name, effort as a number), each None if not said."""
    thinking = fields.thinking.type if fields.thinking is not None else None
    if thinking is None and fields.enable_thinking is not None:
        thinking = "enabled" if fields.enable_thinking else "disabled"
    effort = fields.reasoning_effort
    if isinstance(effort, int):
        return thinking, None, effort
    return thinking, effort_name(effort, "reasoning_effort"), None


def effort_name(effort: Any, param: str) -> str | None:
    """One of the library's names for an effort; raises `ApiError`."""
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise invalid(param, f"{param} must be one of {', '.join(EFFORTS)}, or 1 to 100.")
    return EFFORTS[effort]


def _choice(fields: ChatFields) -> ToolChoice:
    choice, name = fields.tool_choice, None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise invalid("tool_choice", "tool_choice must name a function.")
        choice = "required"
    return ToolChoice(
        mode="auto" if choice is None else choice,
        name=name,
        parallel=fields.parallel_tool_calls is not False,
        assisted=fields.tool_decoding_assistance is not False,
    )


def read_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each checked for what the library does not check."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools holds {len(tools)} functions; the limit is {MAX_TOOLS}.")
    for n, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and len(name) > 64:
            raise invalid(f"tools[{n}].function.name", "a name has at most 64 characters.")
    return tools


def _messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The messages in the library's words, and the task of the last one."""
    last = len(messages) - 1
    task = messages[last].get("task")
    if task is not None and task not in TASKS:
        raise invalid(f"messages[{last}].task", f"task must be one of {', '.join(TASKS)}.")
    return [
        _message(message, f"messages[{n}]", n == last) for n, message in enumerate(messages)
    ], task


def _message(message: dict[str, Any], path: str, last: bool) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if key not in _EMPTY_OF_OPENAI}
    for key in _EMPTY_OF_OPENAI:
        if message.get(key):
            raise invalid(f"{path}.{key}", f"{path}.{key} is not supported.")
    unknown = sorted(set(out) - _MESSAGE_FIELDS)
    if unknown:
        name = f"{path}.{unknown[0]}"
        raise invalid(name, f"{name}: unknown field.", "unknown_field")
    role, content = out.get("role"), out.get("content")
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}.")
    empty = content is None and role == "assistant"
    if not empty and not isinstance(content, str | list):
        raise invalid(f"{path}.content", f"{path}.content must be a string or a list of parts.")
    if empty and not out.get("tool_calls"):
        raise invalid(path, f"{path} has neither content nor tool calls.")
    if out.pop("task", None) is not None and not last:
        raise invalid(f"{path}.task", "only the last message may carry a task.")
    if role == "developer":  # the format knows no such role
        out["role"] = "system"
    for alias in ("reasoning", "reasoning_text"):
        value = out.pop(alias, None)
        if value is not None and out.get("reasoning_content") is None:
            out["reasoning_content"] = value
    if isinstance(content, list):
        out["content"] = [_part(part, f"{path}.content[{n}]") for n, part in enumerate(content)]
    if isinstance(out.get("tool_calls"), list):
        calls = enumerate(out["tool_calls"])
        out["tool_calls"] = [_call(call, f"{path}.tool_calls[{n}]") for n, call in calls] or None
    return out


def _part(part: Any, path: str) -> dict[str, Any]:
    """A content part; an image may be given as a plain string, or as a part of type "image"."""
    if not isinstance(part, dict):
        raise invalid(path, f"{path} must be an object.")
    if part.get("type") not in _PARTS:
        raise invalid(f"{path}.type", f"{path}.type must be one of {', '.join(_PARTS)}.")
    if part.get("type") == "image":
        part = {"type": "image_url", "image_url": part.get("image", part.get("image_url"))}
    if part.get("type") == "image_url" and isinstance(part.get("image_url"), str):
        part = {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def _call(call: Any, path: str) -> dict[str, Any]:
    """An earlier tool call; its arguments may be an object or null instead of JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{path}.function must be an object.", f"{path}.function")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    kept = {key: value for key, value in call.items() if key != "index"}
    return {**kept, "function": {**function, "arguments": arguments}}
