"""Fixtures of whole workers: `first_worker` of all tests, and a second one; each test leaves them idle."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker.harness import assert_idle, launch, launch_shared
from tests.support.worker.lost_ranks import Points
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess


@pytest.fixture(scope="session")
def second_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """It is for tests that publish other weights."""
    with launch_shared(tmp_path_factory.mktemp("workers") / "second.log") as worker:
        yield worker


@pytest.fixture(scope="session")
def workers(first_worker: WorkerProcess, second_worker: WorkerProcess) -> tuple[WorkerProcess, WorkerProcess]:
    """Both."""
    return first_worker, second_worker


@pytest.fixture
def worker(first_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """The first worker, which must be idle again when the test is over."""
    yield first_worker
    assert_idle(first_worker)


@pytest.fixture(scope="session")
def ledger() -> dict[int, int]:
    """The step that each version of the second worker's weights counts in; a test that publishes adds its version."""
    return {0: 1}


@pytest.fixture
def weights_worker(second_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """The second worker, which must be idle again when the test is over."""
    yield second_worker
    assert_idle(second_worker)


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    """A client of the first worker."""
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        yield client


@pytest.fixture
def raw(worker: WorkerProcess) -> Iterator[RawClient]:
    """A DEALER socket to the first worker."""
    with RawClient(worker.endpoint) as client:
        yield client


@pytest.fixture
def points(tmp_path: Path) -> Points:
    """Where followers of a worker with this environment can be made to stand."""
    folder = tmp_path / "points"
    folder.mkdir()
    return Points(folder)


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts a worker of several ranks, for one test: each test ends it."""
    started: list[WorkerProcess] = []

    def start_one(**flags: Any) -> WorkerProcess:
        kept = {"tensor_parallel": 2, "device": "cpu", "max_rows": 8, "max_context_tokens": 32_768}
        started.append(launch(log=tmp_path / "worker.log", **kept | flags))
        return started[-1]

    yield start_one
    for worker in started:
        worker.kill()
