"""Files in the current folder are not imported: not by a worker, its ranks, its supervisor or its text process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import ONES, subprocess_environment

JOB = """
import sys
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker
flags = {"supervise": True, "tensor_parallel": 2, "device": "cpu", "wandb": False, "kv_memory_max_gib": 1 / 32}
with start_worker(sys.argv[1], max_context_tokens=64, **flags) as worker, RolloutClient(worker.endpoint) as client:
    print(len(client.generate("17:", max_tokens=5, return_text=True).completions[0]))
"""


@pytest.mark.nightly  # the start of four processes
def test_files_of_a_job_with_names_of_libraries_disturb_no_process(tmp_path: Path) -> None:
    for name in ("safetensors", "torch", "tokenizers", "zmq", "msgpack"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the current folder')")
    command = [sys.executable, "-P", "-c", JOB, str(ONES)]
    environ = subprocess_environment()
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
