"""What holds for all tests of kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """A test that takes torch's own generator gets the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)
