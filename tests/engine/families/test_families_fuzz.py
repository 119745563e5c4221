"""All families amid all that may happen to rows: every token has the log-prob that transformers gives it in its text.

Requests begin alike, so they go on from each other's pages or snapshots; some are groups, turns of sessions, or go on
from known tokens. Meanwhile rows are preempted, their KV and states go to the host and back, the engine sleeps,
requests end early, and updates change the weights. A token's log-prob has to be that of the weights of its version,
after all text before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel, StopAt
from rollout.models import load_model
from rollout.models.cut import kept_values
from tests.engine.test_invariants import run_watched
from tests.support.engine.conversation import LEASE_S
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.streams import LateDevice
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models import fallback
from tests.support.models.every_family import EVERY_FAMILY

GREEDY: dict[str, Any] = {"temperature": 0.0}
LATE = ("h2d", "compute", "d2h", "kv_out", "kv_in", "state_out", "state_in")
#: Too slow on a CPU, or with contexts that are too short.
_LEFT_OUT = {"Kimi-K2", "Phi3 long"}
_NATIVE = [name for name in EVERY_FAMILY if name not in _LEFT_OUT]
_FALLBACK = (
    *("Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel", "Gemma3nForCausalLM"),
    *("Lfm2ForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM", "GraniteMoeHybridForCausalLM"),  # with states
    *("StableLmForCausalLM", "FalconH1ForCausalLM"),  # gathered
)


@dataclass
class Versions:
    """Two checkpoints of one shape: our models and transformers', by version of the weights."""

    models: list[Any]
    hf_models: list[Any]


def versions_of(name: str, folder: Path) -> Versions:
    """Of a native family, or of an architecture that runs through transformers' own code."""
    through = name in _FALLBACK
    torch.set_num_threads(1)
    made = [
        fallback.make_checkpoint(name, folder / str(seed), seed)
        if through
        else EVERY_FAMILY[name](folder / str(seed), seed)
        for seed in range(2)
    ]
    impl = "transformers" if through else "native"
    settings = [ModelSettings(path=str(folder / str(seed)), dtype="float32", model_impl=impl) for seed in range(2)]
    return Versions([load_model(one, torch.device("cpu")).model for one in settings], made)


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


def requests_of(rng: random.Random, vocab: int) -> list[Asked]:
    """Prompts are beginnings of three texts, some with an end of their own."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    texts = [tokens(60) for _ in range(3)]
    asked: list[Asked] = []
    for i in range(14):
        prompt = rng.choice(texts)[: rng.choice([1, 7, 16, 17, 33, 33, 48, 48, 60])]
        prompt = prompt + tokens(rng.choice([0, 0, 1, 6]))
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
                    new, length = tokens(rng.choice([1, 4, 20])), rng.randint(1, 25)
                    asked.append(Asked(f"r{i} turn {turn}", new, length, fields, after=asked[-1]))
            case "prior":
                one.prior = tokens(rng.choice([1, 12, 30]))
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
            bench.ticks(rng.choice([0, 0, 2, 9, 25]))
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
                    bench.pause()
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


def check_one(versions: Versions, seed: int, folder: Path, **engine: Any) -> None:
    rng, rng_late = random.Random(seed), random.Random(seed)
    model, most_s = versions.models[0], rng.choice([0.0, 0.0, 0.002])
    delays = {name: (lambda: rng_late.random() * most_s) for name in LATE}
    # A model of attention alone: memory for some tens of pages.
    state_gib = model.spec.state_bytes(torch.float32) / 2**30 or 0.0001
    first = Kept({name: kept_values(view).clone() for name, view in model.hf_views().items()})
    host_gib = rng.choice([0.0, 4.0, 24.0]) * state_gib
    cache = rng.random() < 0.8
    if host_gib and cache:
        engine |= {"disk_kv_gib": 4 * host_gib, "disk_kv_folder": str(folder)}
    bench = Sleeping(
        model,
        LateDevice(delays) if most_s else None,
        Mailbox(),
        kv_on_swap="recompute",
        recompute_fraction=1.0,
        host_kv_gib=host_gib,
        max_rows=rng.choice([1, 3, 6, 12]),
        kv_pages=rng.choice([60, 90, 400]),
        page_size=rng.choice([4, 4, 16]),
        state_snapshots=rng.choice([0, 1, 4, 30]),
        prefill_chunk_tokens=rng.choice([16, 23, 200]),
        pipeline_depth=rng.choice([1, 2]),
        prefix_cache=cache,
        **engine,
    )
    asked = requests_of(rng, model.spec.vocab)
    play(bench, asked, [first, versions.models[1]], rng)
    assert assert_texts(bench, asked, versions.hf_models) > 100
    bench.close()


@dataclass
class Kept:
    """The weights before the first update, for an update that brings them back."""

    views: dict[str, torch.Tensor]

    def hf_views(self) -> dict[str, torch.Tensor]:
        return self.views


@pytest.mark.parametrize(
    ("name", "seed"), [("Qwen3_5", 0), *nightly(*((name, seed) for name in (*_NATIVE, *_FALLBACK) for seed in (1, 2)))]
)
def test_whatever_happens_tokens_are_those_of_their_text(name: str, seed: int, tmp_path: Path) -> None:
    check_one(versions_of(name, tmp_path), seed, tmp_path)


@pytest.mark.parametrize("seed", nightly(*range(3, 25)))
def test_whatever_happens_to_states(seed: int, tmp_path: Path) -> None:
    check_one(versions_of("Qwen3_5", tmp_path), seed, tmp_path)


@pytest.mark.parametrize(
    ("name", "seed"), [("Gemma3", 3), *nightly(*((name, seed) for name in _NATIVE for seed in (4, 5)))]
)
def test_whatever_happens_to_rows_that_draft_by_ngrams(name: str, seed: int, tmp_path: Path) -> None:
    check_one(versions_of(name, tmp_path), seed, tmp_path, speculation="ngram" if seed % 2 else "auto")
