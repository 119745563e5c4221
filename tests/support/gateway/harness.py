"""A gateway in a thread of the test's process, and its clients."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.app import make_app
from rollout_gateway.serve import uvicorn_config, worker_client
from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import until
from trainer_bridge.client.asynchronous import AsyncRolloutClient


@contextmanager
def gateway(endpoints: Sequence[str], keys: tuple[bytes, ...] = (), **settings: Any) -> Iterator[httpx.Client]:
    """A client of a gateway that serves these workers for the time of the block."""
    given = GatewaySettings(endpoints=tuple(endpoints), **settings)

    def pool() -> AsyncRolloutClient:
        return worker_client(given)

    with (
        served(uvicorn_config(given, make_app(given, keys, pool), grace_s=1)) as (_, (host, port)),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=PATIENCE_S) as client,
    ):
        yield client


@contextmanager
def served(config: uvicorn.Config) -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """A server in a thread, and its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the gateway")
        assert thread.is_alive(), "the gateway did not start"
        yield server, listening.getsockname()
    finally:
        server.should_exit = True
        thread.join()


def meet_by_gloo(patch: pytest.MonkeyPatch) -> None:
    """Have gloo in the place of NCCL: only the meeting is changed, on its way from a gateway here to its workers."""
    control = AsyncRolloutClient.control

    async def by_gloo(pool: AsyncRolloutClient, op: str, **fields: Any) -> list[dict[str, Any]]:
        if fields.get("action") == "join":
            fields["meeting"] |= {"kind": "torch", "backend": "gloo"}
        return await control(pool, op, **fields)

    patch.setattr(AsyncRolloutClient, "control", by_gloo)


def post(client: httpx.Client, path: str, body: Any = None, **options: Any) -> Any:
    """The JSON of an answer with status 200."""
    answer = client.post(path, json=body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text


def bystand(client: httpx.Client) -> None:
    """A request whose tokens are known."""
    body = {"prompt": "995:", "max_tokens": 12}
    assert post(client, "/v1/completions", body)["choices"][0]["text"] == " 996 997 998"


def refused(client: httpx.Client, path: str, body: Any, status: int = 400, **options: Any) -> str | None:
    """The field that an error names; the answer must be an error with this status, in OpenAI's form."""
    answer = client.post(path, json=body, **options)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] and error["code"] == status
    return error["param"]


def events(client: httpx.Client, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """All events of a stream, which must end with [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}, **options) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
