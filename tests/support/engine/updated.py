"""Engines whose weights change while agents talk to them, watched by a `KVShadow`."""

import random
from collections.abc import Callable

from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench
from tests.support.engine.kv_shadow import KVShadow, follows, in_one_line
from tests.support.engine.updates import Mailbox, Update


class Updated:
    """A bench, its shadow, and updates: version v has the weights of checkpoint v % 2."""

    def __init__(self, model, sources, make=Bench, **engine) -> None:
        self.mailbox, self.model, self._sources = Mailbox(), model, sources
        self.bench = make(model, receiver=self.mailbox, **engine)
        self.shadow = KVShadow(self.bench)

    def ready(self, version: int) -> None:
        self.mailbox.ready = Update(version, self._sources[version % 2], self.model)

    def update(self, version: int) -> None:
        """Apply it now."""
        self.ready(version)
        while self.mailbox.ready is not None or not self.bench.engine.gate.may_apply:
            self.bench.engine.tick()

    def say(self, name: str, prompt: list[int], max_tokens: int = 6, **fields) -> tuple[int, tuple]:
        """Run a request; returns its cached tokens, and what it tells of them."""
        self.bench.submit(name, prompt, max_tokens, **fields)
        self.bench.run()
        return self.bench.done[name].cached_tokens, self.bench.completions[name, 0].kv_versions

    def follows(self, hf_models, name: str, prompt: list[int], index: int = 0) -> bool:
        completion, slots = self.bench.completions[name, index], self.shadow.of[name, index]
        since = self.shadow.since[name, index]
        # Refused drafts shift what comes after them: the step that draws a token writes the KV of the one before.
        versions = [slot.version for slot in slots[: len(prompt) + since]] + completion.versions[since + 1 :]
        return follows(hf_models, prompt, completion.token_ids, versions, since)


class Load:
    """Agents with sessions and without one, groups and equal beginnings, while updates come: some skip numbers."""

    def __init__(self, run: Updated, rng: random.Random, prompt_of, updates: int) -> None:
        self.run, self.rng, self.prompt_of = run, rng, prompt_of
        self.versions = [0]
        for _ in range(updates):
            self.versions.append(self.versions[-1] + rng.choice((1, 1, 1, 2, 5)))
        self.prompts: dict[str, list[int]] = {}  # of the agents' turns
        self._due = self.versions[1:]
        self._stem = prompt_of(18, 7)
        self._rounds = 0

    def go_on(self, enough: Callable[[], bool] = lambda: True) -> None:
        """Conversations of a few turns, until all updates have come and this is true."""
        while self._due or not self.run.shadow.older or not enough():
            self._rounds += 1
            assert self._rounds < 100
            if not self._due:
                self.versions.append(self.versions[-1] + 1)
                self._due.append(self.versions[-1])
            talks = [self._agent(i) for i in range(6)]
            for _ in range(4):
                self._turn(talks)

    def _agent(self, i: int) -> Conversation:
        talk = Conversation(self.run.bench, f"{'abcdef'[i]}{self._rounds}-", self.prompt_of, session=i % 3 < 2)
        alone = self.prompt_of(9, 50 * self._rounds + i)
        talk.said = alone if i < 3 else self._stem[: self.rng.choice((0, 9, 18))]
        return talk

    def _turn(self, talks: list[Conversation]) -> None:
        rng, bench = self.rng, self.run.bench
        for talk in talks:
            talk.submit(rng.randint(1, 7), rng.randint(4, 24), max_kv_age=rng.choice((None, None, None, 0, 1)))
            self.prompts[talk.turn] = list(talk.said)
        bench.submit(f"g{len(self.prompts)}", self._stem[: rng.randint(2, 18)], rng.randint(2, 30), n=4)
        while not all(talk.turn in bench.done for talk in talks):
            if self._due and self.run.mailbox.ready is None and rng.random() < 0.15:
                self.run.ready(self._due.pop(0))
            bench.engine.tick()
        bench.run()
        for talk in talks:
            talk.ended()

    def _told_as_written(self, name: str) -> bool:
        """Whether the found KV is as old as its pages: its state may be of older weights."""
        since, slots = self.run.shadow.since[name, 0], self.run.shadow.of[name, 0]
        runs = self.run.bench.completions[name, 0].kv_versions
        told = [version for at, version, tokens in runs if at == since for _ in range(tokens)]
        return all(version == slot.oldest for version, slot in zip(told, slots, strict=False))

    def check(self, hf_models) -> None:
        """Each token follows from the KV that the steps have written; versions of it are told as they are."""
        bench, shadow = self.run.bench, self.run.shadow
        weights = {version: hf_models[version % 2] for version in self.versions}
        whole = [name for name in self.prompts if in_one_line(shadow.of[name, 0]) and self._told_as_written(name)]
        assert len(whole) > 0.7 * len(self.prompts), "pages of equal content may be mixed, but not often"
        assert [name for name in whole if not self.run.follows(weights, name, self.prompts[name])] == []
        for completion in bench.completions.values():
            for at, version, tokens in completion.kv_versions:
                again = [computed for tokens, computed in completion.recomputed if tokens == at]
                begun = min(again) if again else completion.versions[at]
                assert tokens > 0 and begun - bench.settings.engine.max_kv_age <= version <= begun
        assert shadow.older > 0 and bench.engine.roster.counters.older_tokens > 0
