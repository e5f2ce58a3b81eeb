"""The API's description: an OpenAPI document made from the request types, and a page of it."""

import functools
import html
import json
from typing import Any

import msgspec
from litestar import Response, get

import ds41jax
from ds41jax.serving.fields import (
    ChatFields,
    CompletionFields,
    MessagesFields,
    ResponsesFields,
    TokenizeFields,
)

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatFields, "Answer a conversation (OpenAI Chat Completions)."),
    "/v1/completions": (CompletionFields, "Continue a text or token ids as they stand."),
    "/v1/messages": (MessagesFields, "Answer a conversation (Anthropic Messages)."),
    "/v1/messages/count_tokens": (MessagesFields, "Count the prompt tokens of a Messages request."),
    "/v1/responses": (ResponsesFields, "Answer a conversation (OpenAI Responses)."),
    "/tokenize": (TokenizeFields, "Token ids of a text, or of a whole chat request."),
}
_GETS = {
    "/health": "200 while requests are taken, else 503. Needs no key.",
    "/v1/models": "The served model under its names, with its limits.",
    "/v1/models/{id}": "One of them.",
    "/v1/stats": "Counters and gauges.",
    "/metrics": "The same for Prometheus.",
    "/v1/console/snapshot": "What the console shows.",
    "/": "The console.",
    "/openapi.json": "This description.",
    "/docs": "This description, to read.",
}
_ERRORS = ("400", "401", "404", "413", "429", "500", "503")
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@functools.cache
def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = sorted({kind for kind, _ in _POSTS.values()}, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    paths: dict[str, Any] = {}
    for path, (kind, summary) in _POSTS.items():
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body}}
        paths[path]["post"]["responses"] = _responses(path in _STREAMED)
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(False, path)}}
        if path.endswith("{id}"):
            field = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            paths[path]["get"]["parameters"] = [field]
    return {
        "openapi": "3.1.0",
        "info": {"title": "ds41jax", "version": ds41jax.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _responses(streamed: bool, path: str = "") -> dict[str, Any]:
    kinds = {"/metrics": "text/plain", "/": "text/html", "/docs": "text/html"}
    content: dict[str, Any] = {kinds.get(path, "application/json"): {}}
    if streamed:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {code: {"description": "Error", "content": error} for code in _ERRORS}
    if path == "/health":
        failures = {"503": {"description": "Unhealthy", "content": {"application/json": {}}}}
    return {"200": {"description": "Answer", "content": content}, **failures}


@get("/openapi.json")
async def schema() -> dict[str, Any]:
    """The OpenAPI document."""
    return openapi()


@get("/docs")
async def page() -> Response[str]:
    """The same as a page that loads nothing."""
    return Response(_page(), media_type="text/html")


@functools.cache
def _page() -> str:
    document = openapi()
    parts = [_HEAD]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]
                name = reference["$ref"].rpartition("/")[2]
                parts.append(_table(document["components"]["schemas"][name]))
    return "".join(parts)


def _table(model: dict[str, Any]) -> str:
    rows = []
    for name, field in model["properties"].items():
        needed = "yes" if name in model.get("required", []) else ""
        kind = html.escape(json.dumps({k: v for k, v in field.items() if k != "default"}))
        rows.append(f"<tr><td><code>{name}</code><td>{needed}<td><code>{kind}</code>")
    return (
        "<div class=t><table><tr><th>field<th>needed<th>type</tr>"
        + "".join(rows)
        + "</table></div>"
    )


_HEAD = """<!doctype html><html lang=en><meta charset=utf-8><title>ds41jax API</title>
<meta name=viewport content="width=device-width,initial-scale=1"><style>
:root{color-scheme:light dark}.t{overflow-x:auto}h2{margin-top:2rem}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-size:13px}
td,th{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top;border-bottom:1px solid #8884}
code{overflow-wrap:anywhere}</style><h1>ds41jax API</h1>
<p>As data: <a href=openapi.json>openapi.json</a>. An unknown field is an error that names it.
"""
