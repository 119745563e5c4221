"""How many threads compute a tensor operation on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from rollout.process.interpreter import set_cpu_threads


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_computes_unless_the_variable_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # torch has read it when it was imported
    set_cpu_threads()
    assert torch.get_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_cpu_threads()
    assert torch.get_num_threads() == 1
