"""Drafts amid all that may happen to rows: what comes out is what an engine without drafts returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollout.constraints.marker import AfterMarker, TextMarker, TokenTexts
from rollout.engine.messages.requests import NOTHING_BEFORE, Prior
from rollout.engine.messages.to_engine import Cancel, PutAdapter, StopAt
from tests.engine.features.drafts.test_heads import completions_by_seed
from tests.engine.features.drafts.test_speculation import RULES, STOP, recorded
from tests.engine.test_invariants import run_watched
from tests.support.engine.adapted import Adapters, make_adapters
from tests.support.engine.constraints import SIZE, AlwaysMasked, Cycle, X, Y
from tests.support.engine.conversation import LEASE_S
from tests.support.engine.drafting import drafting, replayed_drafts
from tests.support.engine.harness import VOCAB, Bench, load, prompt_of
from tests.support.engine.sleeping import Sleeping
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.draft_heads import head_config, random_head, save_head
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.hybrids import make_hybrid
from tests.support.models.mtp_layers import LAYOUTS, make_predicting
from tests.support.peft_adapters import ALL

MORE_RULES = [
    *RULES,
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": ((STOP, 2.0),)},
    {"temperature": 0.7, "top_p": 0.8, "logit_bias": ((31, 5.0), (7, -100.0)), "presence_penalty": 1.0},
]
SLOTS = {"adapter_slots": 2, "adapter_rank": 16}


@dataclass
class Asked:
    """A request that an engine gets, and the other one gets in the same or in another way."""

    name: str
    prompt: list[int]
    length: int
    fields: dict[str, Any]
    constraint: tuple[list[list[int]], int | None, int] | None = None  # lists, stop token, vocabulary
    marked: bool = False  # the constraint begins after a marker
    after: Asked | None = None  # of whose session it is the next turn
    known: int = 0  # tokens of it that are given as `prior`, once they are known
    ends: str = ""  # how it ends early

    def submit(self, bench: Bench, plain: Bench | None) -> None:
        fields, before = dict(self.fields), []
        if self.after is not None:
            before = self.after.prompt + bench.tokens(self.after.name)
        if self.constraint is not None:
            fields["constraint"] = cycle = Cycle(*self.constraint)
            if self.marked:  # without drafts every token has a mask
                texts = TokenTexts([b"-#"[token % 4 == 0 :][:1] for token in range(self.constraint[2])])
                marker = TextMarker(b"##", texts, bool, self.constraint[2])
                fields["constraint"] = (AlwaysMasked if plain is None else AfterMarker)(cycle, marker)
        if plain is not None and self.known:
            whole = plain.completions[self.name, 0]
            self.known = min(self.known, len(whole.token_ids) - 1)
            fields["prior"] = Prior(np.array(whole.token_ids[: self.known], np.int32)) if self.known else NOTHING_BEFORE
            fields["sampling"] = {**fields["sampling"], "seed": whole.seed} if self.known else fields["sampling"]
        bench.submit(self.name, before + self.prompt, self.length, **fields)


def requests_of(rng: random.Random, vocab: int, adapted: bool = False, routed: bool = False) -> list[Asked]:
    asked = []
    for i in range(12):
        stop = {"token_ids": (STOP, 31), "min_tokens": rng.choice([0, 5, 12])} if rng.random() < 0.6 else {}
        fields: dict[str, Any] = {
            "sampling": {**rng.choice(MORE_RULES), "seed": i},
            "stop": stop,
            "logprobs": rng.choice([0, 0, 2]),
            "stream_every": rng.choice([0, 1, 3]),
            "priority": rng.choice([0, 0, 1]),
        }
        if adapted:
            fields["adapter"] = rng.choice([None, None, "a0", "a1"])
        prompt = [token % vocab for token in prompt_of(rng.randint(3, 20), i % 5)]
        one = Asked(f"r{i}", prompt, rng.randint(1, 45), fields)
        lists = rng.choice([None, None, None, [X, Y], [X, Y, SIZE]])
        if lists is not None and not routed:
            one.constraint, one.marked = (lists, STOP if stop else None, vocab), i % 2 == 0
        elif routed and rng.random() < 0.7:
            fields["routing_from"] = rng.choice([0, 2])
        asked.append(one)
        match rng.choice(["plain", "group", "session", "prior", "prompt", "ends"]):
            case "group":
                fields["n"] = rng.choice([2, 3])
            case "session":
                fields |= {"session": ("c", f"s{i}"), "session_lease_s": LEASE_S}
                second = [token % vocab for token in prompt_of(5, 40 + i)]
                asked.append(Asked(f"r{i} on", second, 20, fields, one.constraint, one.marked, after=one))
            case "prior" if one.constraint is None and "routing_from" not in fields:
                one.known = rng.randint(1, one.length)
            case "prompt":
                fields |= {"prompt_logprobs": True, "prompt_top_logprobs": rng.choice([None, 0, 3])}
            case "ends":
                one.ends = rng.choice(["cancel", "stop"])
    return asked


def play(bench: Bench, asked: list[Asked], plain: Bench | None, rng: random.Random) -> Bench:
    """Submit all requests; if `plain` has their completions, other things happen meanwhile."""
    waiting, version = list(asked), 0
    while waiting:
        for one in list(waiting):
            if one.after is not None and one.after.name not in bench.done:
                continue
            one.submit(bench, plain)
            waiting.remove(one)
            bench.ticks(rng.choice([0, 0, 2, 9]))
            if plain is not None:
                version = disturb(bench, one, version, rng)
        bench.engine.tick()
    run_watched(bench)
    bench.close()
    return bench


def disturb(bench: Sleeping, one: Asked, version: int, rng: random.Random) -> int:
    """End requests early, and let an update, a sleep or a pause happen; returns the version of the weights."""
    if one.ends == "cancel":
        bench.engine.inbox.put(Cancel(("c", one.name)))
    elif one.ends == "stop":
        bench.engine.inbox.put(StopAt(("c", one.name), 0, 1, "end"))
    match rng.choice(["", "", "", "update", "sleep", "pause"]):
        case "update":  # of the same weights, so tokens stay as they are
            version += 1
            model = bench.engine.executor.step.model
            bench.links.receiver.ready = Update(version, model, model)
        case "sleep":
            bench.sleep(mode="keep")
            bench.wake()
        case "pause":
            bench.pause()
    return version


def assert_as_without(bench: Bench, plain: Bench, asked: list[Asked]) -> None:
    assert bench.completions.keys() == plain.completions.keys()
    for one in asked:
        early = {each.ends for each in (one, one.after) if each is not None} != {""}
        for index in range(one.fields.get("n", 1)):
            mine, theirs, known = bench.completions[one.name, index], plain.completions[one.name, index], one.known
            end = known + len(mine.token_ids)
            if not early:
                assert end == len(theirs.token_ids) and mine.finish == theirs.finish, one
            elif one.after is not None:
                continue  # of another prompt
            assert mine.token_ids == theirs.token_ids[known:end], one
            for name in ("logprobs", "raw_logprobs", "drawn_logprobs", "top_logprobs"):
                ours, expected = getattr(mine, name), getattr(theirs, name)[known:end]
                np.testing.assert_allclose(np.array(ours), np.array(expected), rtol=0, atol=1e-4, err_msg=f"{one}")
            assert mine.top_ids == theirs.top_ids[known:end], one
            if theirs.prompt_logprobs is not None:
                np.testing.assert_allclose(mine.prompt_logprobs, theirs.prompt_logprobs, rtol=0, atol=1e-4)
            if theirs.routing and not early:
                ours, expected = np.concatenate(mine.routing), np.concatenate(theirs.routing)
                assert (ours == expected).all(), one


def disturbed(
    seed: int,
    load_plain: Callable[[], Any],
    make: Callable[..., Bench],
    adapters: Adapters,
    vocab: int,
    routed: bool = False,
    **own: Any,
) -> None:
    """Compare an engine with drafts, which `make(plain, rng, **fields)` returns, with one without."""
    rng = random.Random(seed)
    asked = requests_of(rng, vocab, bool(adapters), routed)
    slots = SLOTS if adapters else {"routing": routed}
    fields = {"pipeline_depth": rng.choice([1, 2]), "prefill_chunk_tokens": rng.choice([16, 64]), **slots, **own}

    def adapted(bench: Bench) -> Bench:
        for i, (adapter, *_) in enumerate(adapters[:2]):
            bench.engine.inbox.put(PutAdapter(f"a{i}", adapter, token=i))
        return bench

    plain = play(adapted(Bench(load_plain(), max_rows=16, kv_pages=600, **fields)), asked, None, random.Random(1))
    bench = make(
        plain,
        rng,
        receiver=Mailbox(),
        speculation_tokens=rng.randint(1, 6),
        speculation_rows=rng.choice([3, 16, 64]),
        host_kv_gib=rng.choice([0.0, 0.001]),
        kv_on_swap=rng.choice(["keep", "recompute"]),
        recompute_fraction=1.0,
        max_rows=rng.choice([2, 5, 16]),
        kv_pages=rng.choice([40, 60, 256]),
        **fields,
    )
    play(adapted(bench), asked, plain, rng)
    assert_as_without(bench, plain, asked)
    assert bench.drafts.drafted > 0 or bench.settings.engine.speculation == "auto"


def by_model(load_drafted: Callable[[], Any], seed: int) -> Callable[..., Bench]:
    """A draft model; most often it drafts what was drawn without it, some of it wrong."""

    def make(plain: Bench, rng: random.Random, **fields: Any) -> Bench:
        if rng.random() < 0.8:
            fields |= replayed_drafts(completions_by_seed(plain), rng.choice([0.0, 0.1, 0.5]), seed)
        speculation = rng.choice(["heads", "heads", "auto"])
        return Sleeping(load_drafted(), speculation=speculation, speculation_model="a folder", **fields)

    return make


def by_host(load_one: Callable[[], Any], seed: int) -> Callable[..., Bench]:
    """The host drafts what was drawn without it, some of it wrong or missing."""

    def make(plain: Bench, rng: random.Random, **fields: Any) -> Bench:
        how = (rng.choice([0.0, 0.1, 0.5]), seed, rng.random() < 0.7, Sleeping)
        fields["speculation"] = rng.choice(["suffix", "suffix", "auto"])
        return drafting(load_one(), recorded(plain.completions), *how, **fields)[0]

    return make


def by_ngrams(load_one: Callable[[], Any]) -> Callable[..., Bench]:
    def make(plain: Bench, rng: random.Random, **fields: Any) -> Bench:
        return Sleeping(load_one(), speculation=rng.choice(["ngram", "ngram", "auto"]), **fields)

    return make


@pytest.mark.parametrize("way", ["heads", "host", "ngrams"])
@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 40))])
def test_whatever_happens_completions_stay_as_without_drafts(folders, hf_models, tmp_path_factory, way, seed):
    """Adapters, constraints, sessions, known tokens, scores of prompts, early ends; updates, sleeps, pauses."""
    config = head_config(hf_models[0].config, 60 if seed % 2 else None)
    head = save_head(tmp_path_factory.mktemp("head"), config, random_head(config, seed))
    adapters = make_adapters(hf_models[0], folders[0], tmp_path_factory)

    def load_one() -> Any:
        return load(folders[0])

    ways = {
        "heads": by_model(lambda: load(folders[0], draft=head), seed),
        "host": by_host(load_one, seed),
        "ngrams": by_ngrams(load_one),
    }
    disturbed(seed, load_one, ways[way], adapters, VOCAB)


@pytest.mark.parametrize(("stem", "seed"), [("Qwen3Next", 1), *nightly(("Qwen3_5", 0), *(
    (stem, seed) for stem in ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "OlmoHybrid") for seed in range(2, 14)
))])  # fmt: skip
def test_states_follow_drafts_whatever_happens(tmp_path_factory, stem, seed):
    folder, rng = tmp_path_factory.mktemp("hybrid"), random.Random(seed)
    hf_model = make_hybrid(stem, folder, 0)
    linear = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    targets = (linear, (*ALL, *linear))
    adapters = make_adapters(hf_model, folder, tmp_path_factory, targets) if stem == "Qwen3_5" else []
    host = by_host(lambda: load(folder), seed)
    vocab = hf_model.config.get_text_config().vocab_size
    disturbed(seed, lambda: load(folder), host, adapters, vocab, state_snapshots=rng.choice([2, 9]))


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 20))])
def test_experts_of_tokens_are_recorded_as_without_drafts(tmp_path, seed):
    hf_model = EVERY_FAMILY["qwen3_moe"](tmp_path / "target", 0)
    config = head_config(hf_model.config)
    head = save_head(tmp_path / "head", config, random_head(config, seed))
    target = tmp_path / "target"
    draft = by_model(lambda: load(target, draft=head), seed)
    disturbed(seed, lambda: load(target), draft, [], config["vocab_size"], True)


@pytest.mark.parametrize(
    ("name", "seed"),
    [("Glm4Moe", 0), *nightly(("Qwen3Next", 0), *((name, seed) for name in LAYOUTS for seed in range(1, 8)))],
)
def test_layers_of_the_checkpoint_draft_whatever_happens(tmp_path, name, seed):
    """Layers for multi-token prediction: with experts, with latent attention, dense, of models with states."""
    found = make_predicting(name, tmp_path)
    draft = by_model(lambda: load(tmp_path, mtp="needed"), seed)
    routed = name not in ("MiMo", "Qwen3_5")
    disturbed(seed, lambda: load(tmp_path), draft, [], found.model.config.vocab_size, routed)


@pytest.mark.parametrize("what", ["nan", *nightly("inf", "huge")])
def test_a_broken_draft_model_changes_nothing(folders, hf_models, tmp_path_factory, what):
    """Whatever an update has made of its weights."""
    config = head_config(hf_models[0].config, 60)
    head = save_head(tmp_path_factory.mktemp("head"), config, random_head(config))
    asked = requests_of(random.Random(5), VOCAB)
    plain = play(Bench(load(folders[0])), asked, None, random.Random(1))
    model = load(folders[0], draft=head)
    bench = Bench(model, speculation="heads", speculation_model="a folder")
    for view in {**model.draft.views()}.values():
        view.view(-1)[::3] = {"nan": float("nan"), "inf": float("inf"), "huge": 1e38}[what]
    play(bench, asked, None, random.Random(2))
    for one in asked:
        one.ends, one.known = "", 0  # nothing happened
    assert_as_without(bench, plain, asked)
