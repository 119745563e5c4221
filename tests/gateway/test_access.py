"""Who may use a gateway, and `rollout gateway` as a process."""

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from rollout.cli.main import main
from rollout.config.gateway_settings import GatewaySettings
from rollout_gateway.http.access import read_keys
from tests.support.gateway.harness import gateway
from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import rollout, subprocess_environment, until
from trainer_bridge.client.launch import WorkerProcess

TOKEN = "0123456789abcdef"


def test_requests_need_one_of_the_tokens(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint], keys=(b"f" * 16, TOKEN.encode())) as client:
        for headers in (
            {},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer " + "0" * 16},
            {"Authorization": "Bearer"},
        ):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert client.post("/pause", headers=headers).status_code == 401
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/health").status_code == 200


def test_web_pages_may_not_use_a_gateway_without_tokens(client: httpx.Client) -> None:
    assert client.post("/pause", headers={"Origin": "https://example.org"}).status_code == 403
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_addresses_of_other_hosts_need_tokens(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{TOKEN}\n")
    assert read_keys(str(keys), "0.0.0.0") == (TOKEN.encode(),)
    assert read_keys(None, "127.0.0.1") == read_keys(None, "::1") == read_keys(None, "localhost") == ()
    for host in ("0.0.0.0", "::", "10.0.0.3", "example.org"):
        with pytest.raises(ValueError, match="api-key-file"):
            read_keys(None, host)
    for text in ("", "short"):
        keys.write_text(text)
        with pytest.raises(ValueError, match="api-key-file"):
            read_keys(str(keys), "127.0.0.1")


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"endpoints": ()}, {"stream_every": 0}, {"send_s": 0.0}])
def test_settings_that_cannot_work_are_errors(wrong: dict) -> None:
    with pytest.raises(ValueError, match="port|ENDPOINT|stream_every|send_s"):
        GatewaySettings(**{"endpoints": ("tcp://127.0.0.1:1",)} | wrong)


def test_the_command_serves_until_it_is_told_to_end(worker: WorkerProcess, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = rollout(
        "gateway", worker.endpoint, "--port", "0", "--ready-file", str(ready), "--served-model-name", "m", "n"
    )
    with subprocess.Popen(command, env=subprocess_environment(), stdout=subprocess.DEVNULL) as process:
        until(ready.exists, "the gateway", PATIENCE_S)
        url = json.loads(ready.read_text())["url"]
        assert [card["id"] for card in httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]] == ["m", "n"]
        body = {"model": "n", "prompt": "17:", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.json()["choices"][0]["text"] == " 18"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not ready.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--host", "0.0.0.0"), "--api-key-file"), (("--prot", "1"), "--port"), (("--logprobs", "all"), "--logprobs")],
)
def test_wrong_flags_are_one_line(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "tcp://127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1
