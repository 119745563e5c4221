"""Streams before their first event: a client learns at once that its request is refused, and soon that it waits."""

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import CONTEXT
from tests.support.gateway.harness import bystand, refused
from tests.support.worker.harness import token_ids, until
from trainer_bridge.client.blocking import RolloutClient

IDS = token_ids("17:")
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": IDS, "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "17"}], "max_tokens": 6},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {"max_tokens": 6}},
    "/generate": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 6}},
}
#: What only the worker refuses.
REFUSED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": IDS * CONTEXT},
    "/inference/v1/generate": {"token_ids": IDS * CONTEXT},
    "/generate": {"input_ids": IDS * CONTEXT},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_that_waits_has_its_headers(client: httpx.Client, direct: RolloutClient, path: str) -> None:
    direct.pause()
    with client.stream("POST", path, json=REQUESTS[path] | {"stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        until(lambda: direct.status()["queue"]["waiting"] == 1, "the request, which has no token yet")
        direct.resume()
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 1


@pytest.mark.parametrize("path", REFUSED)
def test_a_stream_that_a_worker_refuses_has_its_status(client: httpx.Client, direct: RolloutClient, path: str) -> None:
    direct.pause()
    refused(client, path, REFUSED[path] | {"stream": True}, 400)
    direct.resume()
    bystand(client)


def test_a_client_that_leaves_a_stream_that_waits_ends_it(client: httpx.Client, direct: RolloutClient) -> None:
    direct.pause()
    with client.stream("POST", "/v1/completions", json=REQUESTS["/v1/completions"] | {"stream": True}) as answer:
        assert answer.status_code == 200
    until(lambda: direct.status()["queue"]["waiting"] == 0, "the end of the request")
    direct.resume()


def test_a_stream_that_is_aborted_while_it_waits_says_so(client: httpx.Client, direct: RolloutClient) -> None:
    direct.pause()
    body = REQUESTS["/v1/completions"] | {"stream": True, "request_id": "waits"}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert client.post("/abort_requests", json={"request_ids": ["waits"]}).json() == {"aborted": 1}
        lines = [line for line in answer.iter_lines() if line]
    assert '"finish_reason":"abort"' in lines[0].replace(" ", "")
    direct.resume()
