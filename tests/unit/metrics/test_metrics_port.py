"""The metrics port: its paths, and what `/health` answers."""

import socket
from collections.abc import Iterator

import pytest

from rollout.metrics.prometheus import Health, PrometheusSink
from tests.support.http_page import get


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def base(health: Health) -> Iterator[str]:
    sink = PrometheusSink("127.0.0.1", 0, "a model", health)
    yield sink.url.removesuffix("/metrics")
    sink.close()


def test_health_is_503_with_the_reason_until_the_worker_serves(base: str, health: Health):
    status, text = get(f"{base}/health")
    assert status == 503 and "starting" in text
    reason = ""
    health.watch(lambda: reason)
    assert get(f"{base}/health") == (200, "serving\n")
    reason = "generation is paused"
    assert get(f"{base}/health?probe=1") == (503, "generation is paused\n")
    reason = ""
    assert get(f"{base}/health")[0] == 200


def test_before_the_first_report_the_page_has_only_the_model(base: str):
    status, text = get(f"{base}/metrics")
    assert status == 200
    assert [line for line in text.splitlines() if line[0] != "#"] == ['rollout_worker_info{model="a model"} 1.0']


def test_another_path_is_not_found_and_says_which_there_are(base: str):
    status, text = get(f"{base}/status")
    assert status == 404 and "/metrics" in text and "/health" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_a_taken_port_is_an_error_that_names_the_setting(host: str, health: Health):
    try:
        first = PrometheusSink(host, 0, "m", health)
    except ValueError:
        pytest.skip("this machine has no IPv6")
    port = int(first.url.rpartition(":")[2].removesuffix("/metrics"))
    try:
        with pytest.raises(ValueError, match="metrics_port"):
            PrometheusSink(host, port, "m", health)
    finally:
        first.close()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((host.strip("[]"), port))  # closing the sink frees the port
