"""One worker and one gateway for all tests here; each test leaves the worker idle, counting in ones."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.harness import gateway
from tests.support.worker.harness import CHECKPOINTS, assert_idle, launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

CONTEXT = 512


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which the worker reads adapters."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[tuple[WorkerProcess, httpx.Client]]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    flags = {"max_rows": 8, "max_queue": 64, "max_context_tokens": CONTEXT, "sleep": True}
    adapted = {"adapter_slots": 1, "adapter_rank": 4, "adapter_root": str(adapters)}
    with (
        launch(log=log, **flags, **adapted) as worker,
        gateway([worker.endpoint], served_model_name=("ones",), weights_root=str(CHECKPOINTS)) as client,
    ):
        yield worker, client


@pytest.fixture
def worker(started: tuple[WorkerProcess, httpx.Client]) -> Iterator[WorkerProcess]:
    """The worker, which must be idle again when the test is over."""
    yield started[0]
    assert_idle(started[0])


@pytest.fixture
def client(started: tuple[WorkerProcess, httpx.Client], worker: WorkerProcess) -> httpx.Client:
    """A client of the gateway."""
    return started[1]


@pytest.fixture
def direct(worker: WorkerProcess) -> Iterator[RolloutClient]:
    """A client of the worker itself: what it says is true."""
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        yield client
