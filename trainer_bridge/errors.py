"""What can go wrong for a client, as exceptions: one class for each error code of the protocol, and four of its own.

Catch `RolloutError` for all of them, or a class such as `Overloaded`, whose `retry_after_s` says when to come back.
"""

# ruff: noqa: N818 -- the names are the protocol's codes

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_bridge.results import Completion


class RolloutError(Exception):
    """Base of all of them. Also raised itself for a code that this version of the client does not know.

    `code` is the protocol's code, `field` the field at fault, `retry_after_s` when to come back, in seconds, and
    `request_id` the id of the request; each of the last three may be None. `partials` are the completions as far as
    they had come, where the client resumes requests by itself.
    """

    code = "internal"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.partials: list[Completion] = []


class BadMessage(RolloutError):
    """The worker could not read the message: not msgpack, too large, another protocol version."""

    code = "bad_message"


class BadRequest(RolloutError):
    """A field is missing, unknown, of the wrong type or out of range; `field` names it."""

    code = "bad_request"


class TooLong(RolloutError):
    """Prompt plus `max_tokens` exceeds what the worker can ever hold."""

    code = "too_long"


class Overloaded(RolloutError):
    """The worker's queue is full; come back after `retry_after_s`."""

    code = "overloaded"


class Duplicate(RolloutError):
    """The id belongs to another request of this client, with different content."""

    code = "duplicate"


class NotFound(RolloutError):
    """The target of a `cancel` or `attach` is not known to the worker."""

    code = "not_found"


class WeightsRejected(RolloutError):
    """New weights do not fit the model, arrived damaged, or are not newer."""

    code = "weights_rejected"


class Unavailable(RolloutError):
    """The worker drains, sleeps or waits for weights."""

    code = "unavailable"


class InternalError(RolloutError):
    """A fault of the worker; its log has the trace under the same id."""

    code = "internal"


class ConnectionLost(RolloutError):
    """The worker cannot be reached, or went away while it had the request. What it had done is lost to this client,
    apart from the chunks of a stream: `stream.partials()` holds them, for `continue_from`.
    """

    code = "connection_lost"


class AccessRefused(RolloutError):
    """The worker takes no connection from this client: CURVE keys are missing, wrong, or not allowed there."""

    code = "access_refused"


class RolloutTimeout(RolloutError, TimeoutError):
    """No answer within `timeout_s`. The request was cancelled."""

    code = "timeout"


class ResumeFailed(RolloutError):
    """No worker went on with a request in time, or too many were lost in a row without a new token of it.

    `__cause__` is the last error, `partials` what there is. The request can be asked for again with `continue_from`, or
    by its id with a journal.
    """

    code = "resume_failed"


class JournalFailed(RolloutError):
    """The journal cannot be read or written: damaged, in use by another client, the disk is full."""

    code = "journal_failed"


class ProtocolError(RolloutError):
    """A reply breaks the protocol: it cannot be read, a field is missing, or a stream has a gap."""

    code = "protocol_error"


_CLASSES: dict[str, type[RolloutError]] = {
    cls.code: cls
    for cls in (
        BadMessage,
        BadRequest,
        TooLong,
        Overloaded,
        Duplicate,
        NotFound,
        WeightsRejected,
        Unavailable,
        InternalError,
    )
}


def from_reply(header: Mapping[str, Any]) -> RolloutError:
    """The exception for an `error` reply."""
    code = str(header.get("code", "internal"))
    field, wait_s = header.get("field"), header.get("retry_after_s")
    return _CLASSES.get(code, RolloutError)(
        str(header.get("message", "the worker gave no reason")),
        code=code,
        field=None if field is None else str(field),
        retry_after_s=float(wait_s) if isinstance(wait_s, (int, float)) else None,
        request_id=header.get("id"),
    )
