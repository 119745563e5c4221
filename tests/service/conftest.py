"""Fixtures of the service's tests."""

from collections.abc import Iterator

import pytest

from rollout.text.codec import TextCodec
from tests.support.clock import Clock
from tests.support.service.harness import Bench, Client, serving
from tests.support.tokenizer_folder import make_tokenizer_folder


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with serving() as bench:
        yield bench


@pytest.fixture
def client(bench: Bench) -> Client:
    return bench.client()


@pytest.fixture
def clock() -> Clock:
    return Clock()
