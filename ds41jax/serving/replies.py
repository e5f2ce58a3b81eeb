"""The four protocols' answers: server-sent events for a stream, one JSON body otherwise."""

import secrets
import time
from typing import Any, Protocol

import deepseek_recipe as recipe
import msgspec

from ds41jax.serving.errors import ApiError
from ds41jax.serving.incoming import Incoming
from ds41jax.serving.preparation import Prepared
from ds41jax.serving.responses_request import echo_of, namespaces_of
from ds41jax.serving.usage import TokenCounts

_encode = msgspec.json.encode


class Reply(Protocol):
    """An answer in the making: `generator` makes its chunks, which become frames or a body.

    `counts` are kept by whoever reads the output.
    """

    generator: Any
    counts: TokenCounts

    def frames(self, chunk: Any) -> bytes:
        """What a stream sends for a chunk."""

    def add(self, chunk: Any) -> None:
        """Adds a chunk to the body of an answer that is not streamed."""

    def body(self) -> bytes:
        """The finished body."""

    def done(self) -> bytes:
        """What ends a stream that has gone well."""

    def failed(self, error: ApiError) -> bytes:
        """What a stream that has begun sends when it cannot be finished."""


def new_id(prefix: str) -> str:
    """A fresh identifier."""
    return prefix + secrets.token_hex(16)


def _frame(data: bytes, event: str | None = None) -> bytes:
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + data + b"\n\n"


class ChatReply:
    """Chat Completions: every delta carries one thing only."""

    def __init__(self, prepared: Prepared, incoming: Incoming, model: str):
        self.counts = TokenCounts()
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())
        self._usage = incoming.settings.include_usage
        self._whole = recipe.ChatCompletionResponse(self._id, model, self._created, 0, 0)
        assert prepared.prompt is not None
        make = recipe.ChatCompletionRequest.chunk_generator
        self.generator = make(prepared.prompt.converted, self._id, model)

    def frames(self, chunk: Any) -> bytes:
        data = msgspec.json.decode(chunk.to_json())
        data["created"] = self._created
        usage = data.pop("usage", None)
        for choice in data["choices"]:
            choice["delta"] = _single_purpose(choice["delta"])
        if not self._usage:
            return _frame(_encode(data))
        out = _frame(_encode({**data, "usage": None}))
        if usage is not None:
            last = {**data, "choices": [], "usage": self.counts.into_chat(usage)}
            out += _frame(_encode(last))
        return out

    def add(self, chunk: Any) -> None:
        self._whole.accumulate(chunk)

    def body(self) -> bytes:
        data = msgspec.json.decode(self._whole.to_json())
        for choice in data["choices"]:
            message = choice["message"]
            calls = message.get("tool_calls")
            if not message.get("reasoning_content"):
                message.pop("reasoning_content", None)
            for call in calls or []:
                call.pop("index", None)
            if calls or (not message["content"] and "reasoning_content" in message):
                message["content"] = message["content"] or None
        return _encode({**data, "usage": self.counts.into_chat(data["usage"])})

    def done(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return _frame(_encode(error.openai()))


def _single_purpose(delta: dict[str, Any]) -> dict[str, Any]:
    if "role" in delta:
        return {"role": delta["role"]}
    return {key: value for key, value in delta.items() if value}


class CompletionReply:
    """Plain completions, made from chat chunks whose content is the text."""

    def __init__(self, incoming: Incoming, model: str):
        self.counts = TokenCounts()
        self._usage_wanted = incoming.settings.include_usage
        self._logprobs = incoming.settings.top_logprobs is not None
        self._head: dict[str, Any] = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._text: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._offset = 0
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._fingerprint: str | None = None
        body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "logprobs": self._logprobs}
        body["messages"] = [{"role": "user", "content": ""}]
        converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
        make = recipe.ChatCompletionRequest.chunk_generator
        self.generator = make(converted, "", model)

    def frames(self, chunk: Any) -> bytes:
        text, tokens, finish, usage = self._read(chunk)
        out = b""
        if text or tokens or finish:
            out += _frame(_encode(self._object(text, tokens, finish)))
        if usage is not None and self._usage_wanted:
            last = {**self._object("", [], None), "choices": []}
            out += _frame(_encode({**last, "usage": self.counts.into_chat(usage)}))
        return out

    def add(self, chunk: Any) -> None:
        text, tokens, finish, usage = self._read(chunk)
        self._text.append(text)
        self._tokens += tokens
        self._finish, self._usage = finish or self._finish, usage or self._usage

    def body(self) -> bytes:
        whole = self._object("".join(self._text), self._tokens, self._finish)
        return _encode({**whole, "usage": self.counts.into_chat(self._usage or {})})

    def done(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return _frame(_encode(error.openai()))

    def _read(self, chunk: Any) -> tuple[str, list[dict[str, Any]], str | None, Any]:
        data = msgspec.json.decode(chunk.to_json())
        self._fingerprint = data["system_fingerprint"]
        choice = data["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        return choice["delta"].get("content") or "", tokens, choice["finish_reason"], data["usage"]

    def _object(
        self, text: str, tokens: list[dict[str, Any]], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._legacy_logprobs(tokens) if self._logprobs else None
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "system_fingerprint": self._fingerprint, "choices": [choice]}

    def _legacy_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens
            ],
            "text_offset": offsets,
        }


