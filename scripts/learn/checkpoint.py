"""Checkpoints of a run, to go on after it has ended or was killed.

    OUT/checkpoint-40/    model and tokenizer, as transformers writes them; optimizer.safetensors; progress.json

A folder gets this name when all of it is written; then older ones are deleted.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_NAME = "checkpoint-"
_OPTIMIZER, _PROGRESS = "optimizer.safetensors", "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step, beside its weights and its optimizer."""

    step: int
    seconds: float
    tokens: int
    shares: list[float]  # of right answers, by level
    entropy_weight: float
    entropy_below: bool  # whether the weight acts
    recipe: Mapping[str, Any]


def newest(out: Path) -> Path | None:
    """The newest checkpoint of a run's folder."""
    found = [path for path in out.glob(f"{_NAME}*") if path.name.removeprefix(_NAME).isdigit()]
    return max(found, key=lambda path: int(path.name.removeprefix(_NAME)), default=None)


def save(out: Path, model: Any, tokenizer: Any, optimizer: Mapping[str, torch.Tensor], progress: Progress) -> None:
    """Write a checkpoint, and delete the older ones."""
    part = out / f"{_NAME}part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, part / _OPTIMIZER)
    (part / _PROGRESS).write_text(json.dumps(asdict(progress)))
    whole = out / f"{_NAME}{progress.step}"
    part.rename(whole)
    for path in out.glob(f"{_NAME}*"):
        if path != whole:
            shutil.rmtree(path)


def read_progress(folder: Path) -> Progress:
    """Where the run of a checkpoint stands."""
    return Progress(**json.loads((folder / _PROGRESS).read_text()))


def read_optimizer(folder: Path) -> dict[str, torch.Tensor]:
    """The state of its optimizer, by names that `Trainer.optimizer_state` gives."""
    return load_file(folder / _OPTIMIZER)
