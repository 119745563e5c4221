"""verl's own PPO trainers take two steps on a CPU: the program of `tests/support/integrations/verl_ppo.py`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "transfer_queue")):
    pytest.skip("verl is not installed: pip install '.[verl]'", allow_module_level=True)

from tests.support.integrations.integration_worker import ROOT

SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=rollout",
]
MANAGER = "+actor_rollout_ref.rollout.checkpoint_manager_class=trainer_bridge.integrations.verl.CheckpointManager"
TRAINERS = {
    "sync": [],
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
    "separate_async": SEPARATE,
    "before_v1": ["trainer.use_v1=False", MANAGER],
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("changes", TRAINERS.values(), ids=TRAINERS)
def test_trainer_steps_on_the_workers_tokens_and_log_probs(tmp_path: Path, changes: list[str]) -> None:
    command = [sys.executable, "-m", "tests.support.integrations.verl_ppo", str(tmp_path), *changes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    steps = [
        dict(re.findall(r"([\w/]+):(?:np\.float64\()?([-\d.e]+)", line))
        for line in re.findall(r"step:\d.*", ended.stdout)
    ]
    assert [step["training/global_step"] for step in steps] == ["1", "2"]
    assert all(float(step["actor/grad_norm"]) > 0 for step in steps)
    # Probabilities of the drawn tokens, in the worker and in the trainer. An asynchronous trainer's second step has
    # tokens of the weights before its first; there they differ by 0.05 and more.
    differences = [float(step["training/rollout_probs_diff_max"]) for step in steps]
    ahead = any("async" in change for change in changes)
    assert max(differences[:1] if ahead else differences) < 1e-5
