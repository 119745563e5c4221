"""The floor of a trace: seconds that an engine needs that computes nothing twice and never waits.

All trajectories run at once, as many as there are agents. A decode step draws a token for every trajectory that waits
for neither its tool nor its prompt. It takes the bytes of weights and KV, each read once, over the bandwidth: the
system prompt once for all rows, a group's task and what a fork shares with its parent once for these rows. Distinct
prompt tokens take two operations for each weight, over the rate of the matrix units. Tools take their time. KV never
runs out, and nothing is computed in the background.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.agents.trace import Tokens, Trajectory, tokens_of, turns
from scripts.bench.shapes import StepBytes


@dataclass(frozen=True, slots=True)
class Machine:
    """What the floor counts on: bytes and operations a second of one GPU, and GPUs that share the work."""

    bytes_per_s: float
    flops: float
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds in all, of decode steps, and of prompts; the number of steps."""

    total_s: float
    decode_s: float
    prompts_s: float
    steps: int


@dataclass(slots=True)
class _Path:
    """The turns of one trajectory: new tokens of each prompt, tokens of its context that no other row reads with it."""

    fresh: list[int]
    own: list[int]


def floor_of(trajectories: Sequence[Trajectory], agents: int, need: StepBytes, machine: Machine) -> Floor:
    """Run the trace on paper. `need.weights` counts as bf16: two bytes a weight."""
    paths = _paths(trajectories)
    weights = (need.weights + need.expert * need.top_k) / 2
    prompt_s = 2 * weights / machine.flops / machine.workers
    count = len(trajectories)
    turn = np.zeros(count, int)
    left = np.zeros(count, int)  # tokens of the present turn
    own = np.zeros(count)  # tokens of context of its own
    ready_s = np.full(count, np.inf)  # when it may ask
    groups = np.array([one.group for one in trajectories])
    system = trajectories[0].system_len
    task = np.array([one.prompt_len - one.system_len for one in trajectories])
    forks = {i: one for i, one in enumerate(trajectories) if one.fork is not None}
    number_of = {one.name: i for i, one in enumerate(trajectories)}
    waiting = list(range(count))
    now_s = decode_s = prompts_s = 0.0
    steps = busy = 0
    while True:
        while waiting and busy < agents:
            i = waiting.pop(0)
            busy += 1
            ready_s[i] = np.inf if i in forks else now_s
        for i, one in list(forks.items()):
            assert one.fork is not None
            if i not in waiting and turn[number_of[one.group, one.fork[0]]] > one.fork[1]:
                ready_s[i] = now_s
                del forks[i]
        for i in map(int, np.flatnonzero(ready_s <= now_s)):  # a prompt, and with it the first token
            took_s = paths[i].fresh[turn[i]] * prompt_s
            prompts_s, now_s = prompts_s + took_s, now_s + took_s
            left[i], own[i], ready_s[i] = trajectories[i].out_lens[turn[i]] - 1, paths[i].own[turn[i]] + 1, np.inf
            if not left[i]:
                left[i] = -1
        rows = np.flatnonzero(left > 0)
        if len(rows):
            read = own[rows].sum() + sum(task[i] for i in {groups[i]: i for i in rows}.values()) + system
            took_s = need.of_step(len(rows), read / machine.workers) / machine.bytes_per_s
            decode_s, now_s, steps = decode_s + took_s, now_s + took_s, steps + 1
            left[rows] -= 1
            own[rows] += 1
            left[rows[left[rows] == 0]] = -1
        for i in map(int, np.flatnonzero(left < 0)):
            left[i], done = 0, turn[i]
            turn[i] += 1
            if turn[i] == len(trajectories[i].out_lens):
                busy -= 1
            else:
                ready_s[i] = now_s + trajectories[i].tool_s(done)
        if not (left > 0).any() and not (ready_s <= now_s).any() and not (waiting and busy < agents):
            if not np.isfinite(ready_s).any() and not any(i not in waiting for i in forks):
                return Floor(float(now_s), float(decode_s), prompts_s, steps)
            if np.isfinite(ready_s).any():
                now_s = max(now_s, ready_s.min())


def _paths(trajectories: Sequence[Trajectory]) -> list[_Path]:
    paths = {one.name: _Path([], []) for one in trajectories}
    counted = Tokens()
    parents: dict[tuple[int, int], int] = {}
    for request in turns(trajectories):
        one = request.trajectory
        before = counted.distinct
        counted.add(request)
        path = paths[one.name]
        if request.number == 0 and one.fork is not None:
            parents[one.name] = tokens_of(request.prompt)
        path.fresh.append(counted.distinct - before)
        cut_back = any(at <= request.number for at, _ in one.compact)
        path.own.append(
            tokens_of(request.prompt) - (one.prompt_len if cut_back else parents.get(one.name, one.prompt_len))
        )
    return list(paths.values())
