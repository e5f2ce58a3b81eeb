"""Prompts in DeepSeek's conversation format.

The format itself is DeepSeek's own library, `deepseek-recipe`. It renders text and says which
stretches are special tokens; everything else is encoded with the added vocabulary switched off, so
that a user who types a special token gets plain text.
"""

from typing import Any

import deepseek_recipe

from ds41jax.tokenizer import Tokenizer


def encode_chat(tokenizer: Tokenizer, text: str, *, thinking: bool = False) -> list[int]:
    """Token ids of a conversation of one user turn, up to where the answer begins.

    Raises:
      TokenizerError: if the vocabulary lacks a special token of the format.
    """
    request: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": text}],
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    converted = deepseek_recipe.ChatCompletionRequest(request).convert(
        deepseek_recipe.ConversionOptions()
    )
    rendered = deepseek_recipe.DeepseekV41Encoding().render_conversation(converted.conversation)
    return encode_rendered(tokenizer, rendered.prompt, rendered.special_ranges)


def encode_rendered(
    tokenizer: Tokenizer, prompt: str, special_ranges: list[tuple[int, int]]
) -> list[int]:
    """Ids of a rendered prompt, one for each special range [start, end) of its code points."""
    ids: list[int] = []
    at = 0
    for start, end in special_ranges:
        ids += tokenizer.encode(prompt[at:start])
        ids.append(tokenizer.special_id(prompt[start:end]))
        at = end
    return ids + tokenizer.encode(prompt[at:])
