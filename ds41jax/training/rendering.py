"""Examples to token ids and loss weights, rendered as the server renders them.

The answer is rendered by deepseek-recipe too, as a turn of the history. It drops the reasoning of
the history where no tools are offered; there the last turn is written behind its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
import numpy as np

from ds41jax.tokenizer import BOS, EOS, Tokenizer
from ds41jax.training.tasks.example import Example

ASSISTANT, USER, SYSTEM = "<｜Assistant｜>", "<｜User｜>", "<｜System｜>"
THINK_END = "</think>"
MODEL = "DeepSeek-V4.1-Flash"
UNIT = 16  # loss weights are sixteenths


@dataclass(frozen=True)
class Weights:
    """Loss weights of a document's tokens as targets, in sixteenths."""

    answer: int = UNIT
    user: int = 2
    system: int = 0  # effort line and tool block are the same every time


# Where an answer is mostly copied, its few tokens are what there is to learn, and what the user
# says is text to search, most of it noise.
TASK_WEIGHTS = {
    "retrieval": Weights(answer=64, user=1),
    "recall": Weights(answer=48, user=0),
    "copying": Weights(answer=32, user=1),
    "tools": Weights(answer=48),
    "json": Weights(answer=32),
}


@dataclass(frozen=True)
class Document:
    """Token ids and the loss weight of each token as a target, equally long."""

    ids: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Rendered:
    """A conversation's text; `special_ranges` of it are special tokens, the rest is plain text.

    Attributes:
      prompt_length: code points of the prompt that the answer follows.
    """

    text: str
    special_ranges: tuple[tuple[int, int], ...]
    prompt_length: int

    def pieces(self) -> list[tuple[bool, str]]:
        """Stretches of text in order, each with whether it is a special token."""
        found: list[tuple[bool, str]] = []
        at = 0
        for start, end in self.special_ranges:
            found += [(False, self.text[at:start]), (True, self.text[start:end])]
            at = end
        found.append((False, self.text[at:]))
        return [(special, text) for special, text in found if text]


def render(example: Example) -> Rendered:
    """The whole conversation, closed by the end token.

    Raises:
      ValueError: if the answer does not continue the prompt as the server renders it.
    """
    prompt, prompt_ranges = _rendered(example, example.prompt)
    last = example.answer
    if example.thinking and not example.tools:
        return _thought(prompt, prompt_ranges, last["reasoning_content"], last["content"])
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": ""}
        for call in last.get("tool_calls", [])
    ]
    text, ranges = _rendered(example, [*example.messages, *results])
    if not text.startswith(prompt):
        raise ValueError(f"the answer does not continue its prompt: {text[len(prompt) - 40 :]!r}")
    end = next(b for a, b in ranges if a >= len(prompt) and text[a:b] == EOS)
    kept = tuple((a, b) for a, b in ranges if b <= end)
    return Rendered(text[:end], kept, len(prompt))


def _thought(
    prompt: str, ranges: Sequence[tuple[int, int]], reasoning: str, content: str
) -> Rendered:
    """A reasoned answer behind the prompt, which ends with the opening of the reasoning."""
    thought = prompt + reasoning
    answered = thought + THINK_END + content
    ends = [(len(thought), len(thought + THINK_END)), (len(answered), len(answered + EOS))]
    return Rendered(answered + EOS, (*ranges, *ends), len(prompt))


def _rendered(
    example: Example, messages: Sequence[dict[str, Any]]
) -> tuple[str, list[tuple[int, int]]]:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": list(messages),
        "thinking": {"type": "enabled" if example.thinking else "disabled"},
    }
    if example.tools:
        body["tools"] = example.tools
    if example.response_format:
        body["response_format"] = example.response_format
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    rendered = recipe.DeepseekV41Encoding().render_conversation(request.conversation)
    return rendered.prompt, rendered.special_ranges


class Encoder:
    """Encodes many conversations at once; a stretch of text that recurs is encoded once."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def documents(self, examples: Sequence[Example]) -> list[Document]:
        """Ids and weights of the examples."""
        pieces = [render(example).pieces() for example in examples]
        plain = {text for parts in pieces for special, text in parts if not special}
        ids = dict(zip(plain, self._tokenizer.encode_batch(list(plain)), strict=True))
        weights = [TASK_WEIGHTS.get(example.task, Weights()) for example in examples]
        return [self._document(p, ids, w) for p, w in zip(pieces, weights, strict=True)]

    def _document(
        self, pieces: list[tuple[bool, str]], ids: dict[str, list[int]], weights: Weights
    ) -> Document:
        found: list[int] = []
        weighed: list[int] = []
        weight, header = 0, False
        for special, text in pieces:
            if special and text in (BOS, SYSTEM, USER, ASSISTANT):
                weight = weights.user if text in (USER, ASSISTANT) else weights.system
            new = [self._tokenizer.special_id(text)] if special else ids[text]
            found += new
            weighed += [weight] * len(new)
            if header:  # <think> or </think>: still the prompt's
                weight = weights.answer
            header = special and text == ASSISTANT
        return Document(np.array(found, np.uint16), np.array(weighed, np.uint8))
