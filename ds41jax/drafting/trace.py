"""Rounds written as JSON lines, so that policies can be compared on what an engine really did.

The first line is a header with the version; each further line is one `RoundOutcome`. Expert routes
are large (11.5 KB a request and round at 24 tokens, 40 layers, 6 experts) and left out unless asked
for.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ds41jax.drafting.policy import Policy, RequestDraft, RequestOutcome, RoundOutcome

FORMAT, VERSION = "ds41jax-draft-trace", 1
MAX_TRACE_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20


class TraceError(ValueError):
    """A trace that cannot be read; the message names the line."""


class TraceWriter:
    """Appends rounds to a new file until it is full, then counts what it drops."""

    def __init__(
        self,
        path: str | Path,
        *,
        meta: Mapping[str, Any] | None = None,
        routes: bool = False,
        max_bytes: int = MAX_TRACE_BYTES,
    ):
        """
        Args:
          meta: JSON values kept in the header.
          routes: write expert routes too.
          max_bytes: the file never grows beyond.
        """
        self.routes, self.max_bytes = routes, max_bytes
        self.written = self.dropped = self._bytes = 0
        self._file = open(path, "xb")  # noqa: SIM115 (closed by `close`)
        header = {"format": FORMAT, "version": VERSION, "meta": dict(meta or {})}
        if not self._append(header):
            self.close()
            raise ValueError(f"a trace of at most {max_bytes} bytes cannot hold its header")

    def write(self, outcome: RoundOutcome) -> bool:
        """Adds a round; False if the file is full."""
        done = not self.dropped and self._append(_encode_round(outcome, self.routes))
        self.written += done
        self.dropped += not done
        return done

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, value: Mapping[str, Any]) -> bool:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES or self._bytes + len(line) > self.max_bytes:
            return False
        self._file.write(line)
        self._bytes += len(line)
        return True


def read_meta(path: str | Path) -> dict[str, Any]:
    """The header's `meta`.

    Raises:
      TraceError: if it is not a trace of this version.
    """
    with open(path, "rb") as file:
        return _check_header(file.readline(MAX_LINE_BYTES + 1))


def read_rounds(path: str | Path) -> Iterator[RoundOutcome]:
    """The rounds of a trace, in order.

    Raises:
      TraceError: at a line that is no round.
    """
    with open(path, "rb") as file:
        _check_header(file.readline(MAX_LINE_BYTES + 1))
        number = 1
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
                raise TraceError(f"line {number}: cut short or over {MAX_LINE_BYTES} bytes")
            try:
                yield _decode_round(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise TraceError(f"line {number}: {error!r}") from error


def replay(policy: Policy, path: str | Path) -> list[list[int]]:
    """Feeds a trace to a policy; returns what it would have chosen before each round.

    The outcomes stay those of the lengths that were verified, so what it learns of acceptance ends
    where the recorded policy stopped.
    """
    choices = []
    for outcome in read_rounds(path):
        lane = [r.draft for r in outcome.requests]
        choices.append(policy.choose(lane, shared=outcome.shared))
        policy.observe(outcome)
    return choices


def _check_header(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise TraceError("line 1: no header of a draft trace") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError("line 1: no header of a draft trace")
    if header.get("version") != VERSION:
        raise TraceError(f"line 1: version {header.get('version')!r}, this reads {VERSION}")
    return dict(header.get("meta", {}))


def _encode_round(outcome: RoundOutcome, routes: bool) -> dict[str, Any]:
    return {
        "total_us": outcome.total_us,
        "shared": outcome.shared,
        "layer_us": outcome.layer_us,
        "layer_groups": outcome.layer_groups,
        "width": outcome.width,
        "draft_us": outcome.draft_us,
        "requests": [
            {
                "id": r.draft.request_id,
                "available": r.draft.available,
                "confidence": r.draft.confidence_logits,
                "history": _encode_routes(r.draft.routes if routes else None),
                "length": r.length,
                "accepted": r.accepted,
                "cut": r.cut,
                "routes": _encode_routes(r.routes if routes else None),
            }
            for r in outcome.requests
        ],
    }


def _decode_round(value: Mapping[str, Any]) -> RoundOutcome:
    requests = tuple(
        RequestOutcome(
            draft=RequestDraft(
                request_id=r["id"],
                available=r["available"],
                confidence_logits=tuple(r["confidence"]),
                routes=_decode_routes(r["history"]),
            ),
            length=r["length"],
            accepted=r["accepted"],
            cut=r["cut"],
            routes=_decode_routes(r["routes"]),
        )
        for r in value["requests"]
    )
    layer_us, groups = value["layer_us"], value["layer_groups"]
    return RoundOutcome(
        requests=requests,
        total_us=value["total_us"],
        shared=value["shared"],
        layer_us=None if layer_us is None else tuple(layer_us),
        layer_groups=None if groups is None else tuple(groups),
        width=value["width"],
        draft_us=value["draft_us"],
    )


def _encode_routes(routes: np.ndarray | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(routes, "<u2").tobytes()).decode()
    return {"shape": list(routes.shape), "u16": data}


def _decode_routes(value: Mapping[str, Any] | None) -> np.ndarray | None:
    if value is None:
        return None
    flat = np.frombuffer(base64.b64decode(value["u16"], validate=True), "<u2")
    return flat.reshape(value["shape"]).astype(np.int64)
