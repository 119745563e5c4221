"""Ranks that the tests of a process share; they are started when the first test needs them."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def start_ranks() -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a group of this size."""
    started: dict[int, Ranks] = {}

    def start(size: int) -> Ranks:
        if size not in started or not started[size].alive:
            started[size] = Ranks(size)
        return started[size]

    yield start
    for ranks in started.values():
        ranks.close()
