"""States of linear attention amid all that may happen to rows: every token is one that transformers gives its text.

Requests begin alike, so they go on from each other's snapshots; some are groups, turns of sessions, or go on from known
tokens. Meanwhile rows are preempted, their states go to the host and back, the engine sleeps, requests end early, and
updates change the weights. A token's log-prob has to be that of the weights of its version after all text before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.messages import Cancel, Pause, Prior, Resume, StopAt
from tests.engine.test_invariants import run_watched
from tests.support.engine.conversation import LEASE_S
from tests.support.engine.harness import load
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import LateDevice
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.hybrids import make_hybrid

VOCAB = 83
GREEDY: dict[str, Any] = {"temperature": 0.0}
LATE = ("h2d", "compute", "d2h", "kv_out", "kv_in", "state_out", "state_in")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders and transformers' models of two versions, by family, made when first asked for."""
    torch.set_num_threads(1)
    known: dict[str, list[tuple[Path, Any]]] = {}

    def make(stem: str) -> list[tuple[Path, Any]]:
        if stem not in known:
            folders = [tmp_path_factory.mktemp(f"{stem}-{seed}") for seed in (0, 1)]
            known[stem] = [(folder, make_hybrid(stem, folder, seed)) for seed, folder in enumerate(folders)]
        return known[stem]

    return make


@dataclass
class Asked:
    """A request, and what its completions are texts of."""

    name: str
    prompt: list[int]
    length: int
    fields: dict[str, Any] = field(default_factory=dict)
    prior: list[int] = field(default_factory=list)
    after: Asked | None = None  # of whose session it is the next turn: its text comes before the prompt

    def submit(self, bench: Sleeping) -> None:
        fields = dict(self.fields)
        if self.after is not None:
            self.prompt = self.after.prompt + bench.tokens(self.after.name) + self.prompt
        if self.prior:
            fields["prior"] = Prior(np.array(self.prior, np.int32))
        bench.submit(self.name, self.prompt, len(self.prior) + self.length, **fields)


def requests_of(rng: random.Random) -> list[Asked]:
    """Prompts are beginnings of three texts, some with an end of their own."""
    texts = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    asked: list[Asked] = []
    for i in range(14):
        prompt = rng.choice(texts)[: rng.choice([1, 7, 16, 17, 33, 33, 48, 48, 60])]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 6]))]
        sampling = rng.choice([GREEDY, GREEDY, {"temperature": 1.0, "seed": i}])
        fields: dict[str, Any] = {"sampling": sampling, "priority": rng.choice([0, 0, 1])}
        one = Asked(f"r{i}", prompt, rng.randint(1, 50), fields)
        asked.append(one)
        match rng.choice(["", "", "group", "group", "session", "prior", "scores"]):
            case "group":
                fields["n"] = rng.choice([2, 3, 5])
            case "session":
                fields |= {"session": ("c", f"s{i}"), "session_lease_s": LEASE_S}
                for turn in range(rng.choice([1, 2])):
                    new = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 4, 20]))]
                    asked.append(Asked(f"r{i} turn {turn}", new, rng.randint(1, 25), fields, after=asked[-1]))
            case "prior":
                one.prior = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 12, 30]))]
                fields["n"] = rng.choice([1, 3])
            case "scores":
                fields["prompt_logprobs"] = True
    return asked


def play(bench: Sleeping, asked: list[Asked], models: list[Any], rng: random.Random) -> None:
    """Submit all requests; other things happen meanwhile."""
    waiting, version = list(asked), 0
    while waiting:
        for one in list(waiting):
            if one.after is not None and one.after.name not in bench.done:
                continue
            one.submit(bench)
            waiting.remove(one)
            for _ in range(rng.choice([0, 0, 2, 9, 25])):
                bench.engine.tick()
            match rng.choice(["", "", "", "", "cancel", "stop", "update", "sleep", "pause"]):
                case "cancel":
                    bench.engine.inbox.put(Cancel(("c", rng.choice(asked).name)))
                case "stop":
                    bench.engine.inbox.put(StopAt(("c", rng.choice(asked).name), 0, rng.randint(1, 9), "x"))
                case "update" if bench.links.receiver.ready is None:
                    version += 1
                    model = bench.engine.executor.step.model
                    bench.links.receiver.ready = Update(version, models[version % 2], model)
                case "sleep":
                    bench.sleep(mode="keep")
                    bench.wake()
                case "pause":
                    bench.engine.inbox.put(Pause("keep", 1))
                    for _ in range(3):
                        bench.engine.tick()
                    bench.engine.inbox.put(Resume(2))
        bench.engine.tick()
    run_watched(bench)


def assert_texts(bench: Sleeping, asked: list[Asked], hf_models: list[Any]) -> int:
    """Every token of every completion; returns how many there are."""
    count = 0
    for one in asked:
        for index in range(one.fields.get("n", 1)):
            done = bench.completions[one.name, index]
            tokens, before = done.token_ids, one.prompt + one.prior
            if not tokens:
                continue
            count += len(tokens)
            with torch.inference_mode():
                text = torch.tensor([before + tokens])
                logits = torch.stack([hf(text).logits[0, len(before) - 1 : -1] for hf in hf_models])
            logits = logits[[version % 2 for version in done.versions], torch.arange(len(tokens))]
            chosen = torch.tensor(tokens)[:, None]
            exact = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            off = (torch.tensor(done.raw_logprobs) - exact).abs()
            assert float(off.max()) < 2e-4, (one, index, int(off.argmax()), done.versions, done.recomputed)
            if one.fields["sampling"] is GREEDY:
                assert (logits.gather(1, chosen)[:, 0] > logits.max(-1).values - 1e-3).all(), (one, index)
    return count


def check_one(made: Any, stem: str, seed: int) -> None:
    rng = random.Random(seed)
    pairs = made(stem)
    model, models = load(pairs[0][0]), [load(folder) for folder, _ in pairs]
    most_s = rng.choice([0.0, 0.0, 0.002])
    delays = {name: (lambda: rng_late.random() * most_s) for name in LATE}
    rng_late = random.Random(seed)
    state_gib = model.spec.state_bytes(torch.float32) / 2**30
    bench = Sleeping(
        model,
        LateDevice(delays) if most_s else None,
        Mailbox(),
        kv_on_swap="recompute",
        recompute_fraction=1.0,
        host_kv_gib=rng.choice([0.0, 4.0, 24.0]) * state_gib,
        max_rows=rng.choice([1, 3, 6, 12]),
        kv_pages=rng.choice([60, 90, 400]),
        page_size=rng.choice([4, 4, 16]),
        state_snapshots=rng.choice([0, 1, 4, 30]),
        prefill_chunk_tokens=rng.choice([16, 23, 200]),
        pipeline_depth=rng.choice([1, 2]),
        prefix_cache=rng.random() < 0.8,
    )
    asked = requests_of(rng)
    play(bench, asked, models, rng)
    assert assert_texts(bench, asked, [hf for _, hf in pairs]) > 100
    bench.close()


@pytest.mark.parametrize(
    ("stem", "seed"), [("Qwen3_5", 0), *nightly(*((s, i) for s in ("Qwen3_5", "OlmoHybrid") for i in range(1, 25)))]
)
def test_whatever_happens_tokens_are_those_of_their_text(made, stem: str, seed: int) -> None:
    check_one(made, stem, seed)
