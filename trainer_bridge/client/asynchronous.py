"""The asyncio client: `RolloutClient` with coroutines. Needs ZeroMQ, msgpack and numpy.

    async with AsyncRolloutClient("tcp://127.0.0.1:5757") as client:
        results = await asyncio.gather(*(client.generate(prompt, max_tokens=64) for prompt in prompts))

The event loop watches the sockets' file descriptors. ZeroMQ signals on them only when something changes, so whatever
touches a socket must empty it: every send is followed by a read of all messages.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterable, Sequence
from contextlib import aclosing, closing, suppress
from typing import Any, Generic, Literal, NoReturn, Self, TypeVar, Unpack, overload

import zmq

from trainer_bridge.client.assembly import join_chunks
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


class AsyncRolloutClient(ProcessBound):
    """`RolloutClient` for asyncio: the same arguments, and the same methods as coroutines.

    Any number of tasks of one event loop may use it.
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
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- generate -----------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal[False] = False, **fields: Unpack[GenerateFields]
    ) -> Answer[GenerateResult]: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal["tokens"], **fields: Unpack[GenerateFields]
    ) -> Answer[AsyncStream[Chunk]]: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, *, stream: Literal["completions"], **fields: Unpack[GenerateFields]
    ) -> Answer[AsyncStream[Completion]]: ...

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        stream: Literal[False, "tokens", "completions"] = False,
        **fields: Unpack[GenerateFields],
    ) -> Answer[Any]:
        """As `RolloutClient.generate`: `async for chunk in await client.generate(prompt, stream="tokens")`.

        Cancelling the task cancels the request at the worker.
        """
        return Answer(self._generate(prompt, stream, fields))

    async def generate_many(
        self,
        requests: Iterable[BatchItem],
        *,
        progress: Progress = False,
        max_in_flight: int = MAX_IN_FLIGHT,
        **common: Unpack[GenerateFields],
    ) -> list[GenerateResult]:
        """As `RolloutClient.generate_many`."""
        results: dict[int, GenerateResult] = {}
        plans = plan_batch(requests, common)
        with show_progress(progress, len(plans)) as advance:
            async with aclosing(self._settle(plans, max_in_flight)) as outcomes:
                async for settled in outcomes:
                    results[settled.index] = settled.unwrap()
                    advance(tokens_of(settled))
        return [results[index] for index in range(len(plans))]

    def generate_as_completed(
        self, requests: Iterable[BatchItem], *, max_in_flight: int = MAX_IN_FLIGHT, **common: Unpack[GenerateFields]
    ) -> AsyncGenerator[Settled, None]:
        """As `RolloutClient.generate_as_completed`. Closing it (`contextlib.aclosing`) cancels the rest."""
        return self._settle(plan_batch(requests, common), max_in_flight)

    def session(self, name: str | None = None, *, lease_s: float | None = None) -> AsyncSession:
        """As `RolloutClient.session`; use it with `async with`."""
        return AsyncSession(self, self._core.next_id() if name is None else name, lease_s)

    # --- coming back --------------------------------------------------------------------------------------------------

    @overload
    async def attach(
        self, target: str, *, stream: Literal[False] = False, **fields: Unpack[AttachFields]
    ) -> GenerateResult: ...

    @overload
    async def attach(
        self, target: str, *, stream: Literal["tokens"], **fields: Unpack[AttachFields]
    ) -> AsyncStream[Chunk]: ...

    @overload
    async def attach(
        self, target: str, *, stream: Literal["completions"], **fields: Unpack[AttachFields]
    ) -> AsyncStream[Completion]: ...

    async def attach(
        self,
        target: str,
        *,
        stream: Literal[False, "tokens", "completions"] = False,
        **fields: Unpack[AttachFields],
    ) -> GenerateResult | AsyncStream[Chunk] | AsyncStream[Completion]:
        """As `RolloutClient.attach`."""
        self._bind()
        call = self._core.attach(target, stream, fields)
        return AsyncStream(self, call, stream) if stream else await self._finish(call)

    async def ack(self, targets: Iterable[str], *, endpoint: str | None = None) -> None:
        """As `RolloutClient.ack`."""
        await self.control("ack", endpoint=endpoint, targets=list(targets))

    async def report(
        self,
        target: GenerateResult | str,
        logprobs: TrainerLogprobs,
        *,
        endpoint: str | None = None,
        timeout_s: float | None = None,
    ) -> Mismatch:
        """As `RolloutClient.report`."""
        found = Mismatch()
        for place, fields in report_messages(self._core, target, logprobs, endpoint):
            (reply,) = await self.control("report", endpoint=place, timeout_s=timeout_s, **fields)
            found += read_mismatch(reply)
        return found

    # --- control ------------------------------------------------------------------------------------------------------

    async def cancel(self, target: str, *, endpoint: str | None = None) -> None:
        """As `RolloutClient.cancel`."""
        self._bind()
        calls = self._core.cancel(target, endpoint)
        await self._wait(until_cancelled(self._core, calls), calls)

    async def status(self, endpoint: str | None = None) -> Status:
        """As `RolloutClient.status`."""
        return Status((await self.control("status", endpoint=self._core.only_endpoint(endpoint)))[0])

    async def statuses(self) -> dict[str, Status]:
        """As `RolloutClient.statuses`."""
        return dict(zip(self._core.endpoints, map(Status, await self.control("status")), strict=True))

    async def ping(self, *, endpoint: str | None = None, timeout_s: float | None = None) -> None:
        """As `RolloutClient.ping`."""
        await self.control("ping", endpoint=endpoint, timeout_s=timeout_s)

    async def pause(self, mode: Literal["keep", "abort"] = "keep", *, endpoint: str | None = None) -> None:
        """As `RolloutClient.pause`."""
        await self.control("pause", endpoint=endpoint, mode=mode)

    async def resume(self, *, endpoint: str | None = None) -> None:
        """As `RolloutClient.resume`."""
        await self.control("resume", endpoint=endpoint)

    async def sleep(
        self,
        level: Literal[1, 2] = 1,
        *,
        mode: Literal["keep", "abort"] | None = None,
        requests: Literal["wait", "refuse"] | None = None,
        endpoint: str | None = None,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """As `RolloutClient.sleep`."""
        return await self.control(
            "sleep", endpoint=endpoint, timeout_s=timeout_s, **sleep_fields(level, mode, requests)
        )

    async def wake(self, *, endpoint: str | None = None, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """As `RolloutClient.wake`."""
        return await self.control("wake", endpoint=endpoint, timeout_s=timeout_s)

    async def load_adapter(
        self, name: str, path: str, version: int | None = None, *, endpoint: str | None = None
    ) -> None:
        """As `RolloutClient.load_adapter`."""
        fields: dict[str, Any] = {"name": name, "path": path} | ({} if version is None else {"version": version})
        await self.control("load_adapter", endpoint=endpoint, **fields)

    async def unload_adapter(self, name: str, *, endpoint: str | None = None) -> None:
        """As `RolloutClient.unload_adapter`."""
        await self.control("unload_adapter", endpoint=endpoint, name=name)

    async def shutdown(self, mode: Literal["drain", "now"] = "drain", *, endpoint: str | None = None) -> None:
        """As `RolloutClient.shutdown`."""
        await self.control("shutdown", endpoint=endpoint, mode=mode)

    async def control(
        self, op: str, *, endpoint: str | None = None, timeout_s: float | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """As `RolloutClient.control`."""
        self._bind()
        calls = self._core.control(op, endpoint, timeout_s, **fields)
        for call in calls:
            await self._wait(until_done(self._core, call), calls)
        return [call.reply or {} for call in calls]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All endpoints except the ones that are being removed."""
        return tuple(self._core.endpoints)

    def is_connected(self, endpoint: str) -> bool:
        """Whether a worker is connected now. A worker that hangs counts as connected for three heartbeats."""
        self._bind()
        self._core.check_known(endpoint)
        self._core.absorb(endpoint)
        return self._core.connections[endpoint].can_send

    def add(self, endpoint: str) -> None:
        """As `RolloutClient.add`."""
        self._core.add(endpoint)

    def remove(self, endpoint: str, mode: Literal["drain", "now"] = "drain") -> None:
        """As `RolloutClient.remove`."""
        self._core.remove(endpoint, mode)

    def end_session(self, session: str) -> None:
        """As `RolloutClient.end_session`."""
        self._core.end_session(session)

    def forget(self, ids: Iterable[str]) -> None:
        """As `RolloutClient.forget`."""
        self._core.forget(ids)

    def journaled(self) -> dict[str, bool]:
        """As `RolloutClient.journaled`."""
        return self._core.journaled()

    async def close(self) -> None:
        """As `RolloutClient.close`."""
        self._core.close()
        await asyncio.to_thread(self._core.term)

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            await self.close()

    async def _generate(
        self, prompt: Prompt | None, stream: Literal[False, "tokens", "completions"], fields: GenerateFields
    ) -> GenerateResult | AsyncStream[Any]:
        self._bind()
        call = self._core.generate(plan_request(prompt, fields, stream))
        return AsyncStream(self, call, stream) if stream else await self._finish(call)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise RuntimeError("this client belongs to another event loop; make one for each loop")
        self._loop = loop
        self._core.on_unread = lambda endpoint: loop.call_soon(self._core.absorb, endpoint)
        self._core.on_newcomers = lambda seconds: loop.call_later(seconds, self._core.ask_newcomers)
        self._core.on_closing = self._unwatch
        self._core.on_opened = self._watch
        for endpoint in self._core.connections:
            self._watch(endpoint)

    def _watch(self, endpoint: str) -> None:
        assert self._loop is not None
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._loop.add_reader(socket.get(zmq.FD), self._core.absorb, endpoint)
        self._loop.call_soon(self._core.absorb, endpoint)

    def _unwatch(self, endpoint: str) -> None:
        assert self._loop is not None
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._loop.remove_reader(socket.get(zmq.FD))

    async def _wait(
        self, waits: Generator[float | None, None, _Value], calls: list[ClientCall], keep: bool = False
    ) -> _Value:
        """Run one of the core's waits to its end. If it fails, abandon the calls, unless `keep`."""
        changed = asyncio.Event()
        for call in calls:
            call.on_update = changed.set
        try:
            while True:
                try:
                    wait_s = next(waits)
                except StopIteration as stop:
                    return stop.value
                await _changed(changed, wait_s)
        except BaseException:
            for call in calls:
                if not keep:
                    self._core.abandon(call)
            raise

    async def _finish(self, call: ClientCall) -> GenerateResult:
        await self._wait(until_done(self._core, call), [call])
        assert call.result is not None
        return call.result

    async def _settle(self, plans: list, max_in_flight: int) -> AsyncGenerator[Settled, None]:
        self._bind()
        changed = asyncio.Event()
        with closing(settle_all(self._core, plans, max_in_flight, changed.set)) as steps:
            for step in steps:
                if isinstance(step, Settled):
                    yield step
                else:
                    await _changed(changed, step)


class Answer(ProcessBound, Coroutine[Any, Any, _Value]):
    """The coroutine that `generate` returns. `async for` over it says what is missing: an `await`."""

    _instead = MAKE_CLIENTS

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__name__, self.__qualname__ = "generate", "AsyncRolloutClient.generate"

    def __await__(self) -> Generator[Any, Any, _Value]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Go on; asyncio calls this."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an exception; asyncio calls this."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End it where it is."""
        self._coroutine.close()

    def __aiter__(self) -> NoReturn:
        self.close()
        raise TypeError(
            "generate is a coroutine: await it before you iterate, as in "
            "`async for chunk in await client.generate(prompt, stream='tokens'): ...`"
        )


async def _changed(event: asyncio.Event, wait_s: float | None) -> None:
    if wait_s is None:
        await event.wait()
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await event.wait()
    event.clear()


class AsyncStream(StreamView, Generic[_Item]):
    """As `Stream`, with `async for` and `async with`, for one task. A cancelled `anext` loses nothing."""

    def __init__(self, client: AsyncRolloutClient, call: ClientCall, kind: StreamKind) -> None:
        super().__init__(client._core, call, kind)
        self._client = client

    def __aiter__(self) -> AsyncIterator[_Item]:
        return self

    async def __anext__(self) -> _Item:
        chunk = await self._client._wait(next_chunk(self._core, self._call), [self._call], keep=True)
        if chunk is None:
            raise StopAsyncIteration
        return self._item(chunk)

    async def arrived(self) -> list[Chunk]:
        """All new tokens, one chunk for each completion; waits for the first one. Empty at the end."""
        chunk = await self._client._wait(next_chunk(self._core, self._call), [self._call], keep=True)
        if chunk is None or not self._call.chunks:
            return [] if chunk is None else [chunk]
        chunks = [chunk, *self._call.chunks]
        self._call.chunks.clear()
        return join_chunks(chunks)

    async def wait(self) -> GenerateResult:
        """As `Stream.wait`."""
        return await self._client._finish(self._call)

    async def cancel(self) -> None:
        """As `Stream.cancel`."""
        if not self._call.done:
            calls = self._core.cancel(self.id, self.endpoint)
            await self._client._wait(until_ended(self._core, self._call, calls), calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            self.close()


class AsyncSession(ProcessBound):
    """As `Session`, with `async with`."""

    _instead = MAKE_CLIENTS
    _readable_after_fork = frozenset({"id", "lease_s"})

    def __init__(self, client: AsyncRolloutClient, session_id: str, lease_s: float | None) -> None:
        self.id = session_id
        self.lease_s = lease_s
        self._client = client

    async def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> GenerateResult:
        """As `Session.generate`."""
        fields["session"], fields["session_lease_s"] = self.id, self.lease_s
        return await self._client.generate(prompt, **fields)

    def end(self) -> None:
        """As `Session.end`."""
        self._client.end_session(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            self.end()
