"""Agents amid all that may happen to their KV: they have the tokens of engines where nothing ever happens.

Agents go on, branch off from each other's finished or running turns, cut their histories, and ask for groups; some in
sessions, some with an adapter or a constraint. Meanwhile pages and states are evicted, written to the host and to disk
and fetched; rows are preempted and draft; the engine sleeps, pauses, gets updates, and is rebuilt after a fault or told
to cancel, after which requests are resumed. Updates bring the weights that are there, so each request has one answer:
that of an engine that has room, starts anew with it, and keeps nothing.

A history is a list of token ids. A negative number is a picture, -1 the first of `PICTURES`: no cut goes through it.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.constraints.matcher import ANYTHING
from rollout.engine.build import rebuild_engine
from rollout.engine.kv.tiers.moves import CopyCosts
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel, EndSession, Prefetch, PutAdapter, Sleep, WakeUp
from rollout.engine.messages.to_service import Done
from rollout.models.cut import kept_values
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.constraints import SIZE, Cycle, X, Y
from tests.support.engine.conversation import LEASE_S
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load
from tests.support.engine.images import encoded, encoder_of, engine_prompt
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import LateDevice
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.hybrids import make_hybrid
from tests.support.models.images import IMAGE, ImagePrompt, make_model, picture

ADAPTERS, RANK, AGENTS = 2, 4, 7
PICTURES = [picture(2, 2 + 2 * (i % 3), i) for i in range(5)]  # of one to three tokens
LATE = ("h2d", "compute", "d2h", "kv_out", "kv_in", "state_out", "state_in")


@dataclass
class Turn:
    """A request, and the requests that brought its tokens: more than one if it was interrupted."""

    name: str
    prompt: list[int]
    length: int
    n: int
    seed: int
    adapter: str | None
    constrained: bool
    session: dict[str, Any] = field(default_factory=dict)
    parts: list[list[str]] = field(default_factory=list)  # by completion

    def submit(self, bench: Bench) -> None:
        """Ask for all of it."""
        self.parts = [[self.name] for _ in range(self.n)]
        sampling = {"temperature": 1.0, "seed": self.seed}
        bench.submit(
            self.name,
            seen(bench, self.prompt),
            self.length,
            n=self.n,
            **self._fields(bench, sampling, 0),
            **self.session,
        )

    def resume(self, bench: Bench) -> None:
        """Ask for what is missing."""
        for index, parts in enumerate(self.parts):
            had, last = self.tokens(bench, index), bench.completions[parts[-1], self._index(index)]
            if last.finish is None or last.finish.reason in ("length", "stop"):
                continue
            parts.append(f"{self.name} {index} part {len(parts)}")
            fields = self._fields(bench, {"temperature": 1.0, "seed": last.seed}, len(had))
            prior = Prior(np.array(had, np.int32))
            bench.submit(parts[-1], seen(bench, self.prompt), self.length, prior=prior, **fields)

    def tokens(self, bench: Bench, index: int = 0) -> list[int]:
        return [token for part in self._parts(bench, index) for token in part.token_ids]

    def logprobs(self, bench: Bench, index: int) -> list[float]:
        return [value for part in self._parts(bench, index) for value in part.raw_logprobs]

    def over(self, bench: Bench) -> bool:
        """Whether all tokens are there."""
        last = [bench.completions[parts[-1], self._index(i)].finish for i, parts in enumerate(self.parts)]
        return all(finish is not None and finish.reason in ("length", "stop") for finish in last)

    def _fields(self, bench: Bench, sampling: dict[str, Any], at: int) -> dict[str, Any]:
        vocab = bench.engine.executor.step.model.spec.vocab
        constraint = Cycle([X, Y, SIZE], vocab=vocab, at=at) if self.constrained else ANYTHING
        return {"sampling": sampling, "adapter": self.adapter, "constraint": constraint, "stream_every": 3}

    def _index(self, index: int) -> int:
        return index if len(self.parts[index]) == 1 else 0

    def _parts(self, bench: Bench, index: int) -> list[Any]:
        first, *more = self.parts[index]
        return [bench.completions[first, index], *(bench.completions[name, 0] for name in more)]


def seen(bench: Bench, history: list[int]) -> Prompt:
    """The prompt of a history."""
    shown = ImagePrompt()
    for each in history:
        if each < 0:
            shown.places.append((len(shown.ids), PICTURES[-1 - each]))
            shown.ids += [IMAGE] * shown.length(-1)
        else:
            shown.ids.append(each)
    if not shown.places:
        return Prompt.of_tokens(np.array(shown.ids, np.int32))
    return engine_prompt(shown, encoder_of(bench).spec)


@dataclass
class Kept:
    """The weights of the start, for updates."""

    views: dict[str, torch.Tensor]

    def hf_views(self) -> dict[str, torch.Tensor]:
        return self.views


class Play:
    """One engine, its agents, and what happens to them."""

    def __init__(self, folder: Path, disk: Path, rng: random.Random, images: bool) -> None:
        self.rng, self.folder, self.images = rng, folder, images
        model = load(folder, images=images)
        self.vocab, self.weights = model.spec.vocab, self._copy(model)
        self.bench = Sleeping(model, self._device(), Mailbox(), **self._settings(model, disk))
        self.turns: list[Turn] = []
        self.histories: list[list[int]] = [self.some(rng.randint(9, 40)) for _ in range(AGENTS)]
        self._stem = self.some(37)
        self._version = self._tokens = 0
        put_adapters(self.bench)

    @staticmethod
    def _copy(model) -> Kept:
        return Kept({name: kept_values(view).clone() for name, view in model.hf_views().items()})

    def _device(self) -> LateDevice:
        rng, most_s = random.Random(self.rng.random()), self.rng.choice([0.0, 0.0, 0.002])
        return LateDevice({name: lambda: rng.random() * most_s for name in LATE})

    def _settings(self, model, disk: Path) -> dict[str, Any]:
        rng, page_size = self.rng, self.rng.choice([4, 4, 16])
        page_bytes = model.spec.kv_bytes_per_token(torch.float32) * page_size
        host = rng.choice([8, 40]) * page_bytes
        host += max(host, rng.choice([2, 9, 20]) * model.spec.state_bytes(torch.float32))
        swap = rng.choice([{}, {"max_kv_age": rng.choice([1, 9])}, {"kv_on_swap": "recompute"}])
        return swap | {
            "page_size": page_size,
            "kv_pages": rng.choice([260, 400]) // page_size,
            "host_kv_gib": host / 2**30,
            "host_kv_piece_mib": rng.choice([1, 3, 20]) * page_bytes / 2**20,
            "disk_kv_gib": rng.choice([1, 30, 30]) * host / 2**30,
            "disk_kv_folder": str(disk),
            "max_rows": rng.choice([2, 5, 8]),
            "state_snapshots": rng.choice([3, 12]),
            "prefill_chunk_tokens": rng.choice([16, 64]),
            "pipeline_depth": rng.choice([1, 2]),
            "speculation": rng.choice(["off", "ngram"]),
            "adapter_slots": rng.choice([1, ADAPTERS]),
            "adapter_rank": RANK,
        }

    def some(self, count: int) -> list[int]:
        """Tokens that nobody has said, and pictures."""
        rng = self.rng
        return [
            -1 - rng.randrange(len(PICTURES)) if self.images and rng.random() < 0.1 else rng.randrange(self.vocab)
            for _ in range(count)
        ]

    def round(self) -> None:
        """A turn of each agent; at its end the books agree."""
        turns = list[Turn]()
        for agent in range(AGENTS):  # some branch off from turns that run
            turns.append(self._turn(agent))
            turns[-1].submit(self.bench)
            self.ticks(self.rng.choice([0, 1, 6]))
        for _ in range(self.rng.choice([0, 2, 5])):
            self.ticks(self.rng.choice([1, 8, 20]))
            self.happen(turns)
            self.ticks(2)  # what was ordered is done
            for turn in turns:
                turn.resume(self.bench)
        self.bench.run()
        self.bench.engine.check_integrity()
        assert all(turn.over(self.bench) for turn in turns)
        for agent, turn in enumerate(turns):
            self.histories[agent] = turn.prompt + turn.tokens(self.bench)

    def _turn(self, agent: int) -> Turn:
        rng, said = self.rng, self.histories[agent]
        match rng.choice(["go on"] * 5 + ["cut", "branch", "begin"]):
            case "cut":
                said = said[: rng.randint(1, len(said))] + said[rng.randint(0, len(said)) :]
            case "branch" if self.turns:
                other = rng.choice(self.turns[-AGENTS:])
                said = other.prompt + other.tokens(self.bench, rng.randrange(other.n))
                said = said[: rng.randint(1, len(said))]
            case "begin":
                said = self._stem[: rng.randint(1, len(self._stem))]
        prompt = said[-150:] + self.some(rng.randint(1, 12))
        n = rng.choice([1, 1, 1, 3])
        adapter = rng.choice([None, None, None, None, *(f"a{i}" for i in range(ADAPTERS))])
        name = f"t{len(self.turns)}"
        turn = Turn(name, prompt, rng.randint(1, 24), n, len(self.turns), adapter, rng.random() < 0.3)
        if n == 1:
            session = {"session": ("c", f"s{agent}"), "session_lease_s": rng.choice([0.001, LEASE_S])}
            turn.session = rng.choice([session, session, {}, {"lease_s": LEASE_S}])
        self.turns.append(turn)
        return turn

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.bench.engine.tick()

    def happen(self, turns: list[Turn]) -> None:
        """Something happens."""
        rng, bench = self.rng, self.bench
        self._tokens += 1
        match rng.choice(["update", "sleep", "deep sleep", "pause", "fault", "cancel", "end", "hint", "hint", "put"]):
            case "update":
                self._update()
            case "sleep":
                self._sleep(1)
            case "deep sleep":
                self._sleep(2)
                self._update()
            case "pause":
                bench.pause()
            case "fault" if bench.engine.roster.decoding and not bench.engine.gate.swapping:
                fail_a_step(bench)
                rebuild_engine(bench.engine, bench.settings)
                put_adapters(bench)
            case "cancel":
                bench.engine.inbox.put(Cancel(("c", rng.choice(rng.choice(turns).parts)[-1])))
            case "end":
                bench.engine.inbox.put(EndSession("c", f"s{rng.randrange(AGENTS)}"))
            case "hint":
                said = seen(bench, rng.choice(self.histories))
                bench.engine.inbox.put(Prefetch(said, None, -self._tokens))
            case "put":
                put_adapters(bench)

    def _sleep(self, level: int) -> None:
        for order in ((Sleep, level), (WakeUp,)):
            assert isinstance(self.bench.obeyed(self.bench.order(*order), most=100_000), Done)  # copies are late

    def _update(self) -> None:
        """The weights that are there, or were before a sleep dropped them."""
        self._version += 1
        model = self.bench.engine.executor.step.model
        self.bench.links.receiver.ready = Update(self._version, self.weights, model)
        for _ in range(500):
            if self.bench.engine.roster.version == self._version:
                return
            self.bench.engine.tick()
        raise AssertionError("the update is not applied")

    def compare(self) -> None:
        """All turns with those of an engine that keeps nothing."""
        calm = Bench(
            load(self.folder, images=self.images),
            kv_pages=2000,
            prefix_cache=False,
            adapter_slots=ADAPTERS,
            adapter_rank=RANK,
        )
        put_adapters(calm)
        for turn in self.turns:
            again = Turn(turn.name, turn.prompt, turn.length, turn.n, turn.seed, turn.adapter, turn.constrained)
            again.submit(calm)
        calm.run()
        for turn in self.turns:
            for index in range(turn.n):
                mine, theirs = turn.tokens(self.bench, index), calm.completions[turn.name, index]
                assert mine == theirs.token_ids, (turn, index)
                assert turn.logprobs(self.bench, index) == pytest.approx(theirs.raw_logprobs, abs=3e-4), (turn, index)
        calm.close()


def put_adapters(bench: Bench) -> None:
    """Load all adapters, or the same weights of them as newer versions."""
    model = bench.engine.executor.step.model
    for i in range(ADAPTERS):
        weights = random_adapter(model.spec, RANK, model.embed.dtype, i, 0.3)
        bench.engine.inbox.put(PutAdapter(f"a{i}", weights))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("hybrid")
    make_hybrid("Qwen3_5", made, 0)
    return made


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("seeing")
    make_model("Qwen3.5", made)
    return made


KINDS = ("pages", "states", "images")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("pages", 0), ("states", 13), ("images", 1), *nightly(*((kind, s) for kind in KINDS for s in range(2, 40)))],
)
def test_whatever_happens_agents_have_the_tokens_of_engines_without_tiers(
    folders, hybrid, seeing, tmp_path, monkeypatch, kind, seed
):
    monkeypatch.setattr(
        CopyCosts, "computed", lambda self, tokens, seconds: None
    )  # late streams would make copies dear
    folder = {"pages": folders[0], "states": hybrid, "images": seeing}[kind]
    play = Play(folder, tmp_path, random.Random(seed), kind == "images")
    for _ in range(6):
        play.round()
    tier = play.bench.engine.parts.tier.known
    assert tier.host.counts.written > 0 and (kind != "images" or encoded(play.bench) > 0)
    play.bench.close()
    play.compare()
