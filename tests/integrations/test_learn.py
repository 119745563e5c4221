"""The recipe for GRPO learns from rewards alone, by completions of a worker that runs on while it trains."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from scripts.learn.checkpoint import Progress, newest, read_progress, save
from scripts.learn.curves import draw_runs
from scripts.learn.grpo import EntropyWeight, Trainer, advantages, divergence, micro_batches, token_loss
from scripts.learn.recipe import Recipe
from scripts.learn.rollouts import Draw, Group, Sample, answer_all, answer_batch
from scripts.learn.run import make_task, thinned, worker_flags
from scripts.learn.run import run as learn
from scripts.learn.tasks import Answer, Curriculum, Problem, Task, Verdict, calculate, counting, last_number
from scripts.learn.toy import make_model
from tests.support.integrations.integration_worker import start, worker_environment
from tests.support.integrations.tiny_checkpoints import CHECKPOINT
from tests.support.kernels.grids import nightly
from trainer_bridge import BackgroundClient

SHORT = {"--task": "counting", "--prompts": 16, "--group-size": 16, "--lr": 1e-3, "--warmup": 1}


@dataclass(frozen=True)
class Run:
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    log: str


def run_module(name: str, words: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a module of the recipe as a command, and check its exit status."""
    changes = worker_environment()
    environment = {name: value for name, value in os.environ.items() if name not in changes}
    environment |= {name: value for name, value in changes.items() if value is not None}
    command = [sys.executable, "-m", name, *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == status, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended


def train(out: Path, **flags: Any) -> Run:
    """Run the recipe's command."""
    run_module(
        "scripts.learn", ["--out", str(out), *(str(word) for pair in {**SHORT, **flags}.items() for word in pair)]
    )
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return Run(
        [line for line in lines if "step" in line],
        [line for line in lines if "evaluated" in line],
        json.loads((out / "run.json").read_text()),
        (out / "worker.log").read_text(),
    )


def mean(steps: list[dict[str, Any]], name: str = "reward") -> float:
    return sum(step[name] for step in steps) / len(steps)


# --- one run ---


@pytest.fixture(scope="module", params=[10, *nightly(200)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("learn")
    flags = {"--steps": request.param, "--staleness": 2, "--check-every": 2, "--eval-every": 5, "--eval-problems": 15}
    return train(out, **flags)


@pytest.mark.parametrize("run", nightly(200), indirect=True)
def test_reward_and_held_out_accuracy_rise_from_next_to_nothing(run: Run) -> None:
    assert mean(run.steps[:5]) < 0.2
    assert mean(run.steps[-10:]) > 0.5
    assert run.evaluations[0]["accuracy"] < 0.1 and run.evaluations[-1]["accuracy"] > 0.2


def test_each_step_publishes_one_version_and_the_worker_draws_from_it(run: Run) -> None:
    assert [step["step"] for step in run.steps] == list(range(1, len(run.steps) + 1))
    assert run.summary["worker"]["weights/version"] == len(run.steps)
    ages = {int(age) for step in run.steps for age in step.get("ratio/by_age", ())}
    assert ages <= {0, 1, 2} and len(ages) > 1  # never older than asked for, and not all of one age


def test_worker_and_trainer_agree_on_log_probs_of_one_version(run: Run) -> None:
    checked = [step for step in run.steps if step.get("mismatch/tokens")]
    assert sum(step["mismatch/tokens"] for step in checked) > 1000
    assert max(step["mismatch/max_abs"] for step in checked) < 1e-4
    stale = [step for step in run.steps if step["staleness/mean"] > 0.5 and "ratio/p1" in step]
    assert min(step["ratio/p1"] for step in stale) < 0.99  # by the weights of now they do not agree


def test_every_token_that_the_worker_drew_was_trained_on_or_evaluated(run: Run) -> None:
    ended = [line for line in run.log.splitlines() if line.startswith('{"event": "ended"')]
    totals = json.loads(ended[0])["totals"]
    held_out = 15 * len(run.evaluations)
    assert totals["total/completions"] == 16 * sum(step["groups"] for step in run.steps) + held_out
    assert run.summary["tokens"] == sum(step["tokens"] for step in run.steps)
    assert run.summary["tokens"] < totals["total/tokens"] <= run.summary["tokens"] + 17 * held_out


def test_evaluations_are_of_the_versions_that_were_asked_for(run: Run) -> None:
    assert [row["evaluated"] for row in run.evaluations] == list(range(0, len(run.steps) + 1, 5))
    assert all(0 <= row["accuracy"] <= 1 for row in run.evaluations)


@pytest.mark.nightly
def test_without_staleness_a_run_repeats_itself_with_speculation_too(tmp_path: Path) -> None:
    flags = {"--steps": 6, "--mode": "sync", "--seed": 3, "--prompts": 4}
    runs = [
        train(tmp_path / str(i), **flags, **{"--speculation": drafts}) for i, drafts in enumerate(("off", "suffix"))
    ]
    first, other = ([(step["reward"], step["tokens"]) for step in one.steps] for one in runs)
    assert first == other
    assert all(step["staleness/max"] == 0 for one in runs for step in one.steps)
    trained = [step for step in runs[0].steps if "ratio/p99" in step]
    assert trained and max(abs(step["ratio/p99"] - 1) for step in trained) < 1e-3  # on policy: the ratio is 1
    worker = runs[1].summary["worker"]
    assert worker["speculation/accepted"] > 0
    assert worker["speculation/accepted_pct/age_0"] > 0  # by the age of the text that the drafts come from


@pytest.mark.nightly
def test_several_runs_are_compared_in_one_file_and_drawn(tmp_path: Path) -> None:
    words = [str(word) for pair in {**SHORT, "--steps": 4, "--eval-every": 2}.items() for word in pair]
    words += ["--run", "sync: --mode sync", "--run", "two: --staleness 2", "--seeds", "0", "1", "--at-once", "2"]
    words += ["--rounds", "1"]
    words += ["--json", str(tmp_path / "runs.json"), "--folder", str(tmp_path / "runs")]
    ended = run_module("scripts.learn.compare", words)
    assert "[two/1] step 4" in ended.stdout
    rows = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert [(row["name"], row["seed"]) for row in rows] == [("sync", 0), ("two", 0), ("sync", 1), ("two", 1)]
    assert all(row["points"]["step"] == [1, 2, 3, 4] for row in rows)
    assert all(row["held_out"]["evaluated"] == [0, 2, 4] for row in rows)
    assert [row["staleness"]["max"] for row in rows] == [0, 2, 0, 2]
    for first, other in (rows[:2], rows[2:]):  # two at once: none starts beside another one, both train together
        early, late = sorted((first["start"], other["start"]), key=lambda times: times["began"])
        assert early["ready"] <= late["began"] and early["trains"] >= late["ready"]
    assert json.loads((tmp_path / "runs.json").read_text())["ended"] == dict.fromkeys(
        ["sync/0", "two/0", "sync/1", "two/1"], "done"
    )
    text = draw_runs("runs", rows)
    assert text.count("<polyline") == 2 * 6 and text.count("<polygon") == 2 * 6  # two series, six plots


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"task": "nope"}, "chain_sum"),
        ({"group_size": 1}, "--group-size"),
        ({"temperature": 0.0}, "--temperature"),
        ({"lr": math.nan}, "--lr"),
        ({"eval_every": -1}, "--eval-every"),
        ({"prompts": 2, "group_size": 2, "minibatches": 5}, "--minibatches"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused_by_the_flags_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Recipe(**given)


def test_a_level_that_the_task_lacks_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--level is 7"):
        learn(Recipe(task="counting", level=7), tmp_path)
    assert not (tmp_path / "worker.log").exists()


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    with pytest.raises(ValueError, match="finite"):
        Verdict(reward, False)


def test_a_gradient_that_is_not_finite_changes_no_weight(tmp_path: Path) -> None:
    trainer = Trainer(Recipe(check_every=0), str(make_model(tmp_path / "model", 0)), "cpu")
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    groups = [Group(Problem(0, [5, 6, 7]), [sample([-math.inf] * 2, [0, 0], each) for each in (0.0, 1.0)], 0, 0, 0)]
    groups[0].samples[0].logprobs[:] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.train(groups, lambda: None)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())


def test_longer_answers_than_the_tasks_get_a_longer_context() -> None:
    own, task = counting(), make_task(Recipe(task="counting", max_tokens=500), None)
    assert task.max_tokens == 500 and task.max_context - own.max_context == 500 - own.max_tokens
    assert make_task(Recipe(task="counting"), None).max_context == own.max_context


def test_a_run_that_fails_is_reported_and_the_others_are_kept(tmp_path: Path) -> None:
    words = ["--run", "wrong: --group-size 1", "--json", str(tmp_path / "runs.json"), "--folder", str(tmp_path)]
    ended = run_module("scripts.learn.compare", words, status=1)
    assert "--group-size must be at least 2" in ended.stderr
    assert json.loads((tmp_path / "runs.json").read_text())["rows"] == []


@pytest.mark.nightly
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    flags = {"--mode": "sync", "--prompts": 4, "--eval-every": 2, "--eval-problems": 15, "--check-every": 0}
    flags |= {"--save-every": 2, "--kl": 0.01}
    whole = train(tmp_path / "whole", **flags, **{"--steps": 4})
    train(tmp_path / "parts", **flags, **{"--steps": 3})  # the third step came after the checkpoint
    words = ["--out", str(tmp_path / "parts"), "--steps", "4"]
    words += [str(word) for pair in {**SHORT, **flags}.items() for word in pair]
    refused = run_module("scripts.learn", words, status=1)
    assert "--resume" in refused.stderr
    assert "--seed" in run_module("scripts.learn", [*words, "--resume", "--seed", "5"], status=1).stderr
    run_module("scripts.learn", [*words, "--resume"])
    parts = [json.loads(line) for line in (tmp_path / "parts" / "steps.jsonl").read_text().splitlines()]
    steps = [line for line in parts if "step" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for mine, other in zip(steps, whole.steps, strict=True):
        assert all(mine[name] == other[name] for name in ("reward", "tokens", "groups"))
        for name in ("entropy", "kl", "gradient"):  # the order of sums differs between processes
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)
    accuracy = {line["evaluated"]: line["accuracy"] for line in parts if "evaluated" in line}
    assert accuracy == {line["evaluated"]: line["accuracy"] for line in whole.evaluations}


# --- the parts ---


def test_a_checkpoint_has_all_that_the_next_step_depends_on(tmp_path: Path) -> None:
    recipe = Recipe(entropy=0.01, entropy_target=50.0, warmup=4, lr=1e-2, check_every=0)
    model = str(make_model(tmp_path / "model", 0))
    tokenizer = AutoTokenizer.from_pretrained(model)
    group = Group(Problem(0, [5, 6, 7]), [sample([-1.0] * 3, [0] * 3, reward) for reward in (0.0, 1.0)], 0, 0, 0)
    went_on = Trainer(recipe, model, "cpu")
    for step in (1, 2):
        went_on.train([group], lambda: None)
        entropy = went_on.entropy
        progress = Progress(step, 1.0, 6, [0.5], entropy.value, entropy.acts, asdict(recipe))
        save(tmp_path, went_on.model, tokenizer, went_on.optimizer_state(), progress)
    folder = newest(tmp_path)
    assert folder is not None and folder.name == "checkpoint-2" and read_progress(folder) == progress
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    came_back = Trainer(recipe, model, "cpu", folder)
    assert came_back.version == 2
    facts = [one.train([group], lambda: None) for one in (went_on, came_back)]
    assert facts[0] == facts[1] and facts[0]["entropy/weight"] == pytest.approx(0.02)
    for (name, mine), (_, other) in zip(
        went_on.model.named_parameters(), came_back.model.named_parameters(), strict=True
    ):
        assert torch.equal(mine, other), name


def sample(logprobs: list[float], versions: list[int], reward: float, drawn: list[bool] | None = None) -> Sample:
    count = len(logprobs)
    mine = np.array(drawn if drawn is not None else [True] * count)
    return Sample(
        [5, 6, 7],
        list(range(10, 10 + count)),
        mine,
        np.array(logprobs, np.float32),
        np.array(versions),
        Verdict(reward, reward == 1),
        1,
    )


def test_the_worker_has_room_for_all_batches_that_are_asked_for_ahead(tmp_path: Path) -> None:
    recipe = Recipe(staleness=4, prompts=64, group_size=16, eval_problems=96)
    flags = worker_flags(recipe, counting(), "cpu", tmp_path)
    assert flags["max_queue"] >= 5 * 64 * 16 + 96 and flags["max_rows"] == 1024


def test_advantages_are_scaled_by_the_batch_or_the_group() -> None:
    large, small = [1.0, 0.0], [0.1, 0.0]
    by_group = advantages([large, small], "group")
    assert by_group[0] == pytest.approx([1, -1], rel=1e-2) and by_group[1] == pytest.approx([1, -1], rel=1e-2)
    by_batch = advantages([large, small], "batch")
    assert by_batch[0][0] / by_batch[1][0] == pytest.approx(10)  # a small difference stays small
    assert np.mean(np.square(by_batch)) == pytest.approx(1, rel=1e-2)
    assert advantages([large, small], "none")[0] == pytest.approx([0.5, -0.5], rel=1e-3)
    assert advantages([[0.5, 0.5, 0.5]], "group") == [[0, 0, 0]]
    assert advantages([], "batch") == []


def test_the_weight_of_the_entropy_grows_below_the_target_and_acts_only_there() -> None:
    weight = EntropyWeight(Recipe(entropy=0.0, entropy_target=0.2, entropy_step=0.005))
    seen = []
    for entropy in (0.3, 0.1, 0.1, 0.25, 0.1):
        weight.observe(entropy)
        seen.append(weight.now)
    assert seen == pytest.approx([0, 0.005, 0.01, 0, 0.01])
    constant = EntropyWeight(Recipe(entropy=0.01, entropy_target=0))
    constant.observe(5.0)
    assert constant.now == 0.01


def test_the_divergence_is_zero_for_equal_weights_and_falls_where_the_reference_is_likelier() -> None:
    reference = torch.log(torch.tensor([0.5, 0.5, 0.5]))
    new = torch.log(torch.tensor([0.5, 0.25, 0.75])).requires_grad_()
    found = divergence(new, reference)
    assert found.tolist() == pytest.approx([0, 1 - math.log(2), 2 / 3 - 1 - math.log(2 / 3)], abs=1e-6)
    found.sum().backward()
    assert new.grad is not None and new.grad[0] == 0 and new.grad[1] < 0 < new.grad[2]


def test_the_loss_clips_the_ratio_and_caps_the_importance_weight() -> None:
    recipe = Recipe(clip_low=0.2, clip_high=0.3, importance_cap=2.0)
    old = torch.log(torch.tensor([0.5, 0.5, 0.5]))
    new = torch.log(torch.tensor([0.9, 0.9, 0.5])).requires_grad_()
    worker = torch.log(torch.tensor([0.5, 0.5, 0.1]))
    loss = token_loss(new, old, worker, torch.tensor([1.0, -1.0, 1.0]), recipe)
    assert loss.tolist() == pytest.approx([-1.3, 1.8, -2.0])
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 1.8, -2.0])  # the clipped token teaches nothing


