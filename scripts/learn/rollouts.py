"""Has a worker answer problems: groups of completions, or conversations of several turns; counts what was computed.

Token ids go both ways: what the model drew is sent back as it came, and the environment's text is tokenized by itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from scripts.learn.recipe import Recipe
from scripts.learn.tasks import Answer, Problem, Task, Verdict
from trainer_bridge import AsyncRolloutClient, GenerateResult


@dataclass(frozen=True)
class Sample:
    """One completion or conversation after its prompt. Arrays have an entry for each of its tokens."""

    prompt_ids: list[int]
    token_ids: list[int]
    drawn: np.ndarray  # bool: the model drew it; the others are the environment's
    logprobs: np.ndarray  # float32, the worker's; 0 for tokens that were not drawn
    versions: np.ndarray  # int64, of the weights that drew it; -1 for tokens that were not drawn
    verdict: Verdict
    turns: int


@dataclass(frozen=True)
class Group:
    """All samples of a problem, and prompt tokens: sent, new among them, and computed."""

    problem: Problem
    samples: list[Sample]
    sent: int
    new: int
    computed: int

    @property
    def teaches(self) -> bool:
        """Whether its rewards differ. Otherwise all its advantages are 0."""
        return len({one.verdict.reward for one in self.samples}) > 1


async def answer_batch(
    client: AsyncRolloutClient, task: Task, decode: Decode, problems: Iterator[Problem], how: Draw, recipe: Recipe
) -> list[Group]:
    """Groups for a step: `prompts` or more of them teach, or the rounds are over. Some may not teach.

    Each round is answered whole before the next one is asked for, so that short answers are not preferred (dynamic
    sampling of DAPO, arXiv 2503.14476).
    """
    groups: list[Group] = []
    for _ in range(recipe.rounds):
        teaching = sum(group.teaches for group in groups)
        if teaching >= recipe.prompts:
            break
        wanted = (recipe.prompts - teaching) * len(groups) / max(1, teaching)
        some = list(islice(problems, min(recipe.prompts, math.ceil(wanted)) if groups else recipe.prompts))
        groups += await answer_all(client, task, decode, some, replace(how, seed=how.seed + len(groups) * how.count))
    return groups


async def answer_all(
    client: AsyncRolloutClient, task: Task, decode: Decode, problems: Sequence[Problem], how: Draw
) -> list[Group]:
    """A group of samples for each problem. Raises RuntimeError if a completion was cut by a fault."""
    ask = _converse if task.reply is not None else _complete
    jobs = (ask(client, task, decode, problem, how, how.seed + i * how.count) for i, problem in enumerate(problems))
    return list(await asyncio.gather(*jobs))


Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Draw:
    """How to draw: samples of each problem, the first one's seed, the oldest weights, and the sampling."""

    count: int
    seed: int
    min_version: int
    temperature: float
    max_tokens: int
    priority: int = 0

    def fields(self, task: Task) -> dict[str, Any]:
        """For `generate`."""
        fields = {"min_version": self.min_version, "temperature": self.temperature, "max_tokens": self.max_tokens}
        stop = {"stop": {"token_ids": list(task.stop)}} if task.stop else {}
        return {**fields, "priority": self.priority, **stop}


def training_draw(recipe: Recipe, task: Task, step: int) -> Draw:
    """Of the batch of a step (from 1 on). Its weights are at most `ahead` versions older than the trainer's."""
    seed = (recipe.seed * 100_000 + step) * recipe.rounds * recipe.prompts * recipe.group_size
    oldest = max(0, step - 1 - recipe.ahead)
    return Draw(recipe.group_size, seed, oldest, recipe.temperature, task.max_tokens)


def held_out_draw(task: Task, version: int) -> Draw:
    """Greedy, by weights that are not older than `version`; before the other requests."""
    return Draw(1, 0, version, 0.0, task.max_tokens, priority=1)


async def _complete(
    client: AsyncRolloutClient, task: Task, decode: Decode, problem: Problem, how: Draw, seed: int
) -> Group:
    result = await client.generate(problem.prompt_ids, n=how.count, seed=seed, **how.fields(task))
    samples = []
    for item in checked(result).completions:
        ids = item.token_ids.tolist()
        answer = Answer(ids, decode(ids), item.finish_reason == "stop")
        versions = np.repeat(*np.array(item.versions, int).T)
        drawn = np.ones(len(ids), bool)
        samples.append(Sample(problem.prompt_ids, ids, drawn, item.logprobs, versions, task.reward(problem, answer), 1))
    sent, computed = result.prompt_tokens, result.prompt_tokens - result.cached_tokens
    return Group(problem, samples, sent, sent, computed)


async def _converse(
    client: AsyncRolloutClient, task: Task, decode: Decode, problem: Problem, how: Draw, seed: int
) -> Group:
    talks = (_talk(client, task, decode, problem, how, seed + i) for i in range(how.count))
    told = await asyncio.gather(*talks)
    sent, new, computed = (sum(counts) for counts in zip(*(counts for _, counts in told), strict=True))
    # The prompt is new once for the group.
    new -= (how.count - 1) * len(problem.prompt_ids)
    return Group(problem, [sample for sample, _ in told], sent, new, computed)


async def _talk(
    client: AsyncRolloutClient, task: Task, decode: Decode, problem: Problem, how: Draw, seed: int
) -> tuple[Sample, tuple[int, int, int]]:
    """A conversation, and its prompt tokens: sent, new, computed."""
    assert task.reply is not None
    ids: list[int] = []
    drawn, logprobs, versions = [], [], []
    sent = computed = 0
    new = len(problem.prompt_ids)
    async with client.session() as session:
        for turn in range(1, task.max_turns + 1):
            result = await session.generate([*problem.prompt_ids, *ids], seed=seed, **how.fields(task))
            item = checked(result).completions[0]
            said = item.token_ids.tolist()
            ids += said
            drawn.append(np.ones(len(said), bool))
            logprobs.append(item.logprobs)
            versions.append(np.repeat(*np.array(item.versions, int).T))
            sent += result.prompt_tokens
            computed += result.prompt_tokens - result.cached_tokens
            ended, text = item.finish_reason == "stop", decode(said)
            answered = task.reply(problem, text) if ended and turn < task.max_turns else None
            room = task.max_context - len(problem.prompt_ids) - len(ids) - how.max_tokens
            if answered is None or len(answered) > room:
                break
            last, *reply = answered
            if last != said[-1]:
                raise ValueError(f"the model ended its turn with token {said[-1]}, and the reply begins with {last}")
            ids += reply
            new += len(reply)
            drawn.append(np.zeros(len(reply), bool))
            logprobs.append(np.zeros(len(reply), np.float32))
            versions.append(np.full(len(reply), -1))
    verdict = task.reward(problem, Answer(ids, text, ended, turn))
    joined = np.concatenate(drawn), np.concatenate(logprobs), np.concatenate(versions)
    return Sample(problem.prompt_ids, ids, *joined, verdict, turn), (sent, new, computed)


def checked(result: GenerateResult) -> GenerateResult:
    """The result, if its completions ended by a stop token or their length. Raises RuntimeError."""
    broken = [item.error or item.finish_reason for item in result.completions]
    broken = [why for why in broken if why not in ("stop", "length")]
    if broken:
        raise RuntimeError(f"{len(broken)} completions of a request did not end: {broken[:3]}")
    return result
