"""Tasks with verifiers: where problems come from, what the model reads, and what an answer is worth.

A `Task` is plain functions, so your own is a few lines:

    def problem(level, index):                       # the same problem for the same numbers
        return Problem(level, prompt_ids, facts)

    def reward(problem, answer):
        return Verdict(float(right), right)

    TASKS["mine"] = lambda tokenizer: Task("mine", problem, reward, levels=1, max_tokens=64)
    run(Recipe(model=FOLDER, task="mine"), Path("runs/mine"))      # from scripts.learn.recipe and scripts.learn.run

Problems and verifiers of chain_sum, countdown and calculator are those of the package reasoning-gym.
"""

import importlib
import importlib.util
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A problem of a level, as token ids, and what its verifier needs."""

    level: int
    prompt_ids: list[int]
    facts: Any = None


@dataclass(frozen=True)
class Answer:
    """What the model said. With several turns, `text` is the last turn and `turns` their number."""

    token_ids: list[int]
    text: str
    ended: bool  # by itself, not by its length
    turns: int = 1


@dataclass(frozen=True)
class Verdict:
    """The reward that is trained on, and whether the answer is right. Raises ValueError for a reward that is NaN."""

    reward: float
    right: bool

    def __post_init__(self) -> None:
        if self.reward is None or not math.isfinite(self.reward):
            raise ValueError(f"a reward is {self.reward}; a verifier must give a finite number")


@dataclass(frozen=True)
class Task:
    """What is learned.

    `reply` makes conversations: it returns token ids from the end of the model's turn on, or None to end. The first of
    them is the token that ended the turn. `stop` are token ids that end a turn besides the model's own.
    """

    name: str
    problem: Callable[[int, int], Problem]
    reward: Callable[[Problem, Answer], Verdict]
    levels: int = 1
    max_tokens: int = 32
    max_turns: int = 1
    max_context: int = 256
    stop: Sequence[int] = ()
    reply: Callable[[Problem, str], list[int] | None] | None = None


#: Held-out problems have these indices, training the ones above.
_HELD_OUT = 10_000
#: No level is drawn more seldom than one of which this product is p (1 - p).
_LEAST = 0.02


@dataclass
class Curriculum:
    """Chooses the levels of problems: problems that are sometimes solved teach most.

    A level is drawn in proportion to p (1 - p), with p its share of right answers, smoothed over problems (sampling
    for learnability, arXiv 2502.12272). A level that is never right or always right is drawn now and then, so that a
    change is noticed.
    """

    task: Task
    seed: int
    only: int = -1  # the one level to train on; -1: all
    shares: list[float] = field(default_factory=list)  # of right answers, by level
    _used: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not -1 <= self.only < self.task.levels:
            raise ValueError(f"--level is {self.only}; {self.task.name} has the levels 0 to {self.task.levels - 1}")
        self.shares = self.shares or [0.5] * self.task.levels
        self._used = {tuple(problem.prompt_ids) for problem in self.held_out(_HELD_OUT // 20)}

    def held_out(self, count: int) -> list[Problem]:
        """The same problems in every run, of all levels in turn."""
        levels = self.task.levels
        return [self.task.problem(i % levels, i // levels) for i in range(count)]

    def problems(self, step: int) -> Iterator[Problem]:
        """Problems to train on, without end; none is held out. The same for the same seed, step and shares."""
        weights = [max(_LEAST, share * (1 - share)) for share in self.shares]
        if self.only >= 0:
            weights = [float(level == self.only) for level in range(self.task.levels)]
        return self._draw(Random(f"{self.seed}/{step}"), weights)

    def _draw(self, rng: Random, weights: Sequence[float]) -> Iterator[Problem]:
        while True:
            (level,) = rng.choices(range(self.task.levels), weights)
            for _ in range(20):  # a small level has few problems, and may be held out whole
                problem = self.task.problem(level, _HELD_OUT + rng.randrange(2**30))
                if tuple(problem.prompt_ids) not in self._used:
                    break
            yield problem

    def observe(self, problems: Sequence[Problem], right: Sequence[float]) -> None:
        """Take in the share of right answers of each problem."""
        for problem, share in zip(problems, right, strict=True):
            self.shares[problem.level] += 0.02 * (share - self.shares[problem.level])


# --- reasoning-gym ---


@cache
def generator(name: str, module: str) -> Callable[..., Any]:
    """`reasoning_gym.create_dataset` for one generator, without the imports of all others.

    The package imports all generators and a dozen packages for them; the ones used here need numpy, sympy and PyYAML.
    So `pip install --no-deps reasoning-gym` is enough. Raises ImportError if it is absent.
    """
    package = f"reasoning_gym.{module}".rpartition(".")[0]
    for parent in ("reasoning_gym", package):
        if parent not in sys.modules:
            spec = importlib.util.find_spec(parent)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError("this task needs reasoning-gym: pip install --no-deps reasoning-gym==0.1.25")
            bare = types.ModuleType(parent)
            bare.__path__, bare.__spec__ = list(spec.submodule_search_locations), spec
            sys.modules[parent] = bare
    importlib.import_module(f"reasoning_gym.{module}")
    create = importlib.import_module("reasoning_gym.factory").create_dataset
    return lambda **config: create(name, **config)


_NUMBER = re.compile(r"-?\d+")


def last_number(text: str) -> str | None:
    """The last whole number of a text; commas between digits do not count."""
    found = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d)", "", text))
    return found[-1] if found else None


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """A conversation as token ids, up to where the model speaks."""
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return [int(token) for token in ids]


def user_turn_ids(tokenizer: Any, text: str) -> list[int]:
    """The end of the model's turn, the user's text, and what comes before the model speaks again.

    The chat template writes the conversation once, with a mark in place of the model's turn. So the model's own tokens
    stay as they were drawn. The first id is the token that ends its turn.
    """
    mark = "MARK-7f3a"
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
    messages.append({"role": "user", "content": text})
    after = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False).partition(mark)[2]
    return [int(token) for token in tokenizer(after, add_special_tokens=False)["input_ids"]]


#: (terms, digits) of each level.
_SUM_LEVELS = ((2, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 2))
_TOOL_LEVELS = ((2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3))


def _sums(levels: Sequence[tuple[int, int]], level: int, index: int) -> tuple[Any, dict[str, Any]]:
    terms, digits = levels[level]
    made = _sum_set(terms, digits)
    return made, made[index]


@cache
def _sum_set(terms: int, digits: int) -> Any:
    create = generator("chain_sum", "arithmetic.chain_sum")
    sizes = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
    return create(**sizes, seed=2026 + 1000 * terms + 100 * digits, size=2**31 - 1)


def common_beginning(given: Sequence[Any], wanted: Sequence[Any]) -> Sequence[Any]:
    """The items from the first one on in which two sequences agree."""
    pairs = enumerate(zip(given, wanted, strict=False))
    return given[: next((i for i, (left, right) in pairs if left != right), min(len(given), len(wanted)))]


def graded(score: float, ended: bool) -> Verdict:
    """Right is what the verifier gives 1; a tenth of the reward is for an answer that ends by itself."""
    right = score == 1.0
    return Verdict(0.9 * right + 0.1 * ended, right)


def chain_sum(tokenizer: Any) -> Task:
    """Sums and differences, from two terms of one digit to four terms of two digits."""

    def problem(level: int, index: int) -> Problem:
        _, entry = _sums(_SUM_LEVELS, level, index)
        return Problem(level, chat_ids(tokenizer, [{"role": "user", "content": entry["question"]}]), entry)

    def reward(problem: Problem, answer: Answer) -> Verdict:
        data, _ = _sums(_SUM_LEVELS, problem.level, 0)
        return graded(data.score_answer(last_number(answer.text), problem.facts), answer.ended)

    return Task("chain_sum", problem, reward, len(_SUM_LEVELS), max_tokens=32)


#: Numbers of each level, and the largest number.
_COUNTDOWN_LEVELS = ((2, 9), (3, 9), (3, 20), (4, 20))
_EXPRESSION = re.compile(r"[\d+\-*/() ]{1,60}")


def countdown(tokenizer: Any) -> Task:
    """Make a number from two to four others with the four operations. A part of the reward is for the form."""

    @cache
    def made(level: int) -> Any:
        numbers, most = _COUNTDOWN_LEVELS[level]
        create = generator("countdown", "games.countdown")
        sizes = {"min_numbers": numbers, "max_numbers": numbers, "max_value": most, "min_target": 1, "max_target": 50}
        return create(**sizes, seed=2026 + 1000 * level, size=2**31 - 1)

    def asked(target: int, numbers: Sequence[int]) -> str:
        return f"Make {target} from the numbers {', '.join(map(str, numbers))}. Use each once."

    def problem(level: int, index: int) -> Problem:
        entry = made(level)[index]
        facts = entry["metadata"]
        shots = [(5, (2, 7), "7 - 2"), (12, (4, 3), "3 * 4")]
        messages = [{"role": "system", "content": "Answer with an arithmetic expression only."}]
        for target, numbers, right in shots:
            messages += [{"role": "user", "content": asked(target, numbers)}, {"role": "assistant", "content": right}]
        text = asked(facts["target"], facts["numbers"])
        return Problem(level, chat_ids(tokenizer, [*messages, {"role": "user", "content": text}]), entry)

    def reward(problem: Problem, answer: Answer) -> Verdict:
        text = answer.text.strip()
        # The verifier evaluates the text, so nothing but a short expression may reach it, and no power.
        plain = _EXPRESSION.fullmatch(text) is not None and "**" not in text and "//" not in text
        numbers = sorted(int(number) for number in re.findall(r"\d+", text))
        used = plain and numbers == sorted(problem.facts["metadata"]["numbers"])
        right = used and made(problem.level).score_answer(text, problem.facts) == 1.0
        return Verdict(0.8 * right + 0.1 * used + 0.05 * plain + 0.05 * answer.ended, right)

    return Task("countdown", problem, reward, len(_COUNTDOWN_LEVELS), max_tokens=24)


_CALL = re.compile(r"CALC (-?\d{1,12}) ([+-]) (-?\d{1,12})")


def calculate(text: str) -> str | None:
    """The result of the calculator if a turn is a call, `CALC 12 + 30`: one sum or difference of two numbers."""
    found = _CALL.fullmatch(text.strip())
    if found is None:
        return None
    left, sign, right = found.groups()
    return str(int(left) + (int(right) if sign == "+" else -int(right)))


def calculator(tokenizer: Any) -> Task:
    """Long sums, by a calculator that adds two numbers a turn: seven terms take six calls and the answer.

    The form is worth something only after a call: otherwise a policy learns to guess, and never calls.
    """
    rules = "Use the calculator: CALC and one operation with two numbers. At the end write ANSWER and the number."
    shot = [("user", "12 + 30 - 5 ="), ("assistant", "CALC 12 + 30"), ("user", "42"), ("assistant", "CALC 42 - 5")]
    shot += [("user", "37"), ("assistant", "ANSWER 37")]
    example = [{"role": "system", "content": rules}, *({"role": role, "content": text} for role, text in shot)]

    def problem(level: int, index: int) -> Problem:
        _, entry = _sums(_TOOL_LEVELS, level, index)
        question = {"role": "user", "content": f"{entry['metadata']['expression']} ="}
        return Problem(level, chat_ids(tokenizer, [*example, question]), entry)

    def reply(problem: Problem, text: str) -> list[int] | None:
        result = calculate(text)
        return None if result is None else user_turn_ids(tokenizer, result)

    def reward(problem: Problem, answer: Answer) -> Verdict:
        data, _ = _sums(_TOOL_LEVELS, problem.level, 0)
        said = answer.text.strip()
        number = said.removeprefix("ANSWER ") if said.startswith("ANSWER ") else None
        in_form = answer.ended and number is not None and answer.turns > 1
        return graded(data.score_answer(number, problem.facts), in_form)

    sizes: dict[str, Any] = {"max_tokens": 20, "max_turns": 8, "max_context": 640}
    return Task("calculator", problem, reward, len(_TOOL_LEVELS), reply=reply, **sizes)


#: How many numbers are copied at each level.
_COPY_LEVELS = (10, 20, 40, 80)


def copying(tokenizer: Any) -> Task:
    """Repeat a list of numbers: long answers, about three tokens a number. The reward is the share that is right."""

    def problem(level: int, index: int) -> Problem:
        draw = Random(f"copying {level} {index}")
        numbers = [str(draw.randint(10, 99)) for _ in range(_COPY_LEVELS[level])]
        messages = [{"role": "system", "content": "Answer with the numbers only."}]
        text = f"Repeat these numbers in the same order: {' '.join(numbers)}"
        return Problem(level, chat_ids(tokenizer, [*messages, {"role": "user", "content": text}]), numbers)

    def reward(problem: Problem, answer: Answer) -> Verdict:
        said = answer.text.replace(",", " ").split()
        share = len(common_beginning(said, problem.facts)) / len(problem.facts)
        return Verdict(share, answer.ended and said == problem.facts)

    return Task("copying", problem, reward, len(_COPY_LEVELS), max_tokens=288, max_context=704)


# --- a toy without a tokenizer ---

EOS, COLON = 0, 1
NUMBERS = 16


def counting(tokenizer: Any = None) -> Task:
    """Count down from the number of the prompt and stop, for a tiny model with random weights.

    Token 0 ends an answer, 1 is the colon, k + 2 is the number k. The reward is the length of the correct beginning as
    a share of the right answer.
    """

    def problem(level: int, index: int) -> Problem:
        return Problem(level, [3 + index % (NUMBERS - 1), COLON])

    def reward(problem: Problem, answer: Answer) -> Verdict:
        right = [*range(problem.prompt_ids[0] - 1, 1, -1), EOS]
        share = len(common_beginning(answer.token_ids, right)) / len(right)
        return Verdict(share, share == 1)

    return Task("counting", problem, reward, max_tokens=NUMBERS + 1, max_context=2 * NUMBERS + 16)


TASKS: dict[str, Callable[[Any], Task]] = {
    "chain_sum": chain_sum,
    "countdown": countdown,
    "calculator": calculator,
    "copying": copying,
    "counting": counting,
}
