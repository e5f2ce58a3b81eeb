"""Token counts of an answer, each token once.

deepseek-recipe counts what its decoder lets through: tokens of an unfinished character go missing,
and a character of several tokens counts as one while reasoning. So we count the tokens themselves
and put the numbers where its chunks and bodies report theirs.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class TokenCounts:
    """Emitted tokens, the end token included, and those of them that were reasoning."""

    completion: int = 0
    reasoning: int = 0

    def into_chat(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of Chat Completions and plain completions."""
        return {
            **usage,
            "completion_tokens": self.completion,
            "total_tokens": usage["prompt_tokens"] + self.completion,
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def into_messages(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of Messages."""
        return {**usage, "output_tokens": self.completion}

    def into_responses(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of Responses."""
        return {
            **usage,
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": usage["input_tokens"] + self.completion,
        }
