"""A request's hints about KV: the time for which it is needed, the end of the session, and the tokens to continue.

`kv_hints` is the envelope of vLLM 0.33 and SGLang 0.5.23: a list of actions with types and versions of their own. As
there, an action of an unknown type has no effect: it is a hint. `kv.retain` 1 is carried out as a lease.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rollout.config.service import MAX_SESSION_LEASE_S
from rollout_gateway.http.bodies import Body
from rollout_gateway.http.http_errors import bad_request

_MAX_ACTIONS = 128
_MAX_SECONDS = 30 * 24 * 3600.0  # the same limit as in vLLM; a lease is shorter
_MAX_TOKENS = 2**31 - 1
Name = Annotated[str, Field(min_length=1, max_length=128)]
Position = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]


class Directive(Body):
    """A directive of `kv.retain`. It applies to all tokens: a lease holds for the whole request."""

    priority: int = Field(ge=0, le=100)
    duration: float | None = Field(None, ge=0, le=_MAX_SECONDS, allow_inf_nan=False)
    start: Position = 0
    end: Position | None = None
    covers_output: bool = False


class Retain(Body):
    """The payload of `kv.retain`."""

    scope: str | None = None
    directives: list[dict[str, Any]] = Field(max_length=_MAX_ACTIONS)

    def lease_s(self, within: str) -> float:
        """The longest time for which tokens are protected; without an end the longest lease. 0: none is."""
        lease_s = 0.0
        for index, fields in enumerate(self.directives):
            each = Directive.take(fields, f"{within}directives.{index}.")
            if each.priority:
                lease_s = max(lease_s, _MAX_SECONDS if each.duration is None else each.duration)
        return min(lease_s, MAX_SESSION_LEASE_S)


class Action(Body):
    """An action of `kv_hints`."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}

    def lease_s(self, within: str) -> float:
        """The lease that it asks for; 0: none. Raises `HttpError`."""
        if self.action_type != "kv.retain":
            return 0.0
        if self.action_version.partition(".")[0] != "1":
            raise bad_request(
                "this gateway supports only version 1 of kv.retain; send that version", f"{within}action_version"
            )
        return Retain.take(self.payload, f"{within}payload.").lease_s(f"{within}payload.")


class KvHints(Body):
    """The body's `kv_hints`."""

    protocol_version: str
    message_id: str
    actions: list[dict[str, Any]] = Field([], max_length=_MAX_ACTIONS)

    def lease_s(self) -> float:
        """The longest lease that an action asks for; 0: none. Raises `HttpError`."""
        actions = ((f"kv_hints.actions.{index}.", fields) for index, fields in enumerate(self.actions))
        return max((Action.take(fields, path).lease_s(path) for path, fields in actions), default=0.0)


class KvFields(Body):
    """Fields about the KV of a request."""

    kv_hints: dict[str, Any] | None = None
    lease_s: float | None = Field(None, gt=0, le=MAX_SESSION_LEASE_S)
    end_of_session: bool = False

    def hints(self, session: str | None) -> dict[str, Any]:
        """The arguments of `generate` for them. Raises `HttpError`."""
        lease_s = self.lease_s or 0.0
        if self.kv_hints is not None:
            lease_s = max(lease_s, KvHints.take(self.kv_hints, "kv_hints.").lease_s())
        found: dict[str, Any] = {"lease_s": lease_s} if lease_s else {}
        if self.end_of_session:
            if session is None:
                raise bad_request("name the session in X-Session-ID, and no worker", "end_of_session")
            found["end_of_session"] = True
        return found


class ForkBody(Body):
    """The body's `fork`: the first `offset` tokens of a request and its choice `index`, or of a session's last turn."""

    request: Name | None = None
    session: Name | None = None
    index: int = Field(0, ge=0, le=_MAX_TOKENS)
    offset: int | None = Field(None, ge=1, le=_MAX_TOKENS)

    def fields(self, session: str | None) -> Mapping[str, Any]:
        """Its fields for a worker; without a source it continues the session of the request. Raises `HttpError`."""
        if self.request is not None and self.session is not None:
            raise bad_request("send one of 'request' and 'session'", "fork.session")
        named = self.session or session
        if self.request is None and named is None:
            raise bad_request("name the source of the fork: 'request', 'session', or X-Session-ID", "fork")
        if self.request is None and self.index:
            raise bad_request("a session has one completion; remove 'index'", "fork.index")
        source = {"session": named} if self.request is None else {"request": self.request, "index": self.index}
        return source if self.offset is None else source | {"offset": self.offset}


class ForkField(Body):
    """The field `fork`."""

    fork: dict[str, Any] | None = None

    def continued(self, session: str | None) -> Mapping[str, Any] | None:
        """The source that the request continues, by the client's names; None without one. Raises `HttpError`."""
        return None if self.fork is None else ForkBody.take(self.fork, "fork.").fields(session)
