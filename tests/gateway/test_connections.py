"""Connections of clients between their requests: how long they stay, and which one goes when there are too many."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.http.client_connections import IN_USE_S
from rollout_gateway.serve import uvicorn_config
from tests.support.gateway.harness import served
from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import until

#: Far above what a client's pool waits, and what a test takes.
LONG_S = 3600.0
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@contextlib.contextmanager
def serving(in_use_s: float = IN_USE_S, **limits: Any) -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """A server with a gateway's connections; what it answers does not matter."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await PlainTextResponse("well")(scope, receive, send)

    settings = GatewaySettings(endpoints=("tcp://127.0.0.1:1",), **limits)
    app = Starlette(routes=[Mount("/", answer)])
    with served(uvicorn_config(settings, app, grace_s=1, in_use_s=in_use_s)) as found:
        yield found


def ask(client: socket.socket) -> bytes:
    """The answer to one request on a connection; empty if the server has closed it."""
    client.settimeout(PATIENCE_S)
    client.sendall(GET)
    got = b""
    while not got.endswith(b"well") and (more := client.recv(4096)):
        got += more
    return got


def test_an_idle_connection_outlives_the_limits_of_a_request_in_the_making() -> None:
    with serving(body_s=0.2, send_s=0.2, keep_alive_s=LONG_S) as (_, address):
        silent, used = socket.create_connection(address), socket.create_connection(address)
        with silent, used:
            assert ask(used)
            time.sleep(1.0)  # five times the limits
            assert ask(used) and ask(silent)


def test_an_idle_connection_is_closed_after_its_time() -> None:
    with serving(keep_alive_s=0.3) as (_, address):
        silent, used = socket.create_connection(address), socket.create_connection(address)
        with silent, used:
            assert ask(used)
            assert used.recv(1) == b"" and silent.recv(1) == b""


def test_no_request_of_a_pool_is_lost_after_a_rest() -> None:
    """A rest longer than the limits of a request in the making, and one as long as uvicorn keeps idle connections."""

    async def twice(address: tuple[str, int], rest_s: float) -> list[int]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=LONG_S)
        url = f"http://{address[0]}:{address[1]}/"
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as client:
            first = await asyncio.gather(*(client.get(url) for _ in range(50)))
            await asyncio.sleep(rest_s)
            second = await asyncio.gather(*(client.get(url) for _ in range(50)))
        return [each.status_code for each in (*first, *second)]

    with serving(body_s=2.0, send_s=2.0) as (_, address):  # fifty requests at once take a while on a busy machine
        for rest_s in (2.5, 4.98):
            assert asyncio.run(twice(address, rest_s)) == [200] * 100


def test_the_connection_that_is_idle_for_the_longest_makes_room() -> None:
    with serving(in_use_s=0.2, max_connections=3) as (server, address), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        begins, longest, shortest = clients
        assert ask(longest) and ask(shortest)
        begins.sendall(GET[:9])  # a request is on its way
        until(lambda: len(server.server_state.connections) == 3, "the connections")
        time.sleep(0.3)
        fourth = stack.enter_context(socket.create_connection(address))
        assert ask(fourth).startswith(b"HTTP/1.1 200")
        assert longest.recv(1) == b"" and ask(shortest) and ask(fourth)
        begins.sendall(GET[9:])
        assert begins.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_connection_that_was_just_used_makes_no_room() -> None:
    with serving(max_connections=1) as (_, address), socket.create_connection(address) as used:
        assert ask(used)
        with socket.create_connection(address) as another:
            assert another.recv(4096).startswith(b"HTTP/1.1 503")
        assert ask(used)


def test_the_system_asks_silent_clients_whether_they_are_there() -> None:
    with serving() as (server, address), socket.create_connection(address) as client:
        assert ask(client)
        (accepted,) = server.server_state.connections
        ours = accepted.transport.get_extra_info("socket")  # type: ignore[attr-defined]
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert 0 < ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 120
