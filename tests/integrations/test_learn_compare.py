"""Plans of several runs: what they say, how they share the time, and who starts when."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.learn.compare import in_parts, read_plan, read_wave, training_seconds
from scripts.learn.recipe import add_flags, read_recipe
from tests.integrations.test_learn import run_module
from tests.support.integrations.integration_worker import ROOT

PLANS = sorted((ROOT / "scripts" / "learn" / "plans").glob("*.toml"))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_every_run_of_a_committed_plan_is_a_command_that_is_understood(plan: Path) -> None:
    waves = read_plan(plan.read_text(), ["--model", "MODEL"])
    names = set()
    for wave in waves:
        for (name, seed), (module, *words) in wave.cells.items():
            parser = argparse.ArgumentParser(exit_on_error=False)
            add_flags(parser)
            if module == "scripts.learn.trl":
                parser.set_defaults(mode="sync")
                parser.add_argument("--generation", choices=("transformers", "vllm", "worker"))
            recipe = read_recipe(parser.parse_args(words))
            assert recipe.model == "MODEL" and recipe.seed == seed
            if module == "scripts.learn.trl":
                assert recipe.level >= 0 and recipe.mode == "sync" and recipe.steps <= 200
            names.add(name)
    assert len(names) > 1
    assert sum(wave.seconds for wave in waves) < 570 - 40 * len(waves)  # starts take the rest


def test_a_plan_makes_a_command_of_each_run_and_seed() -> None:
    text = 'flags = "--steps 9"\n[[wave]]\nseconds = 5\nseeds = [3, 4]\nruns = ["a: --lr 1", "b: trl --level 0"]\n'
    (wave,) = read_plan(text, ["--model", "M"])
    assert wave.seconds == 5
    assert wave.cells["a", 4] == ["scripts.learn", "--steps", "9", "--model", "M", "--lr", "1", "--seed", "4"]
    assert wave.cells["b", 3][0] == "scripts.learn.trl" and "trl" not in wave.cells["b", 3][1:]
    assert [list(part.cells) for part in in_parts(wave, 3)] == [[("a", 3), ("b", 3), ("a", 4)], [("b", 4)]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs = 3", "'runs'"),
        ("[[wave]]\nseconds = 5", "lacks ['runs']"),
        ('[[wave]]\nseconds = 5\nrun = ["a: "]\nruns = []', "['run']"),
        ('[[wave]]\nseconds = 5\nruns = ["a --lr 1"]', "no colon"),
        ('[[wave]]\nseconds = 5\nruns = ["a: ", "a: --lr 1"]', "'a'"),
        ('[[wave]]\nseconds = 5\nruns = ["a: "]\n[[wave]]\nseconds = 5\nruns = ["a: "]', "'a'"),
        ('flags = "--steps 1"', "[[wave]]"),
        ("[[wave]]\nseconds = 5\nruns = []", "'runs' of wave 1"),
        ("[[wave", ""),
    ],
)
def test_a_wrong_plan_is_refused_with_its_cause(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_plan(text, [])
    assert words in str(caught.value)


def test_waves_share_the_time_that_is_left_in_proportion() -> None:
    assert training_seconds([100.0, 50.0], 1000.0, 30.0) == 100  # there is enough
    first = training_seconds([100.0, 50.0], 100.0, 20.0)
    rest = training_seconds([50.0], 100.0 - first - 15 - 20.0, 0.0)
    assert first == pytest.approx(2 * rest, rel=0.01) and first + rest < 100
    assert training_seconds([100.0], 1.0, 0.0) > 0  # 0 would be no limit


def test_what_does_not_fit_into_the_budget_does_not_begin(tmp_path: Path) -> None:
    words = ["--run", "late: --task counting", "--budget", "1", "--json", str(tmp_path / "runs.json")]
    run_module("scripts.learn.compare", [*words, "--folder", str(tmp_path)], status=1)
    told = json.loads((tmp_path / "runs.json").read_text())
    assert told["ended"] == {"late/0": "no time was left"} and told["rows"] == []


def test_two_runs_never_start_at_the_same_time(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from scripts.learn.together import Start\n"
        "with Start(Path(sys.argv[1])).turn():\n"
        "    log = open(sys.argv[2], 'a'); print('begin', file=log, flush=True)\n"
        "    time.sleep(0.3); print('end', file=log, flush=True)\n"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", script, str(tmp_path / "lock"), str(log)]
    started = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert log.read_text().split() == ["begin", "end"] * 3


def test_runs_are_named_once_and_by_their_seeds() -> None:
    assert list(read_wave(5, [0, 1], ["a: "], []).cells) == [("a", 0), ("a", 1)]
    wave = read_wave(5, [1, 2], ["a: --seed 2", "b: --lr 1"], [])
    assert list(wave.cells) == [("b", 1), ("a", 2), ("b", 2)]  # a run that names its seed has that one alone
    with pytest.raises(ValueError, match="'a'"):
        read_wave(5, [2], ["a: ", "a: --seed 2"], [])
