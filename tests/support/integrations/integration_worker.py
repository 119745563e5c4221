"""Workers for the tests of integrations: without settings of the environment, without W&B."""

import os
from pathlib import Path
from typing import Any

from tests.support.worker.harness import launch
from trainer_bridge.client.launch import WorkerProcess

ROOT = Path(__file__).parents[3]
_PATHS = (ROOT, ROOT / "kernels", ROOT / "tests" / "support" / "quick_transformers")


def worker_environment() -> dict[str, str | None]:
    """What a worker's environment needs, and what it must not have (None)."""
    changes: dict[str, str | None] = {name: None for name in os.environ if name.startswith(("ROLLOUT_", "WANDB_"))}
    return {**changes, "PYTHONPATH": os.pathsep.join(map(str, _PATHS)), "OMP_NUM_THREADS": "1"}


def start(model: Path, log: Path, **flags: Any) -> WorkerProcess:
    """A worker of a checkpoint."""
    return launch(model, log=log, **{"max_context_tokens": 256, "device": "cpu", **flags})