def test_padding_and_tokens_of_the_environment_are_not_trained_on() -> None:
    talk = sample([-1.0, 0.0, 0.0, -2.0], [3, -1, -1, 4], 1.0, drawn=[True, False, False, True])
    group = Group(Problem(0, [5, 6, 7]), [talk, sample([-0.5], [4], 0.0)], 0, 0, 0)
    equal = Group(Problem(0, [5, 6, 7]), [sample([-0.5], [4], 1.0)] * 2, 0, 0, 0)
    recipe = Recipe(micro_tokens=1000)
    ((rows,),) = micro_batches([equal, group], recipe, "cpu")  # nothing of the group of equal rewards
    assert rows.ids_NT.tolist() == [[5, 6, 7, 10, 0, 0, 0], [5, 6, 7, 10, 11, 12, 13]]
    assert rows.drawn_NS.tolist() == [[False] * 2 + [True] + [False] * 3, [False] * 2 + [True, False, False, True]]
    assert rows.logprobs_NS[rows.drawn_NS].tolist() == [-0.5, -1.0, -2.0]
    assert rows.versions_NS[rows.drawn_NS].tolist() == [4, 3, 4]
    assert rows.first == 2


def test_micro_batches_hold_each_sample_once_and_stay_small() -> None:
    samples = [sample([-1.0] * length, [0] * length, length % 2) for length in range(1, 20)]
    recipe = Recipe(micro_tokens=60, minibatches=2)
    parts = micro_batches([Group(Problem(0, [5, 6, 7]), samples, 0, 0, 0)], recipe, "cpu")
    assert len(parts) == 2
    assert all(rows.ids_NT.numel() <= 60 for part in parts for rows in part)
    drawn = sorted(count for part in parts for rows in part for count in rows.drawn_NS.sum(1).tolist())
    assert drawn == list(range(1, 20))


