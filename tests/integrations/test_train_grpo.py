"""The GRPO example learns from rewards alone, by completions of a worker that runs on while it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.integrations.integration_worker import worker_environment
from tests.support.kernels.grids import nightly

SHORT = {"--numbers": 6, "--groups": 8, "--group-size": 16, "--lr": 2e-3}


def train(out: Path, *flags: str, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the script; its steps and its summary."""
    words = [str(word) for pair in {**SHORT, **settings}.items() for word in pair]
    command = [sys.executable, "-m", "scripts.train_grpo", "--out", str(out), *words, *flags]
    changes = worker_environment()
    environment = {name: value for name, value in os.environ.items() if name not in changes}
    environment |= {name: value for name, value in changes.items() if value is not None}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return steps, json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module", params=nightly(10, 80))
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    out = tmp_path_factory.mktemp("grpo")
    flags = {"--steps": request.param, "--staleness": 2, "--seed": 0, "--check-every": 2, "--plot": out / "curve.png"}
    return out, *train(out, **flags)


def mean(steps: list[dict[str, Any]], name: str = "reward") -> float:
    return sum(step[name] for step in steps) / len(steps)


@pytest.mark.parametrize("run", nightly(80), indirect=True)
def test_reward_rises_from_next_to_nothing(run: tuple[Path, list[dict[str, Any]], dict[str, Any]]) -> None:
    _, steps, _ = run
    assert mean(steps[:5]) < 0.2
    assert mean(steps[-10:]) > 0.7


def test_every_completion_and_token_that_the_worker_made_was_trained_on(
    run: tuple[Path, list[dict[str, Any]], dict[str, Any]],
) -> None:
    out, steps, summary = run
    assert len(steps) in (10, 80) and [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert summary["completions"] == len(steps) * 8 * 16
    ended = [line for line in (out / "worker.log").read_text().splitlines() if line.startswith('{"event": "ended"')]
    totals = json.loads(ended[0])["totals"]
    assert totals["total/completions"] == summary["completions"]
    assert totals["total/tokens"] == summary["tokens"] == sum(step["tokens"] for step in steps)
    assert summary["workers"] == [{"version": len(steps) + 1, "state": "idle"}]  # one more than steps


def test_the_summary_has_the_means_of_the_steps(run: tuple[Path, list[dict[str, Any]], dict[str, Any]]) -> None:
    _, steps, summary = run
    assert summary["reward of the first 5 steps"] == pytest.approx(mean(steps[:5]))
    assert summary["exact of the last 20 steps"] == pytest.approx(mean(steps[-20:], "exact"))
    assert summary["time/step_s"] == pytest.approx(mean(steps, "time/step_s"))
    assert summary["staleness/max"] == max(step["staleness/max"] for step in steps)
    checked = [step for step in steps if "mismatch/tokens" in step]
    assert summary["mismatch/tokens"] == sum(step["mismatch/tokens"] for step in checked) > 0
    assert summary["mismatch/max_abs"] == max(step["mismatch/max_abs"] for step in checked)


def test_staleness_is_bounded_and_used(run: tuple[Path, list[dict[str, Any]], dict[str, Any]]) -> None:
    _, steps, _ = run
    assert max(step["staleness/max"] for step in steps) <= 2
    assert mean(steps, "staleness/mean") > 0.2  # generation runs while the trainer steps


def test_worker_and_trainer_agree_on_log_probs_of_one_version(
    run: tuple[Path, list[dict[str, Any]], dict[str, Any]],
) -> None:
    _, steps, _ = run
    checked = [step for step in steps if step.get("mismatch/tokens")]
    assert sum(step["mismatch/tokens"] for step in checked) > 1000
    assert max(step["mismatch/max_abs"] for step in checked) < 1e-3
    assert max(step["mismatch/k3_kl"] for step in checked) < 1e-7
    assert max(step["policy/k3_kl"] for step in steps) > 1e-5  # by the weights of now they would not agree


@pytest.mark.nightly
def test_run_is_logged_and_drawn(run: tuple[Path, list[dict[str, Any]], dict[str, Any]]) -> None:
    out, _, _ = run
    assert list(out.glob("wandb/offline-run-*/run-*.wandb"))
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_without_staleness_a_run_repeats_itself_with_speculation_too(tmp_path: Path) -> None:
    flags = {"--steps": 6, "--staleness": 0, "--seed": 3, "--groups": 4}
    drafters = ("off", "off", "suffix", "ngram")
    with ThreadPoolExecutor(2) as pool:
        runs = list(
            pool.map(
                lambda i: train(tmp_path / str(i), "--no-wandb", **flags, **{"--speculation": drafters[i]}), range(4)
            )
        )
    told = [[{k: v for k, v in step.items() if not k.startswith("time/")} for step in steps] for steps, _ in runs]
    # Which completions share a batch is a matter of time, and a sum's last bit is one of the batch.
    for other in told[1:]:
        assert told[0] == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in other]
    drafted = [summary.get("speculation", {}).get("accepted", 0) for _, summary in runs]
    assert drafted[:2] == [0, 0] and min(drafted[2:]) > 0
    assert {step["staleness/max"] for step in told[0]} == {0}
    assert max(step["policy/k3_kl"] for step in told[0]) < 1e-7  # on policy: the ratio is 1
