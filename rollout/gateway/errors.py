"""Errors of the gateway, with OpenAI's body.

    {"error": {"message": ..., "type": ..., "param": FIELD or null, "code": STATUS}, "object": "error", ...}

The four fields also stand at the top level, as older vLLM releases have them. An error of a worker keeps its message;
its code decides the status.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from trainer_bridge.wire.errors import RolloutError

log = logging.getLogger(__name__)

#: Status and OpenAI's type by the code of a `RolloutError`. Codes that are absent are 500.
_STATUS = {
    "bad_message": (400, "BadRequestError"),
    "bad_request": (400, "BadRequestError"),
    "too_long": (400, "BadRequestError"),
    "overloaded": (429, "RateLimitError"),
    "duplicate": (409, "ConflictError"),
    "not_found": (404, "NotFoundError"),
    "media_needed": (409, "ConflictError"),
    "weights_rejected": (409, "ConflictError"),
    "weights_replaced": (409, "ConflictError"),
    "unavailable": (503, "ServiceUnavailableError"),
    "connection_lost": (502, "BadGatewayError"),
    "access_refused": (502, "BadGatewayError"),
    "resume_failed": (502, "BadGatewayError"),
    "protocol_error": (502, "BadGatewayError"),
    "timeout": (504, "GatewayTimeoutError"),
}
#: Fields of HTTP requests by the worker's names for them. What follows a name stays: `stop.strings.0` is `stop.0`.
Names = Mapping[str, str]
_NAMES: Names = {"sampling": "", "stop": "", "stop.strings": "stop", "stop.token_ids": "stop_token_ids"}


class HttpError(Exception):
    """An answer that is an error. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        kind: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _kind(status)
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """The body of the answer, for `json.dumps`."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error, "object": "error", **error}

    def response(self) -> Response:
        """The answer."""
        headers = {} if self.retry_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_s)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(to_json(self.body()), self.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None) -> HttpError:
    """Status 400."""
    return HttpError(400, message, param)


def from_worker(error: RolloutError, names: Names = _NAMES) -> HttpError:
    """The answer to a worker's error."""
    status, kind = _STATUS.get(error.code, (500, "InternalServerError"))
    message, param = str(error), _param(error.field, names)
    if param is not None:
        message = message.replace(repr(error.field), repr(param))
    if error.code == "too_long":  # clients find this error by its first words
        message = f"this model's maximum context length is exceeded: {message}"
    retry_s = error.retry_after_s
    if retry_s is None and status in (429, 503):
        retry_s = 1.0
    return HttpError(status, message, param, kind=kind, retry_s=retry_s)


def _kind(status: int) -> str:
    kinds = {401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError", 408: "RequestTimeoutError"}
    kinds |= {409: "ConflictError", 413: "RequestTooLargeError", 429: "RateLimitError", 501: "NotImplementedError"}
    kinds |= {502: "BadGatewayError", 503: "ServiceUnavailableError"}
    return kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


def _param(field: str | None, names: Names) -> str | None:
    """The field of a worker's error under its HTTP name: that of its longest part that has one."""
    if field is None:
        return None
    parts = field.split(".")
    for count in range(len(parts), 0, -1):
        known = names.get(".".join(parts[:count]))
        if known is not None:
            return ".".join([known, *parts[count:]]).strip(".")
    return field


def http_error(error: Exception) -> HttpError:
    """The answer to any exception of a handler. An unforeseen one is logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RolloutError):
        return from_worker(error)
    log.error("a request failed in the gateway", exc_info=error)
    return HttpError(500, "a fault in the gateway; its log has the trace")


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of exceptions."""
    return http_error(error).response()
