"""The errors of a client, as exceptions: one class for each error code of the protocol, and some of its own.

Catch `RolloutError` for all of them, or a class such as `Overloaded`, whose `retry_after_s` says when to try again.
"""

# ruff: noqa: N818 -- the names are the protocol's codes

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class RolloutError(Exception):
    """Base of all errors here. Raised itself for a code that this version of the client does not know.

    `code` is the protocol's code, `field` the field at fault, `retry_after_s` the seconds to wait before the next try,
    and `request_id` the id of the request; each of the last three may be None. If the client resumes requests,
    `partials` are the completions so far.
    """

    code = "internal"
    _classes: ClassVar[dict[str, type[RolloutError]]] = {}  # class of each code

    def __init_subclass__(cls, code: str | None = None) -> None:
        if code is not None:
            cls.code = code
            RolloutError._classes[code] = cls

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        need: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.need = list(need)  # hashes in `MediaNeeded`
        self.partials: list[Any] = []  # `trainer_bridge.Completion` objects


class BadMessage(RolloutError, code="bad_message"):
    """The message is not msgpack, too large, or of another protocol version."""


class BadRequest(RolloutError, code="bad_request"):
    """A field is missing, unknown, of the wrong type or out of range; `field` names it."""


class TooLong(RolloutError, code="too_long"):
    """Prompt plus `max_tokens` exceeds the worker's capacity."""


class Overloaded(RolloutError, code="overloaded"):
    """The worker's queue is full; try again after `retry_after_s` seconds."""


class Duplicate(RolloutError, code="duplicate"):
    """The id belongs to another request of this client, with different content."""


class NotFound(RolloutError, code="not_found"):
    """The worker does not know the request or session that the message names."""


class MediaNeeded(RolloutError, code="media_needed"):
    """The worker lacks images that the request names by hash (`need`)."""


class WeightsRejected(RolloutError, code="weights_rejected"):
    """New weights do not fit the model, arrived damaged, or are not newer."""


class WeightsReplaced(WeightsRejected, code="weights_replaced"):
    """A newer update took the place of these weights while they waited."""


class Unavailable(RolloutError, code="unavailable"):
    """The worker cannot take this now: it starts, drains, sleeps, hangs, or waits for weights."""


class InternalError(RolloutError, code="internal"):
    """A fault of the worker; its log has the traceback with the request's id."""


class ConnectionLost(RolloutError, code="connection_lost"):
    """The worker cannot be reached, or was lost. A stream still has its `partials()`."""


class AccessRefused(RolloutError, code="access_refused"):
    """The client's CURVE keys are missing, wrong, or not in the worker's list."""


class TooLarge(RolloutError, code="too_large"):
    """The message has more bytes than the worker's `service.max_message_bytes`; it was not sent."""


class RolloutTimeout(RolloutError, TimeoutError, code="timeout"):
    """No answer within `timeout_s`. The request was cancelled."""


#: The errors that a worker sends; the others are of the client itself.
SENT_BY_WORKERS = (
    *(BadMessage, BadRequest, TooLong, Overloaded, Duplicate, NotFound, MediaNeeded, WeightsRejected, WeightsReplaced),
    *(Unavailable, InternalError),
)

#: Errors without an answer: the worker may be gone or restarted.
UNANSWERED = (ConnectionLost, RolloutTimeout)


class ResumeFailed(RolloutError, code="resume_failed"):
    """No worker continued the request in time, or too many were lost in a row. `__cause__` is the last error."""


class JournalFailed(RolloutError, code="journal_failed"):
    """The journal is damaged, in use by another client, or the disk is full."""


class ProtocolError(RolloutError, code="protocol_error"):
    """A reply cannot be read, lacks a field, or a stream has a gap."""


def from_reply(header: Mapping[str, Any]) -> RolloutError:
    """The exception for an `error` reply."""
    code = str(header.get("code", "internal"))
    field, wait_s = header.get("field"), header.get("retry_after_s")
    need = header.get("need")
    return RolloutError._classes.get(code, RolloutError)(
        str(header.get("message", "the worker gave no reason")),
        code=code,
        field=None if field is None else str(field),
        retry_after_s=float(wait_s) if isinstance(wait_s, (int, float)) else None,
        request_id=header.get("id"),
        need=map(str, need) if isinstance(need, list) else (),
    )


def with_endpoint(endpoint: str, problem: str) -> str:
    """A problem with its endpoint in front, unless the text names it already."""
    return problem if endpoint in problem else f"{endpoint}: {problem}"


def error_reply(error: RolloutError) -> dict[str, Any]:
    """The `error` reply that `from_reply` turns into `error` again."""
    header: dict[str, Any] = {"op": "error", "code": error.code, "message": str(error)}
    told = {"field": error.field, "retry_after_s": error.retry_after_s, "need": error.need or None}
    return header | {name: value for name, value in told.items() if value is not None}
