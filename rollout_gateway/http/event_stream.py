"""Answers in JSON and as server-sent events, whose work ends when the client leaves.

A client may leave at any time, also before its first token. A client that reads nothing for `send_s` seconds is cut
off, so that unread events cannot fill the memory.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_gateway.http.http_errors import HttpError, http_error
from rollout_gateway.http.json_text import json_text

log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: Seconds after which the headers of a stream are sent, if there is neither an event nor an error.
HEADERS_S = 1.0
_DONE = b"data: [DONE]\n\n"


class ClientGone(HttpError):  # noqa: N818 -- the gateway made no error
    """The client has left. The error is not sent."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left")


def json_answer(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_text(value), headers=headers, media_type="application/json")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T], *ends: Coroutine[Any, Any, None]) -> _T:
    """The result of `work`. Raises `ClientGone` if the client leaves first, or one of `ends` returns first."""
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(each) for each in (_left(receive), *ends)]
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, *others):
            each.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class NamedEvents:
    """Events whose field `type` is also their name, without `[DONE]`. `failed`: the event of an error."""

    events: AsyncGenerator[dict[str, Any], None]
    failed: Callable[[HttpError], dict[str, Any]]


class EventStream(Response):
    """Server-sent events: the values of a generator as JSON, and `[DONE]` at the end; or named events.

    A worker that refuses a request does so at once. So an error within `HEADERS_S` is an ordinary error, with its
    status. After that time, or with the first event, the headers are sent: the client knows that its request waits. A
    later error is an event with OpenAI's error body, and the stream ends without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[Any, None] | NamedEvents, send_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._named = isinstance(source, NamedEvents)
        self._events = source.events if isinstance(source, NamedEvents) else source
        self._failed = source.failed if isinstance(source, NamedEvents) else HttpError.body
        self._send_s = send_s
        self._sending_since: float | None = None  # the loop's time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, until it ends or the client has left."""
        try:
            await unless_gone(receive, self._run(send), self._unread())
        except ClientGone:
            pass  # the client has left
        finally:
            await self._events.aclose()

    async def _run(self, send: Send) -> None:
        first = asyncio.ensure_future(anext(self._events, None))
        try:
            await asyncio.wait([first], timeout=HEADERS_S)
            if first.done():
                first.result()  # raises
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send, first)
        finally:
            first.cancel()
            await asyncio.wait([first])  # a running generator cannot be closed

    async def _send_events(self, send: Send, first: asyncio.Future[Any]) -> None:
        try:
            event = await first
            while event is not None:
                await self._send(send, self._event(event))
                event = await anext(self._events, None)
            if not self._named:
                await self._send(send, _body(_DONE))
        # The status is sent already, so every later error goes into the stream.
        except Exception as error:
            await self._send(send, self._event(self._failed(http_error(error))))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, event: Any) -> dict[str, Any]:
        name = f"event: {event['type']}\n" if self._named else ""
        return _body(f"{name}data: {json_text(event)}\n\n".encode())

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send(message)
        self._sending_since = None

    async def _unread(self) -> None:
        """Return once a message has waited for its reader for `send_s` seconds."""
        loop = asyncio.get_running_loop()
        while self._sending_since is None or loop.time() - self._sending_since < self._send_s:
            await asyncio.sleep(self._send_s / 4)
        log.warning("a client left its stream unread for %g s; it is cut off", self._send_s)


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def merged(sources: list[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """The values of several generators, as they come. The first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for value in only:
                yield value
        return
    ready: asyncio.Queue[tuple[_T | None, Exception | None]] = asyncio.Queue(maxsize=4 * len(sources))

    async def forward(source: AsyncGenerator[_T, None]) -> None:
        try:
            async for value in source:
                await ready.put((value, None))
            await ready.put((None, None))
        except Exception as error:
            await ready.put((None, error))

    tasks = [asyncio.ensure_future(forward(source)) for source in sources]
    running = len(tasks)
    try:
        while running:
            found, error = await ready.get()
            if error is not None:
                raise error
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()
