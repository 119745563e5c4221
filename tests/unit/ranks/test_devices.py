"""Which device each rank has, and settings that give it none of its own."""

import pytest

from rollout.ranks.devices import check_devices, rank_device


def test_each_rank_has_the_device_of_its_number() -> None:
    assert [rank_device("auto", rank, lambda: 4) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [rank_device("cuda", 2, lambda: 4), rank_device("cpu", 2, lambda: 4)] == ["cuda:2", "cpu"]


def test_without_gpus_ranks_are_on_the_cpu() -> None:
    assert rank_device("auto", 3, lambda: 0) == "cpu"
    check_devices("auto", 8, lambda: 0)
    with pytest.raises(ValueError, match="tensor_parallel is 2, but 0 CUDA devices are visible: lower it"):
        check_devices("cuda", 2, lambda: 0)


def test_a_rank_without_a_device_of_its_own_is_refused() -> None:
    for name in ("auto", "cuda"):
        check_devices(name, 2, lambda: 2)
        with pytest.raises(ValueError, match="tensor_parallel is 4, but 2 CUDA devices are visible: lower it"):
            check_devices(name, 4, lambda: 2)
    with pytest.raises(ValueError, match="'cuda:1' is a single device for 2 ranks: write auto, cuda or cpu"):
        check_devices("cuda:1", 2, lambda: 2)
    check_devices("cuda:1", 1, lambda: 2)
    check_devices("cpu", 8, lambda: 2)