class MessagesReply:
    """Anthropic's Messages: named events, no final marker."""

    def __init__(self, prepared: Prepared, model: str):
        assert prepared.prompt is not None
        id = new_id("msg_")
        self.counts = TokenCounts()
        self._whole = recipe.MessagesResponse(id, model, int(time.time()), 0, 0)
        self.generator = recipe.MessagesChunkGenerator(id, model, prepared.prompt.thinking)

    def frames(self, chunk: Any) -> bytes:
        name, data = recipe.MessagesResponse.sse_event_name(chunk), chunk.to_json().encode()
        if name == "message_delta":
            fields = msgspec.json.decode(data)
            data = _encode({**fields, "usage": self.counts.into_messages(fields["usage"])})
        return _frame(data, name)

    def add(self, chunk: Any) -> None:
        self._whole.accumulate(chunk)

    def body(self) -> bytes:
        data = msgspec.json.decode(self._whole.to_json())
        return _encode({**data, "usage": self.counts.into_messages(data["usage"])})

    def done(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return _frame(_encode(error.anthropic()), "error")


class ResponsesReply:
    """Responses: numbered, named events, no final marker."""

    def __init__(self, prepared: Prepared, incoming: Incoming, model: str, body: dict[str, Any]):
        assert prepared.prompt is not None and incoming.conversation is not None
        id = new_id("resp_")
        self.counts = TokenCounts()
        self._whole = recipe.ResponsesResponse(id, model, int(time.time()), 0, 0)
        make = recipe.ResponsesRequest.chunk_generator
        generator = make(prepared.prompt.converted, id, model).with_echo(echo_of(body))
        names = namespaces_of(incoming.conversation)
        self.generator = generator.with_namespace_tool_map(names) if names else generator

    def frames(self, chunk: Any) -> bytes:
        name, data = recipe.ResponsesResponse.sse_event_name(chunk), chunk.to_json().encode()
        if name in ("response.completed", "response.incomplete"):
            fields = msgspec.json.decode(data)
            fields["response"] = self._counted(fields["response"])
            data = _encode(fields)
        return _frame(data, name)

    def add(self, chunk: Any) -> None:
        self._whole.accumulate(chunk)

    def body(self) -> bytes:
        return _encode(self._counted(msgspec.json.decode(self._whole.to_json())))

    def _counted(self, response: dict[str, Any]) -> dict[str, Any]:
        return {**response, "usage": self.counts.into_responses(response["usage"])}

    def done(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        fields = {"type": "error", "code": error.code, "message": error.message}
        return _frame(_encode({**fields, "param": error.param, "sequence_number": 0}), "error")
