"""The device of each rank."""

from collections.abc import Callable

import torch


def visible_gpus() -> int:
    """CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def rank_device(name: str, rank: int, gpus: Callable[[], int] = visible_gpus) -> str:
    """The device of a rank, for a `model.device` setting of auto, cpu or cuda."""
    if name == "auto":
        name = "cuda" if gpus() else "cpu"
    return name if name == "cpu" else f"cuda:{rank}"


def check_devices(name: str, ranks: int, gpus: Callable[[], int] = visible_gpus) -> None:
    """Raise ValueError if there is no device of its own for each rank."""
    if ranks == 1 or name == "cpu":
        return
    if name not in ("auto", "cuda"):
        raise ValueError(f"model.device {name!r} is a single device for {ranks} ranks: write auto, cuda or cpu")
    count = gpus()
    if (name == "cuda" or count) and count < ranks:
        raise ValueError(f"tensor_parallel is {ranks}, but {count} CUDA devices are visible: lower it")
