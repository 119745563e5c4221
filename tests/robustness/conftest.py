"""Fixtures of the entrances: a text codec for a server in this process, and the worker that all tests share."""

from collections.abc import Iterator

import pytest

from rollout.text.codec import TextCodec
from tests.support.tokenizer_folder import make_tokenizer_folder
from tests.support.worker.harness import assert_idle
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def worker(first_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """The first worker, which must be idle again when the test is over."""
    yield first_worker
    assert_idle(first_worker)


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    """A client of the worker."""
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        yield client
