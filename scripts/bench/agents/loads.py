"""Three loads, made from a seed: short, long and very long agents; each also small, for a CPU.

`short` is the load of docs/benchmarks/agents.md. `long` has the figures of published traces of coding agents: 33 turns
by median, contexts from 12K to 80K tokens, 5 s between two turns by median and 81 s at the 99th percentile. At best
96% of its prompts are known; the traces have 94 to 96%. `very_long` goes to 180K tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scripts.bench.agents.trace import Trajectory


@dataclass(frozen=True, slots=True)
class Spread:
    """Numbers from `least` to `most`: log-normal around `median`; exponential from `least` on; else even."""

    least: float
    most: float
    median: float = 0.0
    sigma: float = 0.0
    mean: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        """One of them."""
        if self.median:
            drawn = rng.lognormal(math.log(self.median), self.sigma)
        elif self.mean:
            drawn = self.least + rng.exponential(self.mean - self.least)
        else:
            drawn = rng.uniform(self.least, self.most)
        return min(max(drawn, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Load:
    """What trajectories are drawn from; lengths in tokens, times in seconds."""

    trajectories: int
    streams: int  # of a group
    system: int
    task: Spread
    turns: Spread
    out: Spread
    obs: Spread
    tool_s: Spread
    most_context: int  # a trajectory ends before its context is longer

    def scaled(self, scale: Scale) -> Load:
        """A smaller one."""
        return replace(
            self,
            trajectories=min(self.trajectories, scale.trajectories),
            system=round(self.system * scale.tokens),
            turns=replace(self.turns, most=min(self.turns.most, scale.most_turns)),
            most_context=round(self.most_context * scale.tokens),
            **{name: _times(getattr(self, name), scale.tokens) for name in ("task", "out", "obs")},
            tool_s=_times(self.tool_s, scale.seconds),
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """How much smaller a load is."""

    trajectories: int
    tokens: float
    seconds: float
    most_turns: int


def _times(spread: Spread, factor: float) -> Spread:
    return Spread(
        spread.least * factor, spread.most * factor, spread.median * factor, spread.sigma, spread.mean * factor
    )


_OUT = Spread(40, 2000, median=200, sigma=0.8)
_GAP_S = Spread(0.1, 300, median=5.2, sigma=math.log(81.4 / 5.2) / 2.326)  # 2.326: the 99th percentile of a normal one
LOADS = {
    "short": Load(
        trajectories=96, streams=1, system=1500, task=Spread(300, 1500), turns=Spread(8, 8),
        out=Spread(60, 2000, median=350, sigma=0.8), obs=Spread(200, 1400), tool_s=Spread(0.2, 12, mean=2),
        most_context=1 << 20,
    ),
    "long": Load(
        trajectories=64, streams=8, system=10_000, task=Spread(1000, 3000), turns=Spread(8, 100, median=35, sigma=0.5),
        out=_OUT, obs=Spread(50, 8000, median=1000, sigma=0.9), tool_s=_GAP_S, most_context=80_000,
    ),
    "very_long": Load(
        trajectories=64, streams=8, system=10_000, task=Spread(1000, 5000), turns=Spread(8, 150, median=43, sigma=0.5),
        out=_OUT, obs=Spread(50, 30_000, median=1900, sigma=1.0), tool_s=_GAP_S, most_context=180_000,
    ),
}  # fmt: skip
SCALES = {
    "full": Scale(trajectories=1 << 20, tokens=1.0, seconds=1.0, most_turns=1 << 20),
    "small": Scale(trajectories=8, tokens=1 / 8, seconds=1 / 4, most_turns=24),
}


def make_trace(
    load: Load, seed: int, *, trajectories: int | None = None, streams: int | None = None,
    most_turns: int | None = None, forks: float = 0.0, compact: float = 0.0,
) -> list[Trajectory]:  # fmt: skip
    """The trajectories of a load, the same for the same arguments; fewer of them are the first ones of more.

    Args:
        load: what they are drawn from.
        seed: of all draws.
        trajectories: how many; None: as many as the load has.
        streams: of a group; None: as the load has.
        most_turns: of a trajectory; None: as the load has.
        forks: share of the streams after a group's first one that begin as a fork of an earlier one.
        compact: share of trajectories whose history is cut to half of its length, before the turn in their middle.

    Raises:
        ValueError: forks without groups of two streams or more.
    """
    streams, wanted = streams or load.streams, trajectories or load.trajectories
    if forks and streams < 2:
        raise ValueError("forks need groups of two streams or more: --streams 8")
    if most_turns is not None:
        load = replace(load, turns=replace(load.turns, least=min(load.turns.least, most_turns), most=most_turns))
    made: list[Trajectory] = []
    for number in range(wanted):
        group, stream = divmod(number, streams)
        task = round(load.task.draw(np.random.default_rng([seed, 0, group])))
        made.append(_trajectory(load, seed, group, stream, max(1, task), made[number - stream :], forks, compact))
    return made


def _trajectory(
    load: Load, seed: int, group: int, stream: int, task: int, earlier: Sequence[Trajectory], forks: float,
    compact: float,
) -> Trajectory:  # fmt: skip
    rng = np.random.default_rng([seed, 1, group, stream])
    chances = rng.random(4)
    prompt = context = load.system + task
    turns = round(load.turns.draw(rng))
    fork = None
    if earlier and chances[0] < forks:
        parent = earlier[int(chances[1] * len(earlier))]
        if parent.fork is None and len(parent.out_lens) > 1:
            at = int(chances[2] * (len(parent.out_lens) - 1))
            fork = parent.stream, at
            context += sum(parent.out_lens[: at + 1]) + sum(parent.obs_lens[: at + 1])
            turns = max(1, turns - at - 1)
    outs: list[int] = []
    answers: list[int] = []
    times: list[float] = []
    for _ in range(turns):
        out, obs = (max(4, round(spread.draw(rng))) for spread in (load.out, load.obs))
        if outs and context + out > load.most_context:
            break
        outs.append(out)
        answers.append(obs)
        times.append(round(load.tool_s.draw(rng), 3))
        context += out + obs
    middle = len(outs) // 2
    cuts: tuple[tuple[int, int], ...] = ()
    if middle and chances[3] < compact:
        own = context - sum(outs[middle:]) - sum(answers[middle:])
        cuts = ((middle, prompt + (own - prompt) // 2),)
    return Trajectory(group, stream, prompt, tuple(outs), tuple(answers), tuple(times), load.system, fork, cuts)
