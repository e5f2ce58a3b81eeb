"""The optional API key: every route but the health check needs it."""

import base64
import binascii
import hmac
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from ds41jax.serving.errors import ApiError

OPEN = "open"  # a route's opt: served without a key


async def require_key(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """A Litestar guard; raises `ApiError` 401 without the right key.

    Asynchronous since Litestar runs other guards in a thread, which costs more than the check.
    """
    key = connection.app.state.server.options.api_key
    if key is None or handler.opt.get(OPEN):
        return
    given = presented_key(connection.headers)
    if given is None or not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, "A valid API key is needed.", None, "invalid_api_key")


def presented_key(headers: Any) -> str | None:
    """The key in a request's headers.

    OpenAI clients send it as a bearer token, Anthropic's as `x-api-key`; a browser that opens the
    console asks for a password, of which the user name does not matter.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return str(value.strip())
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(value.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return None
        return decoded.partition(":")[2]
    given = headers.get("x-api-key")
    return None if given is None else str(given)
