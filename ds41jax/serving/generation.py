"""One request in the engine, from its submission to its last chunk.

Streams and whole answers come through here alike: `open` waits for the engine to begin, so that a
refusal still has its HTTP status; `chunks` yields what the protocol makes of the tokens;
`close` cancels what is not finished.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from ds41jax.engine.request import Event, Failed, Finished, Started, Token
from ds41jax.serving.activity import Watched
from ds41jax.serving.answer_format import complaint
from ds41jax.serving.errors import ApiError, from_engine
from ds41jax.serving.output import OutputParser
from ds41jax.serving.preparation import Prepared
from ds41jax.serving.replies import Reply
from ds41jax.serving.server import Handle, Server
from ds41jax.tokenizer import StreamDecoder


class Generation:
    """A request being answered."""

    def __init__(self, server: Server, prepared: Prepared, reply: Reply, route: str):
        self._server = server
        self._prepared = prepared
        self._route = route
        eos = server.config.eos_token_id
        self._parser = OutputParser(
            server.tokenizer, server.decoder, prepared.plan, reply.generator, eos, reply.counts
        )
        self._handle: Handle | None = None
        self._events: AsyncIterator[Event] | None = None
        self._watched: Watched | None = None
        self._first: list[Any] = []
        self._finished: Finished | None = None
        self._text = StreamDecoder(server.tokenizer)  # for the console

    async def open(self) -> None:
        """Submits the request and waits until it begins; raises `ApiError` if it does not."""
        self._handle = await self._server.gate.submit(self._prepared.request)
        request, prompt = self._prepared.request, self._prepared.prompt
        self._watched = Watched(
            id=self._handle.id,
            route=self._route,
            prompt=len(request.token_ids),
            max=request.max_tokens,
            grammar=request.constraint is not None,
            images=len(request.images),
        )
        if self._server.activity.with_text and prompt is not None:
            self._watched.prompt_text = prompt.readable[-1000:]
        self._server.activity.admit(self._watched)
        self._events = aiter(self._handle)
        event = await anext(self._events, None)
        if not isinstance(event, Started):
            raise self._failure(event)
        self._server.activity.started(self._watched, event.prompt_tokens, event.cached_tokens)
        self._first = self._parser.start(
            event.prompt_tokens, event.cached_tokens, self._server.fingerprint
        )

    async def chunks(self) -> AsyncIterator[list[Any]]:
        """The answer's chunks, those of one round together.

        Raises:
          ApiError: if it cannot be finished.
        """
        assert self._events is not None and self._handle is not None
        reason, chunks = "stop", list(self._first)
        content = _Content(self._prepared)
        while not self._parser.finished:
            if chunks and not self._handle.ready:
                yield content.seen(chunks)
                chunks = []
            event = await anext(self._events, None)
            if isinstance(event, Token):
                self._note(event)
                chunks += self._parser.push(event.token_id, event.logprobs)
            elif isinstance(event, Finished) and event.reason != "cancelled":
                self._finished, reason = event, event.reason
                break
            elif not isinstance(event, Started):
                raise self._failure(event)
        if self._finished is None:
            self._handle.cancel()  # a stop string: what the engine would go on with is not wanted
        if chunks:
            yield content.seen(chunks)
        last = content.seen(self._parser.finish(reason))
        if reason == "stop":
            content.check()
        yield last
        self._retire(reason)

    def close(self) -> None:
        """Cancels the request if it is not over. May be called again."""
        if self._handle is not None:
            if self._finished is None:
                self._handle.cancel()
            self._retire("cancelled")
            self._handle = None
            self._server.gate.released()

    def _note(self, event: Token) -> None:
        assert self._watched is not None
        text = ""
        if self._server.activity.with_text:
            text = self._text.push(event.token_id)
        self._server.activity.token(self._watched, text)

    def _failure(self, event: Event | None) -> ApiError:
        self._retire("failed")
        if isinstance(event, Failed):
            return from_engine(event.error)
        return ApiError(500, "The engine stopped before the answer was complete.", None, "internal")

    def _retire(self, reason: str) -> None:
        if self._watched is not None:
            self._server.activity.retire(self._watched, reason)


class _Content:
    """Gathers an answer whose format is checked at its end."""

    def __init__(self, prepared: Prepared):
        self._answer = prepared.answer
        self._must_call = prepared.must_call
        self._wanted = prepared.must_call or self._answer.kind in ("json_object", "json_schema")
        self._text: list[str] = []
        self._called = False

    def seen(self, chunks: list[Any]) -> list[Any]:
        """Takes note of chunks and hands them on."""
        if self._wanted:
            for chunk in chunks:
                text, called = _content_of(json.loads(chunk.to_json()))
                self._text.append(text)
                self._called = self._called or called
        return chunks

    def check(self) -> None:
        """Raises `ApiError` if the finished answer is not what was asked for."""
        if self._must_call and not self._called:
            raise ApiError(500, "The model called no tool.", None, "invalid_output")
        problem = None if self._called else complaint(self._answer, "".join(self._text))
        if problem is not None:
            raise ApiError(500, problem, None, "invalid_output")


def _content_of(chunk: dict[str, Any]) -> tuple[str, bool]:
    """(text of the answer, whether a tool is called) in a chunk of any protocol."""
    for choice in chunk.get("choices", []):
        delta = choice["delta"]
        return delta.get("content") or "", bool(delta.get("tool_calls"))
    delta = chunk.get("delta")
    if chunk.get("type") == "response.output_text.delta":
        return str(delta), False
    if isinstance(delta, dict) and delta.get("type") == "text_delta":
        return delta["text"], False
    item = chunk.get("content_block") or chunk.get("item") or {}
    return "", item.get("type") in ("tool_use", "function_call")
