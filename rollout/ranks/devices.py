"""The device of each rank."""

from __future__ import annotations

import torch


def rank_device(name: str, rank: int) -> str:
    """The device of a rank, for a `model.device` setting of auto, cpu or cuda."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return name if name == "cpu" else f"cuda:{rank}"


def check_devices(name: str, ranks: int) -> None:
    """Raise ValueError if there is no device of its own for each rank."""
    if ranks == 1 or name == "cpu":
        return
    if name not in ("auto", "cuda"):
        raise ValueError(f"model.device {name!r} is a single device for {ranks} ranks: write auto, cuda or cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (name == "cuda" or count) and count < ranks:
        raise ValueError(f"tensor_parallel is {ranks}, but {count} CUDA devices are visible: lower it")
