"""The one exception that becomes an `error` reply."""

from __future__ import annotations

from typing import Literal

ErrorCode = Literal[
    "bad_message",
    "bad_request",
    "too_long",
    "overloaded",
    "duplicate",
    "not_found",
    "media_needed",
    "weights_rejected",
    "weights_replaced",
    "unavailable",
    "internal",
]


class ServiceError(ValueError):
    """A message that is answered with an error.

    `code` is the protocol's error code, the text a sentence that says what to change, `field` the dotted path of the
    header field at fault, `retry_after_s` the time after which to retry (seconds), `need` the hashes of media that are
    missing.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        need: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.field = field
        self.retry_after_s = retry_after_s
        self.need = need


def bad_request(message: str, field: str | None = None) -> ServiceError:
    """A field is missing, unknown, of the wrong type or out of range."""
    return ServiceError("bad_request", message, field)
