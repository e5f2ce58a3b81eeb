"""What a client is told when something is wrong.

An `ApiError` carries the HTTP status and the four fields of the OpenAI envelope. Messages name the
field and the rule; they never echo long input, file paths or the server's internals.
"""

import json
import re
from typing import Any

import deepseek_recipe as recipe

from ds41jax.engine.request import EngineError

MAX_MESSAGE = 1000
MAX_QUOTED = 250  # of a message that may repeat the client's words
RETRY_AFTER_SECONDS = 1
_STATUS = {
    "invalid": 400,
    "queue_full": 429,
    "capacity": 400,  # larger than the whole cache, so that it never fits
    "draining": 503,
    "closed": 503,
    "unavailable": 503,
    "internal": 500,
}
# How deepseek-recipe names places in its messages.
_NAMED = re.compile(r"\b(messages?|tools|input)\[\d+\][\w.\[\]]*")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A refusal or failure as the client sees it.

    Attributes:
      status: HTTP status.
      message: for people; at most `MAX_MESSAGE` characters.
      param: the field at fault, in dotted form, or None.
      code: a stable word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str = "invalid_request"
    ):
        self.message = shortened(message, MAX_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.param = shortened(param, 200) if param is not None else None
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def openai(self) -> dict[str, Any]:
        """The OpenAI envelope."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def anthropic(self) -> dict[str, Any]:
        """The envelope of Anthropic's Messages API; it has no place for a field's name."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        message = self.message if self.param is None else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}}


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and an ellipsis if it is longer than the limit."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def invalid(param: str | None, message: str, code: str = "invalid_request") -> ApiError:
    """A request that can never be served as it stands."""
    return ApiError(400, message, param, code)


def from_engine(error: EngineError) -> ApiError:
    """The client's view of an engine error; what went wrong inside stays inside."""
    if error.kind == "internal":
        return ApiError(500, "The engine failed on this request.", None, "internal")
    return ApiError(_STATUS.get(error.kind, 500), str(error), None, error.kind)


def from_recipe(error: Exception) -> ApiError:
    """A refusal by deepseek-recipe: it raises its own type with a JSON body, or ValueError."""
    if isinstance(error, recipe.ConversionError):
        try:
            body = json.loads(error.body)["error"]
            message, param = str(body["message"]), body.get("param")
        except (ValueError, KeyError, TypeError):
            message, param = error.body, None
    else:
        message, param = str(error).removeprefix("invalid request body: "), None
    if param is None and (named := _NAMED.search(message)) is not None:
        param = named[0].replace("message[", "messages[").rstrip(".")
    return invalid(param, shortened(message, MAX_QUOTED))
