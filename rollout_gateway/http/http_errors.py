"""Errors of the gateway, with OpenAI's body; below `/v1/messages` with Anthropic's.

    {"error": {"message": ..., "type": ..., "param": FIELD or null, "code": STATUS}, "object": "error", ...}
    {"type": "error", "error": {"type": ..., "message": ..., "param": ..., "code": ...}, "request_id": null}

OpenAI's four fields also stand at the top level, as older vLLM releases have them. An error of a worker keeps its
message; its code decides the status.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway.http.json_text import json_text
from trainer_bridge.wire.errors import RolloutError

log = logging.getLogger(__name__)

#: Status by the code of a `RolloutError`. The status of other codes is 500.
_STATUS = {
    **dict.fromkeys(("bad_message", "bad_request", "too_long"), 400),
    "not_found": 404,
    **dict.fromkeys(("duplicate", "media_needed", "weights_rejected", "weights_replaced"), 409),
    "too_large": 413,
    "overloaded": 429,
    **dict.fromkeys(("connection_lost", "access_refused", "resume_failed", "protocol_error"), 502),
    "unavailable": 503,
    "timeout": 504,
}
#: OpenAI's type of an error by its status.
_KINDS = {
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    410: "GoneError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
#: Anthropic's type of an error by its status.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = "/v1/messages"
#: HTTP's names of the fields that workers' errors name. What follows a name stays: `stop.strings.0` is `stop.0`.
Names = Mapping[str, str]
_NAMES: Names = {"sampling": "", "stop": "", "stop.strings": "stop", "stop.token_ids": "stop_token_ids"}


class HttpError(Exception):
    """An answer that is an error. `param` names the field at fault; `details` are for clients of Anthropic's API."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        retry_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = details
        self.status = status
        self.param = param
        self.kind = _KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
        self.retry_s = retry_s

    def body(self, path: str = "") -> dict[str, Any]:
        """The body of the answer at a path, for `json.dumps`."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/"):
            kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            found = error | {"type": kind} | ({} if self.details is None else {"details": dict(self.details)})
            return {"type": "error", "error": found, "request_id": None}
        return {"error": error, "object": "error", **error}

    def response(self, path: str = "") -> Response:
        headers = {} if self.retry_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_s)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(json_text(self.body(path)), self.status, headers, media_type="application/json")

    def renamed(self, names: Names) -> HttpError:
        """The same error with the client's name of the field."""
        param = _param(self.param, names)
        message = str(self) if param is None else str(self).replace(repr(self.param), repr(param))
        return HttpError(self.status, message, param, retry_s=self.retry_s, details=self.details)


def bad_request(message: str, param: str | None = None) -> HttpError:
    """Status 400."""
    return HttpError(400, message, param)


def from_worker(error: RolloutError, names: Names = _NAMES) -> HttpError:
    status = _STATUS.get(error.code, 500)
    message, param = str(error), _param(error.field, names)
    if param is not None:
        message = message.replace(repr(error.field), repr(param))
    if error.code == "too_long":  # clients find this error by its first words
        message = f"this model's maximum context length is exceeded: {message}"
    retry_s = error.retry_after_s
    if retry_s is None and status in (429, 503):
        retry_s = 1.0
    return HttpError(status, message, param, retry_s=retry_s)


def _param(field: str | None, names: Names) -> str | None:
    """HTTP's name of the field of a worker's error. The longest known beginning of the field is replaced."""
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
    return http_error(error).response(request.url.path)
