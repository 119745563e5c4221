"""The recipe's tasks: problems, verifiers and turns, with a real model's tokenizer and chat template."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from scripts.fetch_smollm2 import FOLDER, fetch
from scripts.learn.tasks import TASKS, Answer, Curriculum, Problem, Task, calculate, chat_ids, user_turn_ids

if find_spec("reasoning_gym") is None:
    pytest.skip("needs reasoning-gym", allow_module_level=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if not os.environ.get("TEST_INTEGRATIONS") and not FOLDER.is_dir():
        pytest.skip("make test-integrations fetches the model")
    fetch(FOLDER, [])
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_tokenizer_ends_turns_with_the_token_that_the_model_draws(tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(FOLDER)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.pad_token_id == config.pad_token_id and tokenizer.bos_token_id == config.bos_token_id


def answer(text: str, ended: bool = True) -> Answer:
    return Answer([1], text, ended)


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "calculator", "copying"])
def test_problems_are_the_same_every_time_and_grow_harder(tokenizer: Any, name: str) -> None:
    task = TASKS[name](tokenizer)
    again = TASKS[name](tokenizer)
    for level in range(task.levels):
        assert task.problem(level, 7) == again.problem(level, 7) != task.problem(level, 8)
    curriculum = Curriculum(task, seed=0)
    held_out = {tuple(problem.prompt_ids) for problem in curriculum.held_out(60)}
    assert not held_out & {tuple(problem.prompt_ids) for problem in islice(curriculum.problems(1), 64)}
    longest = max(len(task.problem(task.levels - 1, i).prompt_ids) for i in range(20))
    assert longest + task.max_tokens <= task.max_context


def test_a_sum_is_right_by_its_last_number(tokenizer: Any) -> None:
    task = TASKS["chain_sum"](tokenizer)
    for level in range(task.levels):
        problem = task.problem(level, 3)
        right = problem.facts["answer"]
        assert task.reward(problem, answer(f"That is 1 more than before: {right}.")).reward == 1.0
        assert not task.reward(problem, answer(f"{right} or {int(right) + 1}")).right
        cut = task.reward(problem, answer(right, ended=False))
        assert cut.right and cut.reward == pytest.approx(0.9)
        assert task.reward(problem, answer("I do not know.")).reward == pytest.approx(0.1)


def test_a_copy_is_worth_what_it_repeats_from_its_beginning_on(tokenizer: Any) -> None:
    task = TASKS["copying"](tokenizer)
    for level in range(task.levels):
        problem = task.problem(level, 3)
        text = tokenizer.decode(problem.prompt_ids)
        asked = text.partition("same order: ")[2].partition("<|im_end|>")[0]
        numbers = asked.split()
        whole = task.reward(problem, answer(asked))
        assert whole.reward == 1.0 and whole.right
        assert not task.reward(problem, answer(asked, ended=False)).right
        assert task.reward(problem, answer(", ".join(numbers))).right
        half = task.reward(problem, answer(" ".join([*numbers[: len(numbers) // 2], "7", *numbers])))
        assert half.reward == pytest.approx(0.5) and not half.right
        assert task.reward(problem, answer(f"Here they are: {asked}")).reward == 0
        more = task.reward(problem, answer(f"{asked} {asked}"))
        assert more.reward == 1.0 and not more.right
        assert len(tokenizer(asked)["input_ids"]) <= task.max_tokens


def test_countdown_evaluates_short_expressions_of_its_numbers_and_no_other_text(tokenizer: Any) -> None:
    task = TASKS["countdown"](tokenizer)
    for level in range(task.levels):
        problem = task.problem(level, 5)
        right = task.reward(problem, answer(problem.facts["answer"]))
        assert right.right and right.reward == pytest.approx(1.0)
    numbers = " + ".join(map(str, problem.facts["metadata"]["numbers"]))
    for text in ("__import__('os').getcwd()", "9**9**9**9", f"{numbers} # {numbers}", "x", "", "1" * 500):
        verdict = task.reward(problem, answer(text))
        assert not verdict.right and verdict.reward <= 0.1
    assert not task.reward(problem, answer(f"{numbers} + 0")).right
    wrong = task.reward(problem, answer(numbers.replace("+", "*")))  # the right numbers are worth something
    assert not wrong.right and wrong.reward == pytest.approx(0.2)


def play(task: Task, tokenizer: Any, problem: Problem) -> tuple[list[int], str, int]:
    """What a model says that uses the calculator for each sign: token ids after the prompt, last turn, turns."""
    assert task.reply is not None
    first, *rest = re.findall(r"[-+]? ?\d+", problem.facts["metadata"]["expression"])
    ids: list[int] = []
    total, turns = first, 1
    for term in rest:
        said = f"CALC {total} {term[0]} {term[1:].strip()}"
        reply = task.reply(problem, said)
        assert reply is not None and reply[0] == tokenizer.eos_token_id
        ids += [*tokenizer(said, add_special_tokens=False)["input_ids"], *reply]
        total, turns = str(calculate(said)), turns + 1
    last = f"ANSWER {total}"
    assert task.reply(problem, last) is None
    return [*ids, *tokenizer(last, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], last, turns


def test_the_calculator_leads_to_the_right_answer_within_its_turns(tokenizer: Any) -> None:
    task = TASKS["calculator"](tokenizer)
    for level in range(task.levels):
        problem = task.problem(level, 11)
        ids, last, turns = play(task, tokenizer, problem)
        assert turns <= task.max_turns and len(problem.prompt_ids) + len(ids) <= task.max_context
        assert task.reward(problem, Answer(ids, last, True, turns)).reward == 1.0
        wrong = task.reward(problem, Answer(ids, "ANSWER 99999999", True, turns))
        assert not wrong.right and wrong.reward == pytest.approx(0.1)
        assert task.reward(problem, Answer(ids, "ANSWER 99999999", True, 1)).reward == 0.0  # a guess without a call
        assert task.reward(problem, Answer(ids, last.removeprefix("ANSWER "), True, turns)).reward == 0.0


def test_a_user_turn_after_drawn_tokens_is_what_the_chat_template_writes(tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "CALC 1 + 2"}]
    said = tokenizer("CALC 1 + 2", add_special_tokens=False)["input_ids"]
    ids = [*chat_ids(tokenizer, talk[:1]), *said, *user_turn_ids(tokenizer, "3")]
    assert ids == chat_ids(tokenizer, [*talk, {"role": "user", "content": "3"}])
