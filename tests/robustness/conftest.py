"""Fixtures of the entrances: a text codec for a server in this process, and one whole worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.service.text.codec import TextCodec
from tests.support.tokenizer_folder import make_tokenizer_folder
from tests.support.worker.harness import assert_idle, launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def started_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that counts in ones."""
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with launch(log=log, max_rows=8, max_queue=24, max_context_tokens=32_768) as worker:
        yield worker


@pytest.fixture
def worker(started_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """The worker, which must be idle again when the test is over."""
    yield started_worker
    assert_idle(started_worker)


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    """A client of the worker."""
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        yield client
