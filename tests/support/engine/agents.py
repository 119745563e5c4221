"""Agents that come back: every turn's prompt is all that was said before, and what a tool has answered."""

import random
from collections.abc import Callable

from tests.support.engine.conversation import LEASE_S
from tests.support.engine.harness import Bench, prompt_of


class Agents:
    """Agents with a system prompt in common. Their tools answer after some ticks."""

    def __init__(
        self,
        bench: Bench,
        count: int = 8,
        turns: int = 4,
        sessions: bool = False,
        seed: int = 0,
        prompt_of: Callable[[int, int], list[int]] = prompt_of,
    ) -> None:
        self.bench, self.turns, self.sessions = bench, turns, sessions
        self._prompt_of = prompt_of
        self._rng = random.Random(seed)
        self._system = prompt_of(37, 999)
        self.said = [[*self._system, *prompt_of(self._rng.randint(9, 25), i)] for i in range(count)]
        self.distinct = len(self._system) + sum(len(said) - len(self._system) for said in self.said)
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self._turn = [0] * count
        self._due = [self._rng.randint(0, 9) for _ in range(count)]  # ticks until the next turn begins; -1: it runs

    def run(self, most_ticks: int = 50_000) -> None:
        """All turns of all agents."""
        for _ in range(most_ticks):
            if min(self._turn) == self.turns:
                return self.bench.run()
            self.tick()
        raise AssertionError("the agents are not done")

    def tick(self) -> None:
        """One tick of the engine; turns that are due begin, and those that have ended are followed by a tool."""
        for agent, due in enumerate(self._due):
            if due > 0:
                self._due[agent] -= 1
            elif due == 0 and self._turn[agent] < self.turns:
                self._begin(agent)
            elif due < 0 and self._name(agent) in self.bench.done:
                self._end(agent)
        self.bench.engine.tick()

    def _name(self, agent: int) -> str:
        return f"a{agent}t{self._turn[agent]}"

    def _begin(self, agent: int) -> None:
        fields = self.fields_of(agent)
        sampling = {"temperature": 1.0, "seed": 100 * agent + self._turn[agent]}
        length = random.Random(sampling["seed"]).randint(5, 30)
        self.bench.submit(self._name(agent), self.said[agent], length, sampling=sampling, **fields)
        self._due[agent] = -1

    def fields_of(self, agent: int) -> dict[str, object]:
        """More fields of a turn that begins."""
        return {"session": ("c", f"s{agent}"), "session_lease_s": LEASE_S} if self.sessions else {}

    def _end(self, agent: int) -> None:
        done = self.bench.completions[self._name(agent), 0]
        self._turn[agent] += 1
        answer = self._prompt_of(10 + agent, 1000 + 100 * agent + self._turn[agent])
        self.said[agent] = [*self.said[agent], *done.token_ids, *answer]
        self.logprobs[agent] += done.raw_logprobs
        if self._turn[agent] < self.turns:
            self.distinct += len(answer)
        self._due[agent] = self._rng.randint(0, 40)

    @property
    def computed(self) -> int:
        """Prompt tokens that prefills computed."""
        return self.bench.engine.roster.counters.prefilled_tokens

    @property
    def to_compute(self) -> int:
        """Prompt tokens whose KV no earlier turn left: the last token drawn in a turn has none, and the page in which
        the system prompt ends is not full."""
        count, shared = len(self.said), len(self._system) % self.bench.settings.engine.page_size
        return self.distinct + count * (self.turns - 1) + shared * (count - 1)
