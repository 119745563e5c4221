"""`scripts/check/mismatch.py`: a worker's log-probs equal those of transformers; other weights are detected."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.worker.harness import ONES, ROOT, TWOS, subprocess_environment
from trainer_bridge.client.launch import WorkerProcess


def run(model: Path, worker: WorkerProcess, out: Path) -> tuple[int, dict]:
    command = [sys.executable, str(ROOT / "scripts/check/mismatch.py"), str(model), "--endpoint", worker.endpoint]
    options = ["--completions", "2", "--tokens", "1200", "--report", "--out", str(out)]
    done = subprocess.run(
        [*command, *options], env=subprocess_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(out.read_text())


@pytest.mark.nightly
def test_the_same_weights_agree_and_others_do_not(worker: WorkerProcess, tmp_path: Path) -> None:
    runs = ((ONES, tmp_path / "same.json"), (TWOS, tmp_path / "other.json"))
    with ThreadPoolExecutor(2) as pool:
        (code, same), (other_code, other) = pool.map(lambda given: run(given[0], worker, given[1]), runs)
    exact, rounded, own = same["rows"]
    assert code == 0 and exact["tokens"] == rounded["tokens"] == 2400
    assert exact["max_abs"] < 1e-4 and exact["k3_kl"] < 1e-9
    assert rounded["k3_kl"] < 1e-4 and rounded["mean_abs"] > exact["mean_abs"]
    assert (own["of"], own["against"]) == ("transformers in bfloat16", "float32")
    assert own["mean_abs"] == pytest.approx(rounded["mean_abs"], rel=1e-2), "the worker is float32 itself"
    assert other_code == 1 and other["rows"][0]["k3_kl"] > 0.1