def test_the_curriculum_prefers_levels_that_are_sometimes_right_and_trains_on_nothing_held_out() -> None:
    task = Task("numbers", lambda level, index: Problem(level, [level, index]), _never, levels=3)
    curriculum = Curriculum(task, seed=1)
    held_out = {tuple(problem.prompt_ids) for problem in curriculum.held_out(30)}
    assert len(held_out) == 30

    def drawn(of: Curriculum, step: int) -> list[Problem]:
        return list(islice(of.problems(step), 300))

    problems = drawn(curriculum, 1)
    assert not held_out & {tuple(problem.prompt_ids) for problem in problems}
    assert problems == drawn(Curriculum(task, seed=1), 1) != drawn(Curriculum(task, seed=2), 1)
    counts = np.bincount([problem.level for problem in problems])
    assert counts.min() > 60  # nothing is known yet
    known = [0.98, 0.4, 0.0]
    for step in range(3):
        some = drawn(curriculum, step)
        curriculum.observe(some, [known[problem.level] for problem in some])
    counts = np.bincount([problem.level for problem in drawn(curriculum, 9)], minlength=3)
    assert counts[1] > 200 and counts[0] > 0 and counts[2] > 0  # the others are still looked at
    assert {problem.level for problem in drawn(Curriculum(task, seed=1, only=2), 1)} == {2}


