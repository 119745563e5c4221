"""The common parts of both kinds of clients, streams and sessions: what never waits, and methods made of `calls`."""

import inspect
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import wraps
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from trainer_bridge.client import calls
from trainer_bridge.client.calls import Call
from trainer_bridge.client.core import MAKE_CLIENTS, ClientCall, ClientCore
from trainer_bridge.client.generate_request import AttachFields, GenerateFields, Prompt, StreamKind, plan_request
from trainer_bridge.client.journal import Fsync
from trainer_bridge.client.results import Chunk, Completion, GenerateResult
from trainer_bridge.client.resume import ResumePolicy, ResumingCore
from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.wire.keys import ClientCurve

_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")
_Made = TypeVar("_Made", covariant=True)
_Answer = TypeVar("_Answer")
_Chunks = TypeVar("_Chunks")
_Completions = TypeVar("_Completions")


class _Blocking(Protocol):
    def __enter__(self) -> Any: ...


class _Asynchronous(Protocol):
    async def __aenter__(self) -> Any: ...


class _Method(Protocol[_Params, _Made]):
    @overload
    def __get__(self, client: _Blocking, kind: type) -> Callable[_Params, _Made]: ...

    @overload
    def __get__(self, client: _Asynchronous, kind: type) -> Callable[_Params, Coroutine[Any, Any, _Made]]: ...


def _method(call: Call[_Params, _Value]) -> _Method[_Params, _Value]:
    """A call as a method: a blocking client waits and returns its value, an asynchronous one returns a coroutine."""

    @wraps(call)
    def method(self: Any, *args: _Params.args, **kwargs: _Params.kwargs) -> Any:
        return self._run(call, *args, **kwargs)

    signature = inspect.signature(call)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shown = signature.replace(parameters=[own, *list(signature.parameters.values())[2:]], return_annotation=Any)
    vars(method)["__signature__"] = shown
    return cast(_Method[_Params, _Value], method)


class ClientFace(ProcessBound, Generic[_Answer, _Chunks, _Completions]):
    """The common methods of the clients. `RolloutClient` describes the arguments.

    The types are what a request returns: without a stream, with a stream of chunks, and of whole completions.
    """

    _instead = MAKE_CLIENTS
    _readable_after_fork = frozenset({"endpoints", "_core"})

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        client: str | None = None,
        timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        curve: ClientCurve | None = None,
        resume: bool = False,
        resume_timeout_s: float = 600.0,
        resume_max_faults: int = 8,
        journal: str | os.PathLike[str] | None = None,
        journal_fsync: Fsync = "never",
        acknowledge: bool | None = None,
        heartbeat_s: float = 10.0,
    ) -> None:
        policy = ResumePolicy(resume_timeout_s, resume_max_faults, journal, journal_fsync)
        if journal is not None and acknowledge is None:
            acknowledge = True
        given = (endpoints, client, timeout_s, connect_timeout_s, curve, acknowledge, heartbeat_s)
        resumes = resume or journal is not None
        self._core = ResumingCore(policy, *given) if resumes else ClientCore(*given)
        self._prepare_to_wait()

    def _prepare_to_wait(self) -> None:
        """Prepare to wait. The constructor calls this after it has made the connections."""

    def _answer(self, begin: Callable[[], ClientCall], stream: StreamKind | Literal[False]) -> Any:
        """Begin a request, and return its result or its stream."""
        raise NotImplementedError

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal[False] = False, **fields: Unpack[GenerateFields]
    ) -> _Answer: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal["tokens"], **fields: Unpack[GenerateFields]
    ) -> _Chunks: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal["completions"], **fields: Unpack[GenerateFields]
    ) -> _Completions: ...

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        stream: Literal[False, "tokens", "completions"] = False,
        **fields: Unpack[GenerateFields],
    ) -> Any:
        """The completions of a prompt (token ids or text) or of `messages=`. Fields: see `GenerateFields`.

        With `stream` an iterator. An interrupted call cancels the request.
        """
        return self._answer(lambda: self._core.generate(plan_request(prompt, fields, stream)), stream)

    @overload
    def attach(self, target: str, *, stream: Literal[False] = False, **fields: Unpack[AttachFields]) -> _Answer: ...

    @overload
    def attach(self, target: str, *, stream: Literal["tokens"], **fields: Unpack[AttachFields]) -> _Chunks: ...

    @overload
    def attach(
        self, target: str, *, stream: Literal["completions"], **fields: Unpack[AttachFields]
    ) -> _Completions: ...

    def attach(
        self, target: str, *, stream: Literal[False, "tokens", "completions"] = False, **fields: Unpack[AttachFields]
    ) -> Any:
        """The result of an earlier request of this `client` name.

        A stream goes on after `partials`. Interrupting the call does not cancel the request.
        """
        return self._answer(lambda: self._core.attach(target, stream, fields), stream)

    generate_many = _method(calls.generate_many)
    ack = _method(calls.ack)
    report = _method(calls.report)
    cancel = _method(calls.cancel)
    prefetch = _method(calls.prefetch)
    status = _method(calls.status)
    statuses = _method(calls.statuses)
    ping = _method(calls.ping)
    pause = _method(calls.pause)
    resume = _method(calls.resume)
    sleep = _method(calls.sleep)
    wake = _method(calls.wake)
    load_adapter = _method(calls.load_adapter)
    unload_adapter = _method(calls.unload_adapter)
    shutdown = _method(calls.shutdown)
    control = _method(calls.control)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints except the ones that are being removed."""
        return tuple(self._core.endpoints)

    def add(self, endpoint: str) -> None:
        """Add a worker, which gets requests once its weights are as new as the others'."""
        self._core.add(endpoint)

    def remove(self, endpoint: str, mode: Literal["drain", "now"] = "drain") -> None:
        """Send nothing new to a worker; its sessions move.

        With `drain` its requests end there; with `now` they raise `ConnectionLost`, or continue elsewhere.
        """
        self._core.remove(endpoint, mode)

    def end_session(self, session: str) -> None:
        """Free a session's KV, without waiting."""
        self._core.end_session(session)

    def forget(self, ids: Iterable[str]) -> None:
        """Drop finished requests from the journal."""
        self._core.forget(ids)

    def journaled(self) -> dict[str, bool]:
        """Every request id in the journal, oldest first: True if its result is there."""
        return self._core.journaled()


