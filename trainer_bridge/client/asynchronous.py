"""The asyncio client: `RolloutClient` with coroutines. Needs ZeroMQ, msgpack and numpy.

    async with AsyncRolloutClient("tcp://127.0.0.1:5757") as client:
        results = await asyncio.gather(*(client.generate(prompt, max_tokens=64) for prompt in prompts))

The event loop watches the sockets' file descriptors. ZeroMQ signals on them only when something changes, so any use of
a socket must empty it: every send is followed by a read of all messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterable
from contextlib import closing, suppress
from typing import Any, Generic, Literal, NoReturn, ParamSpec, Self, TypeVar, Unpack

import zmq

from trainer_bridge.client import calls
from trainer_bridge.client.assembly import join_chunks
from trainer_bridge.client.batch import MAX_IN_FLIGHT, BatchItem, Settled, plan_batch, settle_all
from trainer_bridge.client.calls import Call
from trainer_bridge.client.core import MAKE_CLIENTS, ClientCall
from trainer_bridge.client.face import ClientFace, SessionView, StreamView
from trainer_bridge.client.generate_request import GenerateFields, Prompt, StreamKind
from trainer_bridge.client.results import Chunk, Completion, GenerateResult
from trainer_bridge.process_bound import ProcessBound

_Item = TypeVar("_Item", Chunk, Completion)
_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")


class AsyncRolloutClient(
    ClientFace["Answer[GenerateResult]", "Answer[AsyncStream[Chunk]]", "Answer[AsyncStream[Completion]]"]
):
    """`RolloutClient` for the tasks of one event loop. Cancelling the task of `generate` cancels its request."""

    def generate_as_completed(
        self, requests: Iterable[BatchItem], *, max_in_flight: int = MAX_IN_FLIGHT, **common: Unpack[GenerateFields]
    ) -> AsyncGenerator[Settled, None]:
        """Like `RolloutClient.generate_as_completed`. Closing it (`contextlib.aclosing`) cancels the rest."""
        return self._settle(plan_batch(requests, common), max_in_flight)

    def session(self, name: str | None = None, *, lease_s: float | None = None) -> AsyncSession:
        """Like `RolloutClient.session`; use it with `async with`."""
        return AsyncSession(self, self._core.next_id() if name is None else name, lease_s)

    def is_connected(self, endpoint: str) -> bool:
        """True if a worker is connected, or hung for less than three heartbeats."""
        self._bind()
        self._core.check_known(endpoint)
        self._core.read_replies(endpoint)
        return self._core.connections[endpoint].can_send

    async def close(self) -> None:
        """Like `RolloutClient.close`."""
        self._core.close()
        await asyncio.to_thread(self._core.term)

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            await self.close()

    def _answer(self, begin: Callable[[], ClientCall], stream: StreamKind | Literal[False]) -> Any:
        return Answer(self._answered(begin, stream))

    async def _answered(self, begin: Callable[[], ClientCall], stream: StreamKind | Literal[False]) -> Any:
        self._bind()
        call = begin()
        return AsyncStream(self, call, stream) if stream else await self._run(calls.finish, call)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _prepare_to_wait(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise RuntimeError("this client belongs to another event loop; make one for each loop")
        self._loop = loop
        self._core.on_unread = lambda endpoint: loop.call_soon(self._core.read_replies, endpoint)
        self._core.on_newcomers = lambda seconds: loop.call_later(seconds, self._core.ask_newcomers)
        self._core.on_closing = self._unwatch
        self._core.on_opened = self._watch
        for endpoint in self._core.connections:
            self._watch(endpoint)

    def _watch(self, endpoint: str) -> None:
        assert self._loop is not None
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._loop.add_reader(socket.get(zmq.FD), self._core.read_replies, endpoint)
        self._loop.call_soon(self._core.read_replies, endpoint)

    def _unwatch(self, endpoint: str) -> None:
        assert self._loop is not None
        connection = self._core.connections[endpoint]
        for socket in (connection.socket, connection.monitor):
            self._loop.remove_reader(socket.get(zmq.FD))

    async def _run(self, call: Call[_Params, _Value], /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Value:
        """Make a call and wait for its value."""
        self._bind()
        changed = asyncio.Event()
        with closing(call(self._core, changed.set, *args, **kwargs)) as waits:
            while True:
                try:
                    wait_s = next(waits)
                except StopIteration as stop:
                    return stop.value
                await _changed(changed, wait_s)

    async def _settle(self, plans: list, max_in_flight: int) -> AsyncGenerator[Settled, None]:
        self._bind()
        changed = asyncio.Event()
        with closing(settle_all(self._core, changed.set, plans, max_in_flight)) as steps:
            for step in steps:
                if isinstance(step, Settled):
                    yield step
                else:
                    await _changed(changed, step)


class Answer(ProcessBound, Coroutine[Any, Any, _Value]):
    """The coroutine of `generate` and `attach`. `async for` over it raises an error that names the missing `await`."""

    _instead = MAKE_CLIENTS

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__name__ = self.__qualname__ = "request"

    def __await__(self) -> Generator[Any, Any, _Value]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Continue; asyncio calls this."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Continue with an exception; asyncio calls this."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End the coroutine."""
        self._coroutine.close()

    def __aiter__(self) -> NoReturn:
        self.close()
        raise TypeError(
            "this is a coroutine: await it before you iterate, as in "
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
    """A stream for one task. A cancelled `anext` loses nothing."""

    _client: AsyncRolloutClient

    def __aiter__(self) -> AsyncIterator[_Item]:
        return self

    async def __anext__(self) -> _Item:
        chunk = await self._client._run(calls.next_chunk, self._call, keep=True)
        if chunk is None:
            raise StopAsyncIteration
        return self._item(chunk)

    async def arrived(self) -> list[Chunk]:
        """All new tokens, a chunk for each completion. Empty at the end."""
        chunk = await self._client._run(calls.next_chunk, self._call, keep=True)
        if chunk is None or not self._call.chunks:
            return [] if chunk is None else [chunk]
        chunks = [chunk, *self._call.chunks]
        self._call.chunks.clear()
        return join_chunks(chunks)

    async def wait(self) -> GenerateResult:
        """Like `Stream.wait`."""
        return await self._client._run(calls.finish, self._call)

    async def cancel(self) -> None:
        """Like `Stream.cancel`."""
        await self._client._run(calls.end_stream, self._call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            self.close()


class AsyncSession(SessionView):
    """Like `Session`."""

    _client: AsyncRolloutClient

    async def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> GenerateResult:
        """Like `Session.generate`."""
        return await self._client.generate(prompt, **self._turn(fields))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            self.end()
