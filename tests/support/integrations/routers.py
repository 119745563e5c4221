"""Stock HTTP routers in processes of their own."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.worker.harness import subprocess_environment, until


@contextmanager
def process(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of the block."""
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=subprocess_environment()
        ) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def router(package: str, policy: str, servers: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a `vllm_router` or `sglang_router` in front of some servers."""
    port = free_port()
    arguments = ("--host", "127.0.0.1", "--port", str(port), "--policy", policy)
    watch = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
    metrics = ("--prometheus-port", str(free_port()))
    command = ("-m", f"{package}.launch_router", *arguments, *watch, *metrics, "--worker-urls", *servers)
    with process(*command, log=folder / "router.log"):
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url + "/health"), "the router", PATIENCE_S)
        yield url


def answers(url: str) -> bool:
    """Whether a GET is answered with status 200."""
    try:
        return bool(httpx.get(url, timeout=5.0).status_code == 200)
    except httpx.TransportError:
        return False
