"""The blocking client. Needs ZeroMQ, msgpack and numpy.

    with RolloutClient("tcp://127.0.0.1:5757") as client:
        result = client.generate("17:", max_tokens=64, temperature=1.0)
        print(result.completions[0].token_ids, result.completions[0].logprobs)

A client belongs to one thread at a time; make one for each thread (a connection is cheap), or use
`AsyncRolloutClient`. Many requests are best sent with `generate_many`, which keeps them in flight together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

import zmq

from trainer_bridge.client.batch import MAX_IN_FLIGHT, BatchItem, Settled, plan_batch, settle_all, tokens_of
from trainer_bridge.client.core import (
    MAKE_CLIENTS,
    ClientCall,
    StreamView,
    next_chunk,
    until_cancelled,
    until_done,
    until_ended,
)
from trainer_bridge.client.generate_request import (
    AttachFields,
    GenerateFields,
    Prompt,
    StreamKind,
    plan_request,
    sleep_fields,
)
from trainer_bridge.client.journal import Fsync
from trainer_bridge.client.mismatch import Mismatch, TrainerLogprobs, read_mismatch, report_messages
from trainer_bridge.client.progress import Progress, show_progress
from trainer_bridge.client.results import Chunk, Completion, GenerateResult, Status
from trainer_bridge.client.resume import ResumePolicy, make_core
from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.wire.keys import ClientCurve

_Item = TypeVar("_Item", Chunk, Completion)
_Value = TypeVar("_Value")


class RolloutClient(ProcessBound):
    """Sends requests to one or several workers, for one thread at a time.

    Args:
        endpoints: The workers' request sockets.
        client: A name by which workers know this client across connections.
        timeout_s: Seconds until `RolloutTimeout`, for requests without a `timeout_s`. None: no limit.
        connect_timeout_s: Seconds until an endpoint that cannot be reached raises `ConnectionLost`. None: 30, or 3 if
            it refuses connections.
        curve: Keys for workers that use CURVE. If a worker does not accept them: `AccessRefused`.
        resume: Continue a request whose worker is lost, fails or ends, at any endpoint.
        resume_timeout_s: Seconds that a completion may be without a worker before `ResumeFailed`.
        resume_max_faults: Lost workers in a row without a new token before `ResumeFailed`.
        journal: A file of requests, tokens and results; it turns `resume` on.
        journal_fsync: When the client waits for the disk: `never`, at `results`, or `always`.
        acknowledge: Have the worker drop each result once the client has it. None: True, but False for a client with a
            name and without a journal, which calls `ack`.
        heartbeat_s: Seconds between heartbeats. A worker that hangs is lost after at most four of them.
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
        resumes = resume or journal is not None
        given = (client, timeout_s, connect_timeout_s, curve, acknowledge, heartbeat_s)
        self._core = make_core(endpoints, *given, resume=policy if resumes else None)
        self._poller = zmq.Poller()
        self._watched: dict[zmq.Socket, str] = {}  # endpoints by socket
        self._core.on_opened, self._core.on_closing = self._watch, self._unwatch
        for endpoint in self._core.connections:
            self._watch(endpoint)

    # --- generate -----------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal[False] = False, **fields: Unpack[GenerateFields]
    ) -> GenerateResult: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal["tokens"], **fields: Unpack[GenerateFields]
    ) -> Stream[Chunk]: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal["completions"], **fields: Unpack[GenerateFields]
    ) -> Stream[Completion]: ...

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        stream: Literal[False, "tokens", "completions"] = False,
        **fields: Unpack[GenerateFields],
    ) -> GenerateResult | Stream[Chunk] | Stream[Completion]:
        """The completions of a prompt (token ids or text) or of `messages=`. Fields: see `GenerateFields`.

        With `stream` it returns an iterator of chunks, or of completions in the order in which they end. An interrupted
        call (a time-out, Ctrl-C) cancels the request at the worker.
        """
        call = self._core.generate(plan_request(prompt, fields, stream))
        return Stream(self, call, stream) if stream else self._finish(call)

    def generate_many(
        self,
        requests: Iterable[BatchItem],
        *,
        progress: Progress = False,
        max_in_flight: int = MAX_IN_FLIGHT,
        **common: Unpack[GenerateFields],
    ) -> list[GenerateResult]:
        """Results of many requests, in their order.

        A request is a prompt, or a map of `generate`'s arguments; `common` are defaults for all. `timeout_s` is counted
        for each request from when it is sent. The first error cancels the rest and is raised. A request that finds the
        queue full is sent again later.
        """
        results: dict[int, GenerateResult] = {}
        plans = plan_batch(requests, common)
        with show_progress(progress, len(plans)) as advance, closing(self._settle(plans, max_in_flight)) as outcomes:
            for settled in outcomes:
                results[settled.index] = settled.unwrap()
                advance(tokens_of(settled))
        return [results[index] for index in range(len(plans))]

    def generate_as_completed(
        self, requests: Iterable[BatchItem], *, max_in_flight: int = MAX_IN_FLIGHT, **common: Unpack[GenerateFields]
    ) -> Generator[Settled, None, None]:
        """Each outcome of `generate_many`, result or error, as it comes. Closing the iterator cancels the rest."""
        return self._settle(plan_batch(requests, common), max_in_flight)

    def session(self, name: str | None = None, *, lease_s: float | None = None) -> Session:
        """A conversation whose KV the worker keeps for `lease_s` seconds after a turn; None: the worker's setting."""
        return Session(self, self._core.next_id() if name is None else name, lease_s)

    # --- coming back --------------------------------------------------------------------------------------------------

    @overload
    def attach(
        self, target: str, *, stream: Literal[False] = False, **fields: Unpack[AttachFields]
    ) -> GenerateResult: ...

    @overload
    def attach(self, target: str, *, stream: Literal["tokens"], **fields: Unpack[AttachFields]) -> Stream[Chunk]: ...

    @overload
    def attach(
        self, target: str, *, stream: Literal["completions"], **fields: Unpack[AttachFields]
    ) -> Stream[Completion]: ...

    def attach(
        self,
        target: str,
        *,
        stream: Literal[False, "tokens", "completions"] = False,
        **fields: Unpack[AttachFields],
    ) -> GenerateResult | Stream[Chunk] | Stream[Completion]:
        """The result of the request `target` of this `client` name, also over an earlier connection; waits for it.

        With `stream` the new stream continues after `partials`. Interrupting the call does not cancel the request.
        Raises `NotFound` if the worker does not know the request or has dropped its result.
        """
        call = self._core.attach(target, stream, fields)
        return Stream(self, call, stream) if stream else self._finish(call)

    def ack(self, targets: Iterable[str], *, endpoint: str | None = None) -> None:
        """Have the workers drop results; unknown ids are ignored. Raises `BadRequest` if one is in flight."""
        self.control("ack", endpoint=endpoint, targets=list(targets))

    def report(
        self,
        target: GenerateResult | str,
        logprobs: TrainerLogprobs,
        *,
        endpoint: str | None = None,
        timeout_s: float | None = None,
    ) -> Mismatch:
        """Compare a trainer's own log-probs of a result (or its id) with the worker's.

        `logprobs` has one row for each completion, in their order (None: not known) or by index: float32 [tokens],
        log-softmax of logits / temperature like `Completion.logprobs`; NaN: not known. The worker must still have the
        result: use a client with a name or `acknowledge=False`, and `ack` after this. Raises `NotFound` for a dropped
        result, `BadRequest` for a row of the wrong length, ValueError for values that cannot be sent.
        """
        found = Mismatch()
        for place, fields in report_messages(self._core, target, logprobs, endpoint):
            (reply,) = self.control("report", endpoint=place, timeout_s=timeout_s, **fields)
            found += read_mismatch(reply)
        return found

    # --- control ------------------------------------------------------------------------------------------------------

    def cancel(self, target: str, *, endpoint: str | None = None) -> None:
        """End a request of this client (or `client` name) with the tokens it has. Raises `NotFound`."""
        calls = self._core.cancel(target, endpoint)
        self._wait(until_cancelled(self._core, calls), calls)

    def status(self, endpoint: str | None = None) -> Status:
        """A worker's status: a map with the fields of the protocol."""
        return Status(self.control("status", endpoint=self._core.only_endpoint(endpoint))[0])

    def statuses(self) -> dict[str, Status]:
        """The status of every endpoint."""
        return dict(zip(self._core.endpoints, map(Status, self.control("status")), strict=True))

    def ping(self, *, endpoint: str | None = None, timeout_s: float | None = None) -> None:
        """Return when the endpoint, or every one, has answered."""
        self.control("ping", endpoint=endpoint, timeout_s=timeout_s)

    def pause(self, mode: Literal["keep", "abort"] = "keep", *, endpoint: str | None = None) -> None:
        """Generate nothing until `resume`; `abort` also ends every request as cancelled."""
        self.control("pause", endpoint=endpoint, mode=mode)

    def resume(self, *, endpoint: str | None = None) -> None:
        """Generate again after `pause`."""
        self.control("resume", endpoint=endpoint)

    def sleep(
        self,
        level: Literal[1, 2] = 1,
        *,
        mode: Literal["keep", "abort"] | None = None,
        requests: Literal["wait", "refuse"] | None = None,
        endpoint: str | None = None,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Release the device's memory until `wake`. Returns the reply of each worker."""
        return self.control("sleep", endpoint=endpoint, timeout_s=timeout_s, **sleep_fields(level, mode, requests))

    def wake(self, *, endpoint: str | None = None, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """End `sleep`. Raises `Unavailable` if the device has too little memory; the worker then stays asleep."""
        return self.control("wake", endpoint=endpoint, timeout_s=timeout_s)

    def load_adapter(self, name: str, path: str, version: int | None = None, *, endpoint: str | None = None) -> None:
        """Load a LoRA adapter from a PEFT folder below the worker's `adapter_root`, or replace it.

        `version` must grow; None: the last one plus 1.
        """
        fields: dict[str, Any] = {"name": name, "path": path} | ({} if version is None else {"version": version})
        self.control("load_adapter", endpoint=endpoint, **fields)

    def unload_adapter(self, name: str, *, endpoint: str | None = None) -> None:
        """Unload an adapter that no unfinished request names."""
        self.control("unload_adapter", endpoint=endpoint, name=name)

    def shutdown(self, mode: Literal["drain", "now"] = "drain", *, endpoint: str | None = None) -> None:
        """End one worker or all: `drain` finishes running requests, `now` ends them with the tokens they have."""
        self.control("shutdown", endpoint=endpoint, mode=mode)

    def control(
        self, op: str, *, endpoint: str | None = None, timeout_s: float | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """Send any control message of the protocol to one endpoint or all. Returns the replies in their order."""
        calls = self._core.control(op, endpoint, timeout_s, **fields)
        for call in calls:
            self._wait(until_done(self._core, call), calls)
        return [call.reply or {} for call in calls]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints except the ones that are being removed."""
        return tuple(self._core.endpoints)

    def add(self, endpoint: str) -> None:
        """Add a worker; it gets requests once its weights are as new as the others'. ValueError: already there."""
        self._core.add(endpoint)

    def remove(self, endpoint: str, mode: Literal["drain", "now"] = "drain") -> None:
        """Send nothing new to a worker; returns at once, and the worker goes on. ValueError: the last endpoint.

        With `drain` its requests end there; with `now` they continue on other workers (`resume`), or raise
        `ConnectionLost`.
        """
        self._core.remove(endpoint, mode)

    def end_session(self, session: str) -> None:
        """Free a session's KV on its worker; returns at once."""
        self._core.end_session(session)

    def forget(self, ids: Iterable[str]) -> None:
        """Drop requests from the journal. ValueError for one in flight."""
        self._core.forget(ids)

    def journaled(self) -> dict[str, bool]:
        """Every request id in the journal, oldest first: True if its result is there."""
        return self._core.journaled()

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        self._core.close()
        self._core.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owned:
            self.close()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _watch(self, endpoint: str) -> None:
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._poller.register(socket, zmq.POLLIN)
            self._watched[socket] = endpoint

    def _unwatch(self, endpoint: str) -> None:
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._poller.unregister(socket)
            del self._watched[socket]

    def _wait_once(self, wait_s: float | None) -> None:
        """Wait until something has come, and take it in."""
        ready = self._poller.poll(None if wait_s is None else math.ceil(wait_s * 1000))
        for endpoint in sorted({self._watched[socket] for socket, _ in ready}):
            self._core.absorb(endpoint)

    def _wait(self, waits: Generator[float | None, None, _Value], calls: list[ClientCall]) -> _Value:
        """Run one of the core's waits to its end. If it fails, abandon the calls."""
        try:
            while True:
                try:
                    wait_s = next(waits)
                except StopIteration as stop:
                    return stop.value
                self._wait_once(wait_s)
        except BaseException:
            for call in calls:
                self._core.abandon(call)
            raise

    def _finish(self, call: ClientCall) -> GenerateResult:
        self._wait(until_done(self._core, call), [call])
        assert call.result is not None
        return call.result

    def _settle(self, plans: list, max_in_flight: int) -> Generator[Settled, None, None]:
        with closing(settle_all(self._core, plans, max_in_flight, lambda: None)) as steps:
            for step in steps:
                if isinstance(step, Settled):
                    yield step
                else:
                    self._wait_once(step)


class Stream(StreamView, Generic[_Item]):
    """The chunks or completions of a request, as they arrive. A `with` block or `close` ends it early.

    If the request fails, the iteration raises the error after the last chunk; `result` is then None.
    """

    def __init__(self, client: RolloutClient, call: ClientCall, kind: StreamKind) -> None:
        super().__init__(client._core, call, kind)
        self._client = client

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        chunk = self._client._wait(next_chunk(self._core, self._call), [self._call])
        if chunk is None:
            raise StopIteration
        return self._item(chunk)

    def wait(self) -> GenerateResult:
        """Wait for the result of the whole request. Chunks can still be read after this."""
        return self._client._finish(self._call)

    def cancel(self) -> None:
        """End the request at the worker; chunks of the tokens that it has drawn still arrive."""
        if not self._call.done:
            calls = self._core.cancel(self.id, self.endpoint)
            self._client._wait(until_ended(self._core, self._call, calls), calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owned:
            self.close()


class Session(ProcessBound):
    """A conversation, one turn at a time. Each turn sends `id` and `lease_s`."""

    _instead = MAKE_CLIENTS
    _readable_after_fork = frozenset({"id", "lease_s"})

    def __init__(self, client: RolloutClient, session_id: str, lease_s: float | None) -> None:
        self.id = session_id
        self.lease_s = lease_s
        self._client = client

    def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> GenerateResult:
        """The next turn: as `RolloutClient.generate`, for one completion. `cached_tokens` counts reused KV."""
        fields["session"], fields["session_lease_s"] = self.id, self.lease_s
        return self._client.generate(prompt, **fields)

    def end(self) -> None:
        """Free the KV on the worker; returns at once."""
        self._client.end_session(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owned:
            self.end()
