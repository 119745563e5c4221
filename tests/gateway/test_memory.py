"""A gateway's memory and its requests after floods: what hostile clients hold is given back."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.serve import uvicorn_config
from tests.support.gateway.harness import bystand, gateway, served
from tests.support.gateway.hostile import RAW
from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import rollout, subprocess_environment, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

WARM, MEASURED, CONNECTIONS, READERS = 2, 3, 300, 30
MAX_GROWTH_BYTES = 16 << 20


class Gateway:
    """A gateway in a process of its own."""

    def __init__(self, pid: int, url: str) -> None:
        self.folder = Path(f"/proc/{pid}")
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self.address = (self.client.base_url.host, self.client.base_url.port)

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        return int((self.folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        """Open sockets and files."""
        return len(list((self.folder / "fd").iterdir()))

    def connect(self, data: bytes) -> socket.socket:
        """A connection whose client reads nothing, after these bytes."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(self.address)
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection


@pytest.fixture
def process(worker: WorkerProcess, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with short limits."""
    ready, limits = tmp_path / "ready.json", ("--body-s", "2", "--send-s", "2")
    command = rollout("gateway", worker.endpoint, "--port", "0", "--ready-file", str(ready), *limits)
    with subprocess.Popen(command, env=subprocess_environment(), stdout=subprocess.DEVNULL) as started:
        try:
            until(ready.exists, "the gateway", PATIENCE_S)
            yield Gateway(started.pid, json.loads(ready.read_text())["url"])
        finally:
            started.terminate()


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def flood(gateway: Gateway) -> None:
    """Half requests, hung bodies, and readers that stop, while a bystander gets its tokens."""
    long = {"prompt": "17:", "ignore_eos": True, "n": 2, "logprobs": 5}
    hung = request("/generate", {"text": "1" * 100_000})[:-1]
    with contextlib.ExitStack() as stack:
        for number in range(CONNECTIONS):
            data = (*RAW, hung, b"POST /v1/comp")[number % (len(RAW) + 2)]
            stack.enter_context(gateway.connect(data))
            if number % (CONNECTIONS // READERS) == 0:
                stack.enter_context(gateway.connect(request("/v1/completions", long | {"stream": number % 20 == 0})))
        bystand(gateway.client)
        until(lambda: gateway.descriptors < CONNECTIONS // 2, "the gateway to cut the connections off", PATIENCE_S)
        bystand(gateway.client)


@pytest.mark.nightly
def test_floods_leave_no_memory_no_connections_and_no_requests(process: Gateway, direct: RolloutClient) -> None:
    bystand(process.client)
    descriptors = process.descriptors
    memory = []
    for _ in range(WARM + MEASURED):
        flood(process)
        until(lambda: "rollout_gateway_in_flight 0" in process.client.get("/metrics").text, "the requests to end")
        until(lambda: direct.status()["rows"]["running"] + direct.status()["queue"]["waiting"] == 0, "the rows to end")
        until(lambda: process.descriptors <= descriptors + 2, "the connections to end", PATIENCE_S)
        memory.append(process.memory_bytes)
    assert memory[-1] - memory[WARM - 1] < MAX_GROWTH_BYTES, memory


def test_connections_that_wait_for_their_client_are_cut_off() -> None:
    """Half a head, a head that does not end, and a whole answer that is not read. What is served does not matter."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Response(b"x" * (16 << 20))(scope, receive, send)

    class Seen(set[Any]):
        """The connections, and how many there were: one may be over before anybody looks."""

        count = 0

        def add(self, connection: Any) -> None:
            self.count += 1
            super().add(connection)

    settings = GatewaySettings(endpoints=("tcp://127.0.0.1:1",), body_s=0.3, send_s=0.3)
    with served(uvicorn_config(settings, Starlette(routes=[Mount("/", answer)]), grace_s=1)) as (server, address):
        server.server_state.connections = seen = Seen()
        for count, data in enumerate((b"GET /hea", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), 1):
            with socket.socket() as waiting:
                waiting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                waiting.connect(address)
                waiting.sendall(data)
                until(lambda count=count: seen.count == count, "the connection")
                until(lambda: not seen, "its end")
        with socket.create_connection(address) as endless, pytest.raises(OSError):
            endless.settimeout(PATIENCE_S)
            while True:
                endless.sendall(b"X-a: b\r\n" * 10_000)


def test_a_connection_too_many_is_told_so(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint], max_connections=2) as client, contextlib.ExitStack() as stack:
        bystand(client)
        address = (client.base_url.host, client.base_url.port)
        held = stack.enter_context(socket.create_connection(address))
        held.sendall(b"GET /hea")
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE_S) as another:
            until(lambda: another.get("/ping").status_code == 503, "the limit")
            answer = another.post("/v1/completions", json={"prompt": "17:"})
            assert answer.status_code == 503 and "--max-connections" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
        bystand(client)
        held.close()

        def fits() -> bool:
            with httpx.Client(base_url=client.base_url, timeout=PATIENCE_S) as later:
                return later.get("/ping").status_code == 200

        until(fits, "room for another connection")
