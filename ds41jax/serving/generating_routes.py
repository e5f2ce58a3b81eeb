"""The routes that generate, and those that only count tokens."""

from collections.abc import Callable
from typing import Any

from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp

from ds41jax.serving.chat_request import read_chat
from ds41jax.serving.completion_request import read_completion
from ds41jax.serving.errors import ApiError, invalid
from ds41jax.serving.exchange import Exchange
from ds41jax.serving.fields import TokenizeFields, read_fields
from ds41jax.serving.generation import Generation
from ds41jax.serving.incoming import Incoming
from ds41jax.serving.json_input import read_object
from ds41jax.serving.messages_request import read_messages
from ds41jax.serving.preparation import Prepared, encode_prompt, off_loop, prepare
from ds41jax.serving.replies import (
    ChatReply,
    CompletionReply,
    MessagesReply,
    Reply,
    ResponsesReply,
)
from ds41jax.serving.responses_request import read_responses
from ds41jax.serving.server import Server

HttpRequest = Request[Any, Any, State]
Read = Callable[[dict[str, Any]], Incoming]
MakeReply = Callable[[Prepared, Incoming, str, dict[str, Any]], Reply]


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: HttpRequest) -> ASGIApp:
    """Chat Completions."""
    return await _exchange(
        request,
        read_chat,
        lambda prepared, incoming, model, _: ChatReply(prepared, incoming, model),
    )


@post("/v1/completions", status_code=200)
async def completions(request: HttpRequest) -> ASGIApp:
    """Plain completions."""
    return await _exchange(
        request, read_completion, lambda _, incoming, model, __: CompletionReply(incoming, model)
    )


@post("/v1/messages", status_code=200)
async def messages(request: HttpRequest) -> ASGIApp:
    """Anthropic's Messages."""
    return await _exchange(
        request, read_messages, lambda prepared, _, model, __: MessagesReply(prepared, model)
    )


@post("/v1/responses", status_code=200)
async def responses(request: HttpRequest) -> ASGIApp:
    """Responses."""
    return await _exchange(request, read_responses, ResponsesReply)


@post("/v1/messages/count_tokens", status_code=200)
async def count_tokens(request: HttpRequest) -> dict[str, int]:
    """The prompt tokens of a Messages request."""
    server: Server = request.app.state.server
    raw = await request.body()
    incoming = read_messages(read_object(raw))
    check_model(server, incoming.settings.model)
    encoded = await encode_prompt(server, incoming, len(raw))
    return {"input_tokens": len(encoded.ids)}


@post("/tokenize", status_code=200)
async def tokenize(request: HttpRequest) -> dict[str, Any]:
    """Token ids of a text, or exactly those that a chat request would send to the model."""
    server: Server = request.app.state.server
    raw = await request.body()
    body = read_object(raw)
    if "messages" in body:
        incoming = read_chat({"model": server.options.model_name, **body})
        check_model(server, incoming.settings.model)
        ids = (await encode_prompt(server, incoming, len(raw))).ids
    else:
        fields = read_fields(TokenizeFields, body)
        text = fields.prompt if fields.text is None else fields.text
        if text is None:
            raise invalid("text", "text or messages is needed.", "missing_field")
        ids = server.tokenizer.encode(text)
        if fields.add_special_tokens:
            ids = [server.config.bos_token_id, *ids]
    return {"tokens": ids, "count": len(ids), "max_model_len": server.options.context}


async def _exchange(request: HttpRequest, read: Read, make_reply: MakeReply) -> ASGIApp:
    server: Server = request.app.state.server
    raw = await request.body()

    async def begin() -> tuple[Generation, Reply, bool]:
        if server.draining:
            raise ApiError(503, "The server is shutting down.", None, "draining")
        body = await off_loop(len(raw), read_object, raw)
        incoming = await off_loop(len(raw), read, body)
        model = check_model(server, incoming.settings.model)
        prepared = await prepare(server, incoming, len(raw))
        reply = make_reply(prepared, incoming, model, body)
        route = request.url.path
        return Generation(server, prepared, reply, route), reply, incoming.settings.stream

    return Exchange(begin, envelope_of(request.url.path))


def envelope_of(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """The form of errors on a route."""
    return ApiError.anthropic if path.startswith("/v1/messages") else ApiError.openai


def check_model(server: Server, model: str) -> str:
    """The model's name as the client wrote it; raises `ApiError` if it is not served."""
    options = server.options
    if model != options.model_name and model not in options.aliases:
        message = f"The model is not served here; use {options.model_name}."
        raise invalid("model", message, "model_not_found")
    return model
