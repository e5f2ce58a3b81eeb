"""The application: routes, guards, error handling, start and end."""

import logging
from typing import Any

from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ControllerRouterHandler

from ds41jax.serving import console, docs, generating_routes, info_routes
from ds41jax.serving.auth import require_key
from ds41jax.serving.errors import ApiError
from ds41jax.serving.generating_routes import envelope_of
from ds41jax.serving.json_input import MAX_BODY_BYTES
from ds41jax.serving.server import Engine, Server, ServerOptions

log = logging.getLogger(__name__)

ROUTES: list[ControllerRouterHandler] = [
    generating_routes.chat_completions,
    generating_routes.completions,
    generating_routes.messages,
    generating_routes.count_tokens,
    generating_routes.responses,
    generating_routes.tokenize,
    info_routes.health,
    info_routes.models,
    info_routes.model,
    info_routes.stats,
    info_routes.metrics,
    console.page,
    console.snapshot,
    console.stream,
    docs.schema,
    docs.page,
]


def make_app(engine: Engine, options: ServerOptions) -> Litestar:
    """The ASGI application over an engine, which the caller starts and closes."""
    return Litestar(
        route_handlers=ROUTES,
        guards=[require_key],
        state=State({"server": Server(engine, options)}),
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _failure},
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=None,
        logging_config=None,
    )


def _answer(request: Request[Any, Any, State], error: ApiError) -> Response[dict[str, Any]]:
    headers = dict(error.headers)
    if error.status == 401 and request.url.path in ("/", "/docs"):
        headers["WWW-Authenticate"] = 'Basic realm="ds41jax"'  # makes a browser ask for the key
    return Response(envelope_of(request.url.path)(error), status_code=error.status, headers=headers)


def _api_error(request: Request[Any, Any, State], error: ApiError) -> Response[dict[str, Any]]:
    return _answer(request, error)


def _http_error(
    request: Request[Any, Any, State], error: HTTPException
) -> Response[dict[str, Any]]:
    """Errors of the framework: an unknown route, a wrong method, a body that is too large."""
    messages = {
        404: "There is no such route.",
        405: "The route does not take this method.",
        413: f"The request body is larger than {MAX_BODY_BYTES} bytes.",
    }
    status = error.status_code
    message = messages.get(status, "The request is not valid." if status < 500 else "It failed.")
    known = ApiError(status, message, None, "request_too_large" if status == 413 else "http_error")
    response = _answer(request, known)
    for name, value in (error.headers or {}).items():
        response.set_header(name, value)
    return response


def _failure(request: Request[Any, Any, State], error: Exception) -> Response[dict[str, Any]]:
    log.error("a request failed", exc_info=error)
    return _answer(request, ApiError(500, "The server failed on this request.", None, "internal"))
