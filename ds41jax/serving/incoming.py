"""A request of any protocol, read and checked, before its prompt is made."""

from dataclasses import dataclass, field

from ds41jax.serving.conversation import AnswerFormat, ConversationInput
from ds41jax.serving.settings import Settings

EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "none": "none",
    "off": "none",
    "disabled": "none",
}


@dataclass(frozen=True)
class Incoming:
    """A conversation and how to answer it; or, for plain completions, a prompt as it stands.

    Attributes:
      conversation: None for a plain completion.
      prompt, answer: the text or the token ids of a plain completion, and its answer's format.
      max_effort: the effort is the highest, which raises the default token limit.
    """

    settings: Settings
    conversation: ConversationInput | None = None
    prompt: str | tuple[int, ...] = ()
    answer: AnswerFormat = field(default_factory=AnswerFormat)
    max_effort: bool = False
