"""TRL's GRPOTrainer on a CPU with rollouts of a worker: the program of `scripts/trl_grpo_rollout_func.py`."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.integrations.integration_worker import worker_environment
from tests.support.integrations.tiny_checkpoints import logprobs_of

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install '.[trl]'", allow_module_level=True)

from scripts import trl_grpo_rollout_func as program

STEPS = 10


@pytest.mark.nightly
def test_the_worker_completes_with_the_trainers_weights_of_every_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors: list[float] = []
    plain = program.WorkerRollouts.__call__

    def compared(self: program.WorkerRollouts, prompts: list[str], trainer: Any) -> dict[str, list]:
        told = plain(self, prompts, trainer)
        first = {name: values[0] for name, values in told.items()}
        theirs = logprobs_of(trainer.model, first["prompt_ids"], first["completion_ids"])
        errors.append(float((theirs - torch.tensor(first["logprobs"])).abs().max()))
        return told

    monkeypatch.setattr(program.WorkerRollouts, "__call__", compared)
    flags = {"env": worker_environment(), "log_file": tmp_path / "worker.log", "wandb": False}
    model = program.fresh_model(tmp_path / "model")
    rewards = program.train(model, STEPS, str(tmp_path / "trl"), progress=False, **flags)
    assert len(rewards) == STEPS and all(math.isfinite(reward) for reward in rewards)
    assert len(errors) == STEPS and max(errors) < 1e-3
