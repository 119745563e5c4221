"""Which device each rank has, and settings that give it none of its own."""

from __future__ import annotations

import pytest
import torch

from rollout.ranks.devices import check_devices, rank_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """As many CUDA devices are visible as the parameter says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_each_rank_has_the_device_of_its_number(gpus: int) -> None:
    assert [rank_device("auto", rank) for rank in range(gpus)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [rank_device("cuda", 2), rank_device("cpu", 2)] == ["cuda:2", "cpu"]


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_without_gpus_ranks_are_on_the_cpu(gpus: int) -> None:
    assert rank_device("auto", 3) == "cpu"
    check_devices("auto", 8)
    with pytest.raises(ValueError, match="tensor_parallel is 2, but 0 CUDA devices are visible: lower it"):
        check_devices("cuda", 2)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_rank_without_a_device_of_its_own_is_refused(gpus: int) -> None:
    for name in ("auto", "cuda"):
        check_devices(name, gpus)
        with pytest.raises(ValueError, match="tensor_parallel is 4, but 2 CUDA devices are visible: lower it"):
            check_devices(name, 4)
    with pytest.raises(ValueError, match="'cuda:1' is a single device for 2 ranks: write auto, cuda or cpu"):
        check_devices("cuda:1", 2)
    check_devices("cuda:1", 1)
    check_devices("cpu", 8)
