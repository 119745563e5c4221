"""Replays trajectories in a closed loop: N agents at once, each of which asks, waits for its tool, and asks again."""

import asyncio
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scripts.bench.agents.clients import Ask, Gauge, Gauged, Turns
from scripts.bench.agents.trace import Part, Parts, Tokens, Trajectory, Turn, answer, cut, drawn, first_prompt

_FIRST_TOKEN = 10  # after the special tokens of the shapes
_SAMPLE_S = 0.25
_SHOW_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn: when it was sent and ended, seconds after the start, and until its first token; `versions` as told."""

    sent_s: float
    ended_s: float
    first_s: float
    versions: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the weights: its version, when it was published, seconds until in use, and the pause."""

    version: int
    published_s: float
    applied_s: float
    pause_s: float


@dataclass(slots=True)
class Run:
    """What a replay saw. Times are seconds after its start."""

    tokens: Tokens = field(default_factory=Tokens)
    turns: list[Asked] = field(default_factory=list)
    staleness: list[tuple[int, int]] = field(default_factory=list)  # versions behind at the end, tokens
    trajectories: int = 0
    forks: int = 0
    cuts: int = 0
    samples: list[tuple[float, Gauged]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    total_s: float = 0.0
    before: Gauged | None = None
    after: Gauged | None = None


#: Publishes new weights; returns their version, seconds until in use, and the pause in seconds.
Publish = Callable[[], tuple[int, float, float]]


class Replay:
    """One replay.

    Args:
        trajectories: in the order in which agents take them.
        turns: asks the engine.
        gauge: reads the engine's figures.
        agents: trajectories at once.
        vocab: token ids are below this.
        seed: of the ids that are not drawn by the model.
        limit_s: no turn begins from then on, and no tool is waited for; None: all turns of all trajectories.
        publish: publishes an update; it is called in a thread.
        update_every_s: seconds between two updates; 0: none.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        turns: Turns,
        gauge: Gauge,
        *,
        agents: int,
        vocab: int,
        seed: int,
        limit_s: float | None = None,
        publish: Publish | None = None,
        update_every_s: float = 0.0,
    ) -> None:
        self._trajectories, self._turns, self._gauge = trajectories, turns, gauge
        self._agents, self._vocab, self._seed, self._limit_s = agents, vocab, seed, limit_s
        self._publish, self._update_every_s = publish, update_every_s
        self._run = Run()
        self._texts: dict[tuple[str | int, ...], np.ndarray] = {}
        forked = {(one.group, *one.fork) for one in trajectories if one.fork is not None}
        self._forked = {name: asyncio.Event() for name in forked}
        self._ends: dict[tuple[int, int, int], Parts] = {}
        self._newest = 0

    async def run(self) -> Run:
        """Replay all. Raises what a request raises, and RuntimeError for a completion of another length."""
        self._run.before = await self._gauge.settled()
        self._began_s = time.perf_counter()
        queue = iter(self._trajectories)
        watch = [asyncio.create_task(self._sample())]
        if self._publish is not None and self._update_every_s:
            watch.append(asyncio.create_task(self._update(self._publish)))
        agents = asyncio.gather(*(self._agent(queue) for _ in range(self._agents)))
        everyone: list[asyncio.Future[Any]] = [agents, *watch]
        try:
            done, _ = await asyncio.wait(everyone, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises; tasks that watch do not end by themselves
        finally:
            for task in everyone:
                task.cancel()
            await asyncio.gather(*everyone, return_exceptions=True)
        self._run.after = await self._gauge.settled()
        return self._run

    async def _agent(self, queue: Iterator[Trajectory]) -> None:
        for trajectory in queue:
            if self._over():
                break
            try:
                await self._follow(trajectory)
            finally:
                for name, event in self._forked.items():  # forks of turns that it never reached do not wait for them
                    if name[:2] == trajectory.name:
                        event.set()
        self._run.total_s = self._now()

    async def _follow(self, trajectory: Trajectory) -> None:
        history = first_prompt(trajectory)
        if trajectory.fork is not None:
            begin = (trajectory.group, *trajectory.fork)
            await self._forked[begin].wait()
            if begin not in self._ends:
                return
            history = self._ends[begin]
            self._run.forks += 1
        versions: list[tuple[int, int]] = []
        async with self._turns.trajectory() as ask:
            for number in range(len(trajectory.out_lens)):
                if self._over():
                    return
                prompt = cut(trajectory, number, history)
                self._run.cuts += prompt is not history
                history = await self._turn(ask, Turn(trajectory, number, prompt), versions)
                if (event := self._forked.get((*trajectory.name, number))) is not None:
                    self._ends[*trajectory.name, number] = history
                    event.set()
                if number + 1 < len(trajectory.out_lens):
                    await self._wait_for_tool(trajectory.tool_s(number))
        self._run.trajectories += 1
        self._run.staleness += [(self._newest - version, tokens) for version, tokens in versions]

    async def _wait_for_tool(self, seconds: float) -> None:
        """Wait so long, but not beyond the time limit: no turn follows there."""
        due_s = self._now() + seconds
        if self._limit_s is not None:
            due_s = min(due_s, self._limit_s)
        while (left_s := due_s - self._now()) > 0:
            await asyncio.sleep(left_s)

    async def _turn(self, ask: Ask, turn: Turn, versions: list[tuple[int, int]]) -> Parts:
        """Ask for a turn; returns the history after it, with the tool's answer if there is one."""
        out = drawn(turn.trajectory, turn.number)
        tokens = np.concatenate([self._text(part) for part in turn.prompt])
        sent_s = self._now()
        answered = await ask(tokens, out.length)
        if len(answered.token_ids) != out.length:
            raise RuntimeError(f"{turn.trajectory.name}, turn {turn.number}: {len(answered.token_ids)} tokens instead "
                               f"of {out.length}")  # fmt: skip
        self._texts[out.source] = answered.token_ids
        self._run.turns.append(Asked(sent_s, self._now(), answered.first_s, answered.versions))
        self._run.tokens.add(turn)
        versions += answered.versions
        self._newest = max(self._newest, *(version for version, _ in answered.versions), 0)
        if turn.number < len(turn.trajectory.obs_lens):
            return (*turn.prompt, out, answer(turn.trajectory, turn.number))
        return (*turn.prompt, out)

    def _text(self, part: Part) -> np.ndarray:
        """The ids of a part, int32 [length]."""
        text = self._texts.get(part.source)
        if text is None or len(text) < part.begin + part.length:
            words = [zlib.crc32(word.encode()) if isinstance(word, str) else word for word in part.source]
            rng = np.random.default_rng([self._seed, *words])
            text = rng.integers(_FIRST_TOKEN, self._vocab, part.begin + part.length, np.int32)
            self._texts[part.source] = text
        return text[part.begin : part.begin + part.length]

    async def _sample(self) -> None:
        shown_s = 0.0
        while True:
            gauged, now_s = await self._gauge.now(), self._now()
            self._run.samples.append((now_s, gauged))
            if now_s - shown_s > _SHOW_EVERY_S:
                shown_s = now_s
                print(
                    f"{now_s:.0f} s: {self._run.trajectories} of {len(self._trajectories)} trajectories, "
                    f"{len(self._run.turns)} turns, {self._run.tokens.drawn} tokens drawn, {gauged.running} running",
                    file=sys.stderr,
                    flush=True,
                )
            await asyncio.sleep(_SAMPLE_S)

    async def _update(self, publish: Publish) -> None:
        due_s = 0.0
        while True:
            due_s = max(due_s + self._update_every_s, self._now())
            await asyncio.sleep(due_s - self._now())
            published_s = self._now()
            version, applied_s, pause_s = await asyncio.to_thread(publish)
            self._run.updates.append(Update(version, published_s, applied_s, pause_s))
            self._newest = max(self._newest, version)

    def _over(self) -> bool:
        return self._limit_s is not None and self._now() >= self._limit_s

    def _now(self) -> float:
        return time.perf_counter() - self._began_s
