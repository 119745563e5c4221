"""`rollout status` of a gateway, with real workers behind it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from rollout.cli.main import main
from tests.gateway.conftest import CONTEXT
from tests.support.gateway.harness import gateway, post
from tests.support.ports import free_port
from tests.support.worker.harness import ONES, until
from trainer_bridge.client.launch import WorkerProcess

TOKEN = "0123456789abcdef"


def test_a_gateway_is_shown(client: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    post(client, "/v1/completions", {"prompt": "17:", "max_tokens": 3})
    url = str(client.base_url)
    assert main(["status", url, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["health"]["workers"] == 1 and status["health"]["unhealthy"] == {}
    assert (
        status["server_info"]["context_length"] == CONTEXT and status["server_info"]["workers"][0]["state"] == "serving"
    )
    assert status["counts"]["requests"] >= 1 and status["counts"]["in_flight"] == 0
    assert main(["status", url]) == 0
    assert f"{status['counts']['requests']} since" in capsys.readouterr().out
    assert main(["status", url, "--all"]) == 0
    assert "weight_transfer_config" in "".join(capsys.readouterr().out.split())


def test_a_lost_worker_is_named_with_the_reason(worker: WorkerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    lost = f"tcp://127.0.0.1:{free_port()}"
    with gateway([worker.endpoint, lost], model=str(ONES)) as client:
        until(lambda: list(client.get("/health").json().get("unhealthy", ())) == [lost], "one of two workers")
        addresses = [str(client.base_url), worker.endpoint]
        assert main(["status", *addresses, "--json", "--timeout-s", "60"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["endpoint"] == addresses[0] and list(first["health"]["unhealthy"]) == [lost]
    assert len(first["server_info"]["workers"]) == 1 and second["endpoint"] == worker.endpoint


def test_a_gateway_without_a_healthy_worker_answers_with_the_reason(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with gateway([worker.endpoint], model=str(ONES), min_version=1_000_000) as client:
        assert main(["status", str(client.base_url)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "unavailable" in shown and worker.endpoint in shown and "serving" in shown


def test_what_needs_a_token_is_shown_with_one(
    worker: WorkerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"{TOKEN}\nfedcba9876543210\n")
    wrong.write_text("0" * 16)
    with gateway([worker.endpoint], keys=(TOKEN.encode(),), model=str(ONES)) as client:
        url = str(client.base_url)
        for flags in ([], ["--api-key-file", str(wrong)]):
            assert main(["status", url, *flags, "--json"]) == 0
            status = json.loads(capsys.readouterr().out)
            assert status["health"]["workers"] == 1 and status["server_info"] is None and status["counts"] is None
            assert "--api-key-file" in status["missing"]
        assert main(["status", url, "--api-key-file", str(right), "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["server_info"]["workers"] and status["counts"] and "missing" not in status


class Other(BaseHTTPRequestHandler):
    """A server that is no gateway; it would send whoever asks elsewhere."""

    asked: list[str] = []

    def do_GET(self) -> None:  # noqa: N802
        self.asked.append(self.path)
        self.send_response(302 if self.path == "/moved/health" else 200)
        self.send_header("Location", "/health")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *arguments: object) -> None:
        pass


def test_another_server_is_not_taken_for_a_gateway_and_nothing_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        for address in (url, f"{url}/moved"):
            assert main(["status", address]) == 1
            error = capsys.readouterr().err
            assert url in error and error.count("\n") == 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert Other.asked == ["/health", "/moved/health"]
