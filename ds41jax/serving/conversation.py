"""From a conversation in a client's words to the prompt's text.

deepseek-recipe converts the messages and renders them. This module asks it for what the contract
wants and the library does not do by itself; each place says why:

* an image's placeholder is rendered as a random word, since a placeholder typed by a client would
  look the same as a real one in the rendered text;
* an effort from 1 to 100 is put into the effort line, of which the library knows three values;
* a required tool is left to the grammar while thinking, where the library refuses it;
* a JSON schema or regular expression for the answer is set on the converted conversation, since the
  library takes no schema outside the strict subset;
* an internal task's token is appended, as the encoder in the checkpoint does.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe

from ds41jax.serving.errors import from_recipe, invalid
from ds41jax.serving.output import STAGES
from ds41jax.tokenizer import IMAGE, Tokenizer

RECIPE_MODEL = "DeepSeek-V4.1-Flash"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
DEFAULT_EFFORT_LINE = "Reasoning Effort: 75 "
_MODES = ("none", "auto", "required")
# Known to this process alone: no text that leaves it has the word in it.
_IMAGE_WORD = f"<image {secrets.token_hex(16)}>"
_SPELLING = recipe.SpecialTokens(image=_IMAGE_WORD)
_OPTIONS = recipe.ConversionOptions().with_special_tokens(_SPELLING)
_ENCODING = recipe.DeepseekV41Encoding().with_special_tokens(_SPELLING)


@dataclass(frozen=True)
class AnswerFormat:
    """What the answer's content must be: "text", "json_object", "json_schema" or "regex"."""

    kind: str = "text"
    schema: Any = None
    pattern: str = ""
    strict: bool = False
    param: str = "response_format"


@dataclass(frozen=True)
class ToolChoice:
    """Whether a tool may ("auto"), must ("required") or must not ("none") be called; and which."""

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True
    assisted: bool = True


@dataclass(frozen=True)
class ConversationInput:
    """A conversation in the words of one protocol.

    Attributes:
      request: deepseek-recipe's request class of the protocol.
      body: the request in that protocol, without sampling, tool choice and answer format.
      choice: the tool choice.
      answer: the answer's format.
      effort: a number from 1 to 100, in place of the effort's name in the body.
      task: an internal task to append.
    """

    request: Any
    body: dict[str, Any]
    choice: ToolChoice = field(default_factory=ToolChoice)
    answer: AnswerFormat = field(default_factory=AnswerFormat)
    effort: int | None = None
    task: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation.

    Attributes:
      text: the prompt with images under a word of their own; see `readable`. Its `special_ranges`
        are special tokens, everything else is plain text.
      images: sources of the images, in the order of their placeholders.
      start: where the output's parsing begins, as `ParsePlan.start`.
      tools: the functions offered, in the form of Chat Completions.
      converted: deepseek-recipe's request, which its chunk generators need.
    """

    text: str
    special_ranges: list[tuple[int, int]]
    images: list[recipe.ImageSource]
    start: str
    thinking: bool
    tools: list[dict[str, Any]]
    converted: recipe.ConversationRequest

    @property
    def readable(self) -> str:
        """The text as people and clients may see it, images under their usual placeholder."""
        return self.text.replace(_IMAGE_WORD, IMAGE)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids, each image still one placeholder."""
        ids: list[int] = []
        at = 0
        for start, end in self.special_ranges:
            ids += tokenizer.encode(self.text[at:start])
            word = self.text[start:end]
            ids.append(tokenizer.special_id(IMAGE if word == _IMAGE_WORD else word))
            at = end
        return ids + tokenizer.encode(self.text[at:])


