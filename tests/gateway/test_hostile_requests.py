"""Hostile requests do not disturb the requests of others."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import httpx
import pytest

from scripts.check.fuzz_gateway import batter
from tests.support.gateway.harness import bystand, gateway, refused
from tests.support.gateway.hostile import RAW
from tests.support.worker.harness import until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess


def test_mutated_requests(client: httpx.Client) -> None:
    batter(client, 1, 150)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_mutated_requests(client: httpx.Client, seed: int) -> None:
    batter(client, seed, 10_000)


def test_bytes_that_are_no_request(client: httpx.Client) -> None:
    address = (client.base_url.host, client.base_url.port)
    with contextlib.ExitStack() as stack:
        for data in RAW * 10:
            connection = stack.enter_context(socket.create_connection(address))
            with contextlib.suppress(OSError):
                connection.sendall(data)
        bystand(client)


def test_bodies_that_are_too_large_or_too_slow(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint], max_body_bytes=2000) as small:
        assert refused(small, "/v1/completions", {"prompt": "1" * 3000}, 413) is None
        assert small.post("/generate", content=(b"x" * 100 for _ in range(50))).status_code == 413
        bystand(small)
    with gateway([worker.endpoint], body_s=2.0) as short:
        with socket.create_connection((short.base_url.host, short.base_url.port)) as slow:
            slow.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            slow.settimeout(60)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        bystand(short)


def test_a_reader_that_stops_is_cut_off(worker: WorkerProcess, direct: RolloutClient) -> None:
    body: dict[str, Any] = {"prompt": "17:", "stream": True, "ignore_eos": True, "n": 8, "logprobs": 5}
    data = json.dumps(body).encode()
    with gateway([worker.endpoint], send_s=2.0) as client, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((client.base_url.host, client.base_url.port))
        direct.pause()  # the rows may end sooner than anybody looks
        reader.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        until(lambda: direct.status()["queue"]["waiting"] == 8, "the rows")
        direct.resume()
        until(lambda: sum((direct.status()["queue"]["waiting"], direct.status()["rows"]["running"])) == 0, "their end")
        bystand(client)
        until(lambda: "in_flight 0" in client.get("/metrics").text, "the end of the stream")
