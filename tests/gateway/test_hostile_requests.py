"""Hostile requests do not disturb the requests of others."""

import contextlib
import gzip
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_gateway.endpoints import ENDPOINTS
from rollout_gateway.http.bodies import Query
from scripts.check.fuzz_gateway import batter
from tests.support.gateway.harness import bystand, gateway, refused
from tests.support.gateway.hostile import RAW
from tests.support.worker.harness import launch, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import TooLarge


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


#: Requests that are larger for a worker than its limit: a little, and so much that it would cut the connection.
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [3] * 30_000}),
    ("/v1/completions", {"prompt": [3] * 200_000}),
    ("/v1/completions", {"prompt": [3] * 200_000, "stream": True}),
    ("/v1/completions", {"prompt": [[3], [3] * 200_000]}),
    ("/v1/completions", {"prompt": "17:", "stop": "x" * 300_000}),
    ("/v1/completions", {"prompt": "17:", "logit_bias": {str(token): 1 for token in range(30_000)}}),
    ("/v1/completions", {"prompt": "17:", "structured_outputs": {"regex": "x" * 300_000}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1" * 60_000}]}),
    ("/v1/responses", {"input": "1" * 60_000}),
    ("/v1/messages", {"model": "ones", "max_tokens": 1, "messages": [{"role": "user", "content": "1" * 60_000}]}),
    ("/inference/v1/generate", {"token_ids": [3] * 200_000, "sampling_params": {}}),
    ("/generate", {"input_ids": [3] * 200_000}),
    ("/generate", {"input_ids": [3] * 200_000, "stream": True}),
]


def test_a_request_that_is_too_large_for_a_worker_disturbs_no_other_one(tmp_path: Path) -> None:
    with (
        launch(log=tmp_path / "log", max_message_bytes=100_000) as worker,
        gateway([worker.endpoint]) as plain,
        gateway([worker.endpoint], resume=True) as resuming,
        RolloutClient(worker.endpoint) as direct,
        RolloutClient(worker.endpoint, resume=True) as resumed,
    ):
        direct.pause()
        running = [
            client.generate("995:", max_tokens=12, return_text=True, stream="tokens") for client in (direct, resumed)
        ]
        for path, body in LARGE:
            for client in (plain, resuming):
                answer = client.post(path, json=body)
                assert answer.status_code == 413, answer.text
                assert "service.max_message_bytes" in answer.json()["error"]["message"]
        for owner in (direct, resumed):
            owner.status()
            with pytest.raises(TooLarge):
                owner.generate([3] * 200_000)
            with pytest.raises(TooLarge):
                owner.generate([3] * 200_000, stream="tokens").wait()
        direct.resume()
        for owner in (direct, resumed):
            requests = [{"prompt": "995:"}, {"prompt": [3] * 200_000}]
            found = {each.index: each for each in owner.generate_as_completed(requests, max_tokens=1)}
            assert isinstance(found[1].error, TooLarge) and found[0].error is None
        assert [stream.wait().completions[0].text for stream in running] == [" 996 997 998"] * 2
        for client in (plain, resuming):
            bystand(client)


def test_a_compressed_body_is_refused(client: httpx.Client) -> None:
    data = gzip.compress(b'{"prompt": "17:", "max_tokens": 1}')
    for encoding, body in (("gzip", data), ("zstd", data), ("br", b"{}"), ("identity, gzip", data)):
        answer = client.post("/v1/completions", content=body, headers={"Content-Encoding": encoding})
        assert answer.status_code == 415 and answer.json()["error"]["param"] == "Content-Encoding"
    plain = client.post("/generate", json={"text": "17:"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "x\\uD83Dx", "\\ude00\\ud83d"])
@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"prompt": "HALF"}', "prompt"),
        ('{"HALF": "HALF"}', None),
        ('{"prompt": ["a", "HALF"]}', "prompt.1"),
        ('{"messages": [{"role": "user", "content": [{"text": "HALF"}]}]}', "messages.0.content.0.text"),
        ('{"metadata": {"HALF": 1}}', "metadata"),
        ('"HALF"', None),
        ('[["HALF"]]', "0.0"),
    ],
)
def test_half_a_surrogate_pair_is_named(client: httpx.Client, half: str, text: str, field: str | None) -> None:
    """OpenAI and Anthropic refuse such a body, too."""
    paths = sorted({row.path for row in ENDPOINTS if row.takes and not issubclass(row.takes, Query)})
    for path in paths:
        answer = client.post(path, content=text.replace("HALF", half))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == field and "surrogate" in error["message"]


def test_a_whole_surrogate_pair_is_a_character(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content='{"prompt": "\\ud83d\\ude00", "max_tokens": 1, "echo": true}')
    assert answer.status_code == 200, answer.text


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
