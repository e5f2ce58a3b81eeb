"""The engine's steps as the console's events.

The engine's thread only appends what it tells to the viewers' queues; events are made of it when a
frame is sent, on the server's loop.
"""

from typing import Any

from ds41jax.engine.observer import DecodeRound, PrefillStep, RequestRound, StepTimes
from ds41jax.tokenizer import Tokenizer


def step_event(step: PrefillStep | DecodeRound, at: float, tokenizer: Tokenizer | None) -> Any:
    """A step as plain values; `at` is when it ended, in Unix time.

    Args:
      tokenizer: adds the text of the tokens of a round; None for a console without text.
    """
    milliseconds = _milliseconds(step.times)
    if isinstance(step, PrefillStep):
        fields = {"id": step.request_id, "done": step.done, "total": step.total}
        return {"k": "prefill", "t": at, **fields, "rows": step.rows, "ms": milliseconds}
    return {
        "k": "round",
        "t": at,
        "rows": step.rows,
        "padded": step.padded_rows,
        "ms": milliseconds,
        "req": [_request(one, tokenizer) for one in step.requests],
    }


def _milliseconds(times: StepTimes) -> dict[str, float]:
    return {part: round(1000 * seconds, 3) for part, seconds in vars(times).items()}


def _request(one: RequestRound, tokenizer: Tokenizer | None) -> dict[str, Any]:
    event: dict[str, Any] = {
        "id": one.request_id,
        "at": one.position,
        "drafted": len(one.drafted),
        "verified": one.verified,
        "accepted": one.accepted,
        "emitted": len(one.emitted),
    }
    if tokenizer is not None:
        target = one.emitted[one.accepted :]
        parts = {"accepted": one.accepted_ids, "target": target, "rejected": one.rejected_ids}
        event["text"] = {name: tokenizer.decode(list(ids)) for name, ids in parts.items()}
    return event