class StreamView(ProcessBound):
    """The parts of a stream that do not wait: id, endpoint, chunks."""

    _instead = "read it in its process, and pass its chunks or its result"
    _readable_after_fork = frozenset({"id", "endpoint", "result", "partials", "_call"})

    def __init__(self, client: ClientFace[Any, Any, Any], call: ClientCall, kind: StreamKind) -> None:
        self._client = client
        self._call = call
        self._kind = kind

    @property
    def id(self) -> str:
        """The request's id."""
        return self._call.target or self._call.id

    @property
    def endpoint(self) -> str:
        """The endpoint of its worker; empty until the request has a worker."""
        return self._call.endpoint

    @property
    def result(self) -> GenerateResult | None:
        """The whole result; None until it has arrived."""
        return self._call.result

    def partials(self) -> list[Completion]:
        """The completions so far, each joined from its chunks."""
        assert self._call.assembler is not None
        return self._call.assembler.partials()

    def close(self) -> None:
        """Stop reading. Cancels the request unless it is `detached` or the stream comes from `attach`."""
        self._client._core.abandon(self._call)

    def _item(self, chunk: Chunk) -> Any:
        """The stream's item for a chunk: the chunk, or the whole completion that it ends."""
        return chunk if self._kind == "tokens" else self._call.joined(chunk.index)


class SessionView(ProcessBound):
    """The parts of a session that do not wait."""

    _instead = MAKE_CLIENTS
    _readable_after_fork = frozenset({"id", "lease_s"})

    def __init__(self, client: ClientFace[Any, Any, Any], session_id: str, lease_s: float | None) -> None:
        self.id = session_id
        self.lease_s = lease_s
        self._client = client

    def end(self) -> None:
        """Free the KV of the session, without waiting."""
        self._client.end_session(self.id)

    def _turn(self, fields: GenerateFields) -> GenerateFields:
        """The fields of a turn."""
        return {**fields, "session": self.id, "session_lease_s": self.lease_s}
