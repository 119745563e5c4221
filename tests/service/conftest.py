"""Fixtures of the service's tests."""

import pytest

from rollout.service.text.codec import TextCodec
from tests.support.tokenizer_folder import make_tokenizer_folder


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))
