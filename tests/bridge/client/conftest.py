"""Fixtures: either client (`connect`), and servers that follow a script (`serve`)."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.bridge.client_script import TIMEOUT_S, SetClock
from tests.support.bridge.scripted_worker import ScriptedWorker, counting
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient


class FromAsync:
    """An asyncio client (or stream) with the methods of the blocking one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inner: Any) -> None:
        self._loop, self._inner = loop, inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return (lambda *args, **more: self._settle(value(*args, **more))) if callable(value) else value

    def _settle(self, value: Any) -> Any:
        if asyncio.iscoroutine(value):
            value = self._loop.run_until_complete(value)
        return FromAsync(self._loop, value) if hasattr(value, "__anext__") else value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(anext(self._inner))
        except StopAsyncIteration:
            raise StopIteration from None


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    clients: list[Any] = []
    loop = asyncio.new_event_loop()

    def make(*endpoints: str, **settings: Any) -> Any:
        settings = {"timeout_s": TIMEOUT_S, **settings}
        if request.param == "blocking":
            client: Any = RolloutClient(endpoints, **settings)
        else:
            client = FromAsync(loop, AsyncRolloutClient(endpoints, **settings))
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    loop.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedWorker]]:
    workers: list[ScriptedWorker] = []

    def make(handler: Any = counting, **settings: Any) -> ScriptedWorker:
        workers.append(ScriptedWorker(handler, **settings))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Set the wall clock forward by some seconds, or back."""
    wall = time.time
    return lambda seconds: monkeypatch.setattr(time, "time", lambda: wall() + seconds)
