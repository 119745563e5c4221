"""TRL's GRPOTrainer on the recipe's toy, by transformers' generation and with a worker in its place."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_learn import run_module

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install '.[trl]'", allow_module_level=True)

from scripts.learn.recipe import Recipe  # noqa: E402
from scripts.learn.trl import train  # noqa: E402

TOY = ["--task", "counting", "--level", "0", "--prompts", "4", "--group-size", "8", "--lr", "1.5e-3", "--warmup", "1"]


@pytest.mark.nightly
@pytest.mark.parametrize("generation", ["transformers", "worker"])
def test_trl_trains_the_toy_on_the_recipes_problems(tmp_path: Path, generation: str) -> None:
    words = [*TOY, "--steps", "4", "--generation", generation, "--out", str(tmp_path)]
    ended = run_module("scripts.learn.trl", words)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["generation"] == generation and told["steps_done"] == 4
    assert [point["step"] for point in told["points"]] == [1, 2, 3, 4]
    assert all(point["tokens"] >= 4 * 8 and 0 <= point["reward"] <= 1 for point in told["points"])
    assert '"steps": 4' in ended.stdout.splitlines()[-1]
    differences = [point.get("sampling/sampling_logp_difference/max") for point in told["points"]]
    if generation == "worker":  # the worker has TRL's weights in every step: a difference is rounding
        assert max(differences) < 1e-4
    else:
        assert differences == [None] * 4


@pytest.mark.nightly
def test_trl_ends_after_its_time(tmp_path: Path) -> None:
    words = [*TOY, "--steps", "50", "--max-seconds", "0.001", "--generation", "transformers", "--out", str(tmp_path)]
    run_module("scripts.learn.trl", words)
    assert json.loads((tmp_path / "run.json").read_text())["steps_done"] == 1


@pytest.mark.parametrize(
    ("given", "named"), [({"mode": "sync"}, "--level"), ({"level": 0, "mode": "async"}, "--mode sync")]
)
def test_what_trl_is_not_compared_on_is_refused(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(SystemExit, match=named):
        train(Recipe(task="counting", **given), "worker", tmp_path)