def _never(*given: Any) -> Any:
    raise AssertionError


def test_counting_rewards_the_correct_beginning() -> None:
    task = counting()
    problem = Problem(0, [6, 1])  # the number 4
    right = [5, 4, 3, 2, 0]
    assert task.reward(problem, Answer(right, "", True)) == Verdict(1.0, True)
    assert task.reward(problem, Answer([5, 4, 9, 2, 0], "", True)) == Verdict(0.4, False)
    assert task.reward(problem, Answer([9], "", False)) == Verdict(0.0, False)


@pytest.mark.parametrize(
    ("text", "number"),
    [("4 + 5 = 9.", "9"), ("It is -12", "-12"), ("1,234 of 5,678,901", "5678901"), ("none", None), ("7, 8", "8")],
)
def test_the_last_number_of_a_text_is_its_answer(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "result"),
    [("CALC 12 + 30", "42"), (" CALC 3 - -4\n", "7"), ("CALC 2 ** 9", None), ("CALC 1 + 2 + 3", None), ("42", None)],
)
def test_the_calculator_does_one_sum_or_difference_and_nothing_else(text: str, result: str | None) -> None:
    assert calculate(text) == result


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundClient]:
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with start(CHECKPOINT, log) as worker, BackgroundClient(worker.endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize(("rounds", "groups", "teaching"), [(1, 4, 2), (2, 8, 4), (9, 8, 4)])
def test_groups_of_equal_rewards_are_replaced_by_new_problems(
    client: BackgroundClient, tokenizer: Any, rounds: int, groups: int, teaching: int
) -> None:
    ids = tokenizer("17:", add_special_tokens=False)["input_ids"]
    problems = (Problem(i % 2, [*ids[:-1], ids[-1]], i) for i in itertools.count())
    given: list[int] = []

    def reward(problem: Problem, answer: Answer) -> Verdict:
        given.append(problem.facts)
        return Verdict(float(given.count(problem.facts) * problem.level), False)  # equal rewards on level 0

    task = Task("halves", _never, reward, levels=2)
    recipe = Recipe(prompts=4, group_size=2, rounds=rounds)
    how = Draw(2, seed=7, min_version=0, temperature=1.0, max_tokens=4)
    found = client.run(lambda client: answer_batch(client, task, tokenizer.decode, problems, how, recipe)).result(60)
    assert [group.problem.facts for group in found] == list(range(groups))
    assert [group.teaches for group in found] == [False, True] * (groups // 2)
    assert sum(group.teaches for group in found) == teaching


def test_a_conversation_sends_token_ids_back_as_they_came_and_counts_what_is_computed(
    client: BackgroundClient, tokenizer: Any
) -> None:
    prompt_ids, reply_ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("17:", "5:"))
    (zero,) = tokenizer("0", add_special_tokens=False)["input_ids"]  # this model counts on: 18 19 20
    texts: list[str] = []

    def reply(problem: Problem, text: str) -> list[int]:
        texts.append(text)
        return [zero, *reply_ids]

    def reward(problem: Problem, answer: Answer) -> Verdict:
        return Verdict(float(answer.turns), answer.text == texts[-1])

    task = Task("talk", _never, reward, max_turns=3, max_context=200, reply=reply, stop=(zero,))
    how = Draw(2, seed=7, min_version=0, temperature=1.0, max_tokens=20)
    problems = [Problem(0, prompt_ids)]
    (group,) = client.run(lambda client: answer_all(client, task, tokenizer.decode, problems, how)).result(60)
    assert texts.count(" 18 19 20") == 2 and all(text.endswith("0") for text in texts)
    for one in group.samples:
        assert one.turns == 3 and one.verdict.reward == 3
        apart = np.flatnonzero(~one.drawn)
        assert [one.token_ids[i] for i in apart] == reply_ids * 2
        assert set(one.versions[apart].tolist()) == {-1} and set(one.versions[one.drawn].tolist()) == {0}
        assert (one.logprobs[one.drawn] <= 0).all() and not one.logprobs[apart].any()
    assert group.new == len(prompt_ids) + 4 * len(reply_ids)
    # A session's past is not computed again. Its last token may be: it may have been drawn and not read by the model.
    most = 2 * len(prompt_ids) + 4 * (1 + len(reply_ids))
    assert group.computed <= most < group.sent


def test_a_thinned_run_keeps_totals_means_and_largest_values() -> None:
    rows = [{"step": i, "reward": float(i), "staleness/max": i % 3, "wall_s": 2.0 * i} for i in range(1, 101)]
    points = thinned(rows, 60)
    assert len(points) == 50
    assert points[0] == {"step": 2, "reward": 1.5, "staleness/max": 2, "wall_s": 4.0}
    assert points[-1]["step"] == 100 and math.isclose(sum(p["reward"] for p in points) * 2, 5050)
