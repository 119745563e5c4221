"""The demo, small: it passes on a real worker, and fails on one that loses a page of KV."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker.harness import ROOT, facts, rollout, subprocess_environment
from tests.support.worker.wandb_file import history_keys

CORRUPTING = [sys.executable, str(ROOT / "tests/support/worker/corrupting_worker.py")]
TOKENS = 2000  # enough for the update to come amid them, also on a busy machine


def run_demo(folder: Path, *more: str) -> tuple[subprocess.CompletedProcess, dict]:
    """A small demo, and its report."""
    small = ["--out", str(folder), "--prompts", "17:", "980:", "--n", "2", "--tokens", str(TOKENS)]
    environ = subprocess_environment(HOME=str(folder), COLUMNS="160")
    done = subprocess.run(rollout("demo", *small, *more), capture_output=True, text=True, timeout=270, env=environ)
    return done, json.loads((folder / "report.json").read_text())


def test_the_demo_passes_and_leaves_its_records(tmp_path: Path) -> None:
    folder = tmp_path
    done, report = run_demo(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every token of every completion is right." in done.stdout
    assert report["errors"] == [] and report["tokens"] == 4 * TOKENS and report["probes"] == 12
    assert [(row["prompt"], row["index"]) for row in report["completions"]] == [
        ("17:", 0), ("17:", 1), ("980:", 0), ("980:", 1),
    ]  # fmt: skip
    for row in report["completions"]:
        assert row["error"] is None and [version for version, _ in row["versions"]] == [0, 1]
        assert sum(count for _, count in row["versions"]) == row["tokens"] == TOKENS
    assert (folder / "trace.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["final"] and lines[-1]["weights/version"] == 1
    assert lines[-1]["kv/prefix_hit_pct"] >= 0 and lines[-1]["weights/swap_pause_ms"] > 0
    (run,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert "gpu/active_pct" in history_keys(run) and str(run.parent) in done.stdout.replace("\n", "")
    assert [fact["event"] for fact in facts(folder / "worker.log")] == ["ready", "ended"]


@pytest.mark.nightly
def test_the_demo_fails_when_a_page_in_use_is_overwritten(tmp_path: Path) -> None:
    done, report = run_demo(tmp_path, "--no-wandb", "--worker", *CORRUPTING)
    assert (tmp_path / "worker.log").read_text().count("overwriting page ") == 1
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The demo failed" in done.stdout
    wrong = [row for row in report["completions"] if row["error"] is not None]
    assert len(wrong) == 1 and wrong[0]["error"].startswith("token ") and "expected" in wrong[0]["error"]
    assert len(report["errors"]) == 1 and wrong[0]["error"] in report["errors"][0]
