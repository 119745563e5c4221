"""What holds for all tests of kernels."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """A test that takes torch's own generator gets the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Torch fills new memory with NaN, or with the largest integer: a result that uses it is wrong."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
