"""Workers, gateways and clients that end or hang in the middle: all others know within 10 s, by OpenAI's error."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import bystand, gateway
from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import (
    CHECKPOINTS,
    TWOS,
    assert_idle,
    launch,
    rollout,
    subprocess_environment,
    token_ids,
    until,
)
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

KNOWN_S = 25.0  # 10 s on a machine with free cores; a client that waits for a time limit waits for 30 s
LONG = 480
LOST = (502, 503)
IDS = token_ids("17:")
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": IDS, "max_tokens": LONG, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "17"}], "max_tokens": 400, "ignore_eos": True},
    "/v1/messages": {"model": "ones", "messages": [{"role": "user", "content": "17"}], "max_tokens": LONG},
    "/v1/responses": {"input": "17", "max_output_tokens": LONG},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {"max_tokens": LONG, "ignore_eos": True}},
    "/generate": {"input_ids": IDS, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}},
}


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker that a test may kill or stop."""
    with launch(log=tmp_path / "log", max_rows=16, max_context_tokens=512) as worker:
        yield worker
        if worker.returncode is None:
            os.kill(worker.pid, signal.SIGCONT)


def error_of(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error that a request, or its stream, ends with."""
    answer = client.post(path, json=body)
    if answer.status_code == 200:
        last = [line for line in answer.text.splitlines() if line][-1]
        return json.loads(last.removeprefix("data: "))["error"]
    assert answer.status_code == answer.json()["error"]["code"]
    return answer.json()["error"]


def in_flight(client: httpx.Client, count: int) -> bool:
    return f"rollout_gateway_in_flight {count}\n" in client.get("/metrics").text


@contextlib.contextmanager
def waiting(client: httpx.Client, worker: WorkerProcess) -> Iterator[list[Future[dict[str, Any]]]]:
    """Requests of each kind, streamed and not, that have begun at a worker which is now paused."""
    with RolloutClient(worker.endpoint) as direct, ThreadPoolExecutor(len(REQUESTS) * 2) as threads:
        bodies = [(path, body | {"stream": stream}) for path, body in REQUESTS.items() for stream in (False, True)]
        direct.pause()
        sent = [threads.submit(error_of, client, path, body) for path, body in bodies]
        until(lambda: direct.status()["queue"]["waiting"] == len(sent), "the requests", PATIENCE_S)
        yield sent


def all_know(client: httpx.Client, sent: list[Future[dict[str, Any]]]) -> None:
    """Requests that wait, a new one, an order and an update end with an error; the gateway says that it is ill."""
    began = time.monotonic()
    for each in sent:
        error = each.result(PATIENCE_S)
        assert error["message"] and error["type"] and error["code"] in LOST, error
    assert time.monotonic() - began < KNOWN_S
    until(lambda: in_flight(client, 0), "the end of the requests")
    for path, body in (
        ("/v1/completions", REQUESTS["/v1/completions"]),
        ("/pause?mode=keep", {}),
        ("/update_weights", {"weight_dir": str(TWOS)}),
    ):
        began = time.monotonic()
        assert error_of(client, path, body)["code"] in LOST, path
        assert time.monotonic() - began < KNOWN_S, path
    until(lambda: client.get("/health").status_code == 503, "the gateway to say so", PATIENCE_S)


def test_a_killed_worker_is_known_to_all_clients(doomed: WorkerProcess) -> None:
    with gateway([doomed.endpoint], heartbeat_s=1.0, weights_root=str(CHECKPOINTS)) as client:
        with waiting(client, doomed) as sent:
            os.kill(doomed.pid, signal.SIGKILL)
            all_know(client, sent)


@pytest.mark.nightly
def test_a_worker_that_hangs_is_known_to_all_clients_and_used_again(doomed: WorkerProcess) -> None:
    with gateway([doomed.endpoint], weights_root=str(CHECKPOINTS)) as client:
        with waiting(client, doomed) as sent:
            os.kill(doomed.pid, signal.SIGSTOP)
            all_know(client, sent)
            os.kill(doomed.pid, signal.SIGCONT)
        until(lambda: client.get("/health").status_code == 200, "the worker", PATIENCE_S)
        until(lambda: client.post("/resume").status_code == 200, "the end of the pause", PATIENCE_S)
        bystand(client)
    assert_idle(doomed)


@pytest.mark.nightly
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_or_hangs_in_an_update(doomed: WorkerProcess, kill: signal.Signals) -> None:
    with gateway([doomed.endpoint], weights_root=str(CHECKPOINTS)) as client, ThreadPoolExecutor(1) as threads:
        bystand(client)
        for wait_s in (0.0, 0.02, 0.05):
            os.kill(doomed.pid, signal.SIGCONT)
            until(lambda: client.get("/health").status_code == 200, "the worker", PATIENCE_S)
            update = threads.submit(client.post, "/update_weights", json={"weight_dir": str(TWOS)})
            time.sleep(wait_s)  # any point of the update
            began = time.monotonic()
            os.kill(doomed.pid, kill)
            answer = update.result(PATIENCE_S)
            assert time.monotonic() - began < KNOWN_S
            late = (409,) if wait_s else ()  # the update before has come through after all
            assert answer.status_code == 200 or answer.json()["error"]["code"] in (*LOST, *late), answer.text
            if kill == signal.SIGKILL:
                return


@pytest.mark.nightly
def test_a_killed_gateway_leaves_nothing_at_the_worker(doomed: WorkerProcess, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = rollout("gateway", doomed.endpoint, "--port", "0", "--ready-file", str(ready))
    with subprocess.Popen(command, env=subprocess_environment(), stdout=subprocess.DEVNULL) as process:
        until(ready.exists, "the gateway", PATIENCE_S)
        url = json.loads(ready.read_text())["url"]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client, waiting(client, doomed) as sent:
            process.kill()
            began = time.monotonic()
            for each in sent:
                with pytest.raises(httpx.TransportError):
                    each.result(PATIENCE_S)
            assert time.monotonic() - began < KNOWN_S
    with RolloutClient(doomed.endpoint) as direct:
        direct.resume()
    assert_idle(doomed)


def test_clients_that_leave_at_any_point_leave_nothing(client: httpx.Client, direct: RolloutClient) -> None:
    host, port = client.base_url.host, client.base_url.port
    for path, body in REQUESTS.items():
        for stream in (False, True):
            data = json.dumps(body | {"stream": stream}).encode()
            head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
            for sent in (head[:20], head + data[:9], head + data):
                with socket.create_connection((host, port)) as leaving:
                    leaving.sendall(sent)
    until(lambda: in_flight(client, 0), "the requests to end", PATIENCE_S)
    until(lambda: direct.status()["rows"]["running"] == 0, "the rows", PATIENCE_S)
    bystand(client)