def render(conversation: ConversationInput) -> Prompt:
    """Renders a conversation.

    Raises:
      ApiError: 400 for one that cannot be rendered.
    """
    try:
        body = json.dumps(_chosen_tools(conversation), ensure_ascii=False)
        converted = conversation.request(body).convert(_OPTIONS)
        adjusted = _with_answer(converted.conversation, conversation.answer)
        rendered = _ENCODING.render_conversation(adjusted)
    except (recipe.ConversionError, ValueError, OverflowError, RecursionError) as error:
        raise from_recipe(error) from error
    text, ranges = rendered.prompt, rendered.special_ranges
    thinking = converted.conversation.thinking_mode
    if conversation.effort is not None and thinking:
        text, ranges = _with_effort(text, ranges, conversation.effort)
    start = _parse_start(converted.parsing_options)
    if conversation.task is not None:
        text, ranges = _with_task(text, ranges, conversation.task)
        start = "text"
    return Prompt(
        text=text,
        special_ranges=ranges,
        images=rendered.image_sources,
        start=start,
        thinking=thinking,
        tools=[_chat_tool(tool) for tool in converted.conversation.tools],
        converted=converted,
    )


def _chosen_tools(conversation: ConversationInput) -> dict[str, Any]:
    """The protocol's body with the tools that may be called, and the choice made for them.

    The library takes "required" in the same words for Chat Completions and Responses only, so it is
    said to it only there, and only without thinking; elsewhere the grammar alone sees to it.
    """
    body, choice = dict(conversation.body), conversation.choice
    tools = body.get("tools") or []
    if choice.mode != "auto" and choice.mode not in _MODES:
        raise invalid("tool_choice", "tool_choice must be none, auto, required or a function.")
    if choice.mode == "none" or not tools:
        body.pop("tools", None)
        if choice.mode == "required":
            raise invalid("tool_choice", "tool_choice asks for a call, but no tools are offered.")
        return body
    if choice.name is not None:
        body["tools"] = [tool for tool in tools if _name(tool) == choice.name]
        if not body["tools"]:
            raise invalid("tool_choice", "tool_choice names a function that is not offered.")
    if choice.mode == "required" and _opens_block(conversation):
        body["tool_choice"] = "required"
    return body


def _opens_block(conversation: ConversationInput) -> bool:
    """Whether the prompt itself may open the block of calls: only without thinking."""
    body = conversation.body
    if conversation.request is not recipe.ChatCompletionRequest:
        return False
    thinking = (body.get("thinking") or {}).get("type")
    off = body.get("reasoning_effort") == "none" if thinking is None else thinking == "disabled"
    return off and conversation.answer.kind == "text"


def _name(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return None
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")


def _with_answer(conversation: recipe.Conversation, answer: AnswerFormat) -> recipe.Conversation:
    if answer.kind not in ("json_schema", "regex"):
        return conversation
    return recipe.Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_schema=answer.schema if answer.kind == "json_schema" else None,
        response_regex=answer.pattern if answer.kind == "regex" else None,
    )


def _with_effort(
    text: str, ranges: Sequence[tuple[int, int]], effort: int
) -> tuple[str, list[tuple[int, int]]]:
    """Writes the number into the effort line, the first text behind the first two tokens."""
    at = ranges[1][1]
    if not text.startswith(DEFAULT_EFFORT_LINE, at):
        raise invalid("reasoning_effort", "reasoning_effort cannot be given as a number here.")
    line = f"Reasoning Effort: {effort} "
    shift = len(line) - len(DEFAULT_EFFORT_LINE)
    moved = [(a + shift, b + shift) if a >= at else (a, b) for a, b in ranges]
    return text[:at] + line + text[at + len(DEFAULT_EFFORT_LINE) :], moved


def _with_task(
    text: str, ranges: Sequence[tuple[int, int]], task: str
) -> tuple[str, list[tuple[int, int]]]:
    """Appends an action to the generation header; any other task stands in the header's place."""
    kept = list(ranges) if task == "action" else list(ranges[:-2])
    text = text if task == "action" else text[: ranges[-2][0]]
    word = f"<｜{task}｜>"
    return text + word, [*kept, (len(text), len(text) + len(word))]


def _parse_start(options: recipe.ParsingOptions) -> str:
    stage = options.thinking_initial_stage
    if options.starts_in_tool_calls:
        return "tool_block"
    if stage is None:
        return "content"
    return next(name for name, value in STAGES if value == stage)


def _chat_tool(tool: recipe.ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters if tool.parameters is not None else {},
        "strict": bool(tool.strict),
    }
    return {"type": "function", "function": function}
