"""A request of any protocol, read and checked, before its prompt is made."""

from dataclasses import dataclass

from ds41jax.serving.conversation import ConversationInput
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
      prompt: the text or the token ids of a plain completion.
      max_effort: the effort is the highest, which raises the default token limit.
    """

    settings: Settings
    conversation: ConversationInput | None = None
    prompt: str | tuple[int, ...] = ()
    max_effort: bool = False
