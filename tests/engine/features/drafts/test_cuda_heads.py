"""A draft model on a GPU: captured, without a wait, and it changes no bit of what deterministic steps draw."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from rollout_kernels.sampling import gumbel_noise
from transformers import AutoConfig

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.engine.features.drafts.model_drafter import ModelDrafter
from rollout.engine.step.row_state import LENGTH, NOISE, PROMPT, SEED, TEMPERATURE
from rollout.models import load_model
from rollout.models.draft_head import DraftHead
from tests.engine.features.drafts.test_cuda_verify import SIZES, VOCAB, all_of, submit
from tests.engine.features.drafts.test_heads import changed_logits, completions_by_seed
from tests.support.engine.constraints import SIZE, Cycle, X, Y
from tests.support.engine.cuda_harness import (
    FUSED_SIZES,
    load_bf16,
    make_fused_checkpoint,
    tick_without_waiting,
    watch_compilation,
)
from tests.support.engine.drafting import replayed_drafts, watch_drafts
from tests.support.engine.harness import Bench, prompt_of, watch_headers
from tests.support.models.draft_heads import head_config, random_head, save_head
from tests.support.models.every_family import make_mimo
from tests.support.models.mtp_layers import make_predicting
from tests.support.models.variants import make_variant

pytestmark = pytest.mark.gpu
HEADS = {**SIZES, "speculation": "heads"}
#: Sizes that the fused kernels take, of models with a layer for multi-token prediction.
PREDICTING = {
    "MiMo": partial(make_mimo, vocab_size=VOCAB, **FUSED_SIZES),
    "Glm4Moe": partial(make_variant, "Glm4Moe", vocab_size=VOCAB, moe_intermediate_size=128, **FUSED_SIZES),
}
#: By seed, length and tokens of a completion.
Drafted = dict[tuple[int, int, tuple[int, ...]], list[int]]


@pytest.fixture(scope="module", params=["EAGLE-3", *PREDICTING])
def folders(request, tmp_path_factory):
    """A target and its head; None in its place if the target's own layer drafts."""
    base = tmp_path_factory.mktemp("heads")
    if request.param in PREDICTING:
        make_predicting(request.param, base, make=PREDICTING[request.param])
        return base, None
    target = make_fused_checkpoint(base / "target")
    sizes = {"intermediate_size": 512, "head_dim": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = head_config(AutoConfig.from_pretrained(target), 2000, **sizes)
    return target, save_head(base / "head", config, random_head(config))


def load_drafted(folders):
    settings = ModelSettings(path=str(folders[0]), dtype="bfloat16")
    return load_model(settings, torch.device("cuda"), draft=folders[1], mtp="needed").model


def run(bench: Bench, submit_all: Callable[[Bench], object] = submit) -> Bench:
    submit_all(bench)
    return bench.finish()


def test_its_drafts_by_kernels_are_those_of_torch(folders, monkeypatch):
    """Up to rounding: the first draft of greedy rows, over prompts of many tokens and over steps."""
    found = []
    for fused in (True, False):
        model = load_drafted(folders)
        assert model.draft.fused
        model.draft.fused = fused
        fields = {"deterministic": True, "cuda_graph_rows": 0}
        bench = Bench(model, make_device("cuda"), **HEADS, **fields)
        prompts = [prompt_of(60 + 70 * i, i) for i in range(5)]
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(ModelDrafter, "_forward", _by_torch)
            found.append(_drafts(bench, prompts, 40, [0.0] * 5))
    _assert_equal_first_drafts(*found, share=0.85)


def _drafts(bench: Bench, prompts: list[list[int]], length: int, temperatures: list[float]) -> Drafted:
    """Runs the prompts, one a seed, and closes the bench."""
    seen = watch_drafts(bench)
    for i, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        bench.submit(f"r{i}", prompt, length, sampling={"temperature": temperature, "seed": i})
    bench.finish()
    tokens = completions_by_seed(bench)
    return {(ints[SEED], ints[LENGTH], tuple(tokens[ints[SEED]])): guesses for ints, _, guesses in seen}


def _assert_equal_first_drafts(one: Drafted, other: Drafted, share: float) -> None:
    both = one.keys() & other.keys()
    equal = sum(one[key][0] == other[key][0] for key in both)
    assert len(both) > 50 and equal > share * len(both), (len(both), equal)


def _by_torch(self, following_T, hidden_TH, batch, kv):
    """The forward of a draft model without its experts' kernels, which read nothing on the host."""
    return self._head(following_T, self._model.embedding, hidden_TH, batch, kv)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("wrong", [None, 0.3])
def test_deterministic_completions_are_equal_bit_for_bit(folders, kv_dtype, wrong):
    fields = {"deterministic": True, "kv_dtype": kv_dtype}
    plain = run(Bench(load_bf16(folders[0]), make_device("cuda"), **SIZES, **fields))
    replayed = {} if wrong is None else replayed_drafts(completions_by_seed(plain), wrong)
    bench = run(Bench(load_drafted(folders), make_device("cuda"), **HEADS, **fields, **replayed))
    assert all_of(bench) == all_of(plain)
    drafts = bench.drafts
    assert drafts.drafted > 300 and (wrong is None or drafts.accepted > 100)


def test_its_steps_are_captured_and_wait_for_nothing(folders, monkeypatch):
    bench = Bench(load_drafted(folders), make_device("cuda"), **HEADS)
    headers = watch_headers(bench)
    compiled = watch_compilation(monkeypatch)
    for i in range(8):
        bench.submit(f"r{i}", prompt_of(100, i), 200, sampling={"temperature": 1.0, "seed": i})
    bench.ticks(20)
    headers.clear()
    reserved = torch.cuda.memory_reserved()
    tick_without_waiting(bench)
    assert torch.cuda.memory_reserved() == reserved
    assert all(
        (header.size, header.most_ahead, header.facts["drafts"]) == (32, 3, ["draft"]) for header in headers[:100]
    )
    bench.complete("other", prompt_of(333, 9), 50, sampling={"temperature": 1.0, "seed": 3, "top_k": 5})
    assert compiled == []


def test_captured_drafts_are_those_of_eager_steps(folders):
    """Up to rounding: these products have another number of rows."""
    found = []
    for graphs in (True, False):
        bench = Bench(load_drafted(folders), make_device("cuda"), **HEADS, cuda_graph_rows=256 * graphs)
        prompts = [prompt_of(60 + 7 * i, i) for i in range(5)]
        found.append(_drafts(bench, prompts, 60, [0.7 * i for i in range(5)]))
    _assert_equal_first_drafts(*found, share=0.9)


#: By seed: sampling, and the stop tokens that are banned for a while.
RULED = {
    11: ({"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 1.5, "frequency_penalty": 1.0}, ()),
    12: ({"temperature": 1.0, "logit_bias": tuple((token, 12.0) for token in range(0, VOCAB, 7))[:300]}, ()),
    13: ({"temperature": 0.9, "frequency_penalty": 2.0, "logit_bias": ((21, 14.0), (22, 13.0))}, ()),
    14: ({"temperature": 0.0, "logit_bias": ((31, 30.0), (32, 29.0))}, (31, 32)),
    15: ({"temperature": 1.0}, ()),
}


def submit_ruled(bench: Bench) -> dict[int, list[int]]:
    """All rows of `RULED`, and some with constraints; returns the prompts of the first ones, by seed."""
    prompts = {seed: prompt_of(60 + seed, seed) for seed in RULED}
    for seed, (sampling, stops) in RULED.items():
        stop = {"token_ids": stops, "min_tokens": 50} if stops else {}
        bench.submit(f"ruled{seed}", prompts[seed], 80, sampling={**sampling, "seed": seed}, stop=stop)
    bench.submit("cycle", prompt_of(40, 1), 60, sampling={"temperature": 1.0, "seed": 21}, constraint=_cycle())
    both = {"temperature": 0.8, "seed": 22, "repetition_penalty": 1.3, "logit_bias": ((X[0], 5.0), (Y[0], -5.0))}
    stop = {"token_ids": (31,)}
    bench.submit("cycle of rules", prompt_of(30, 2), 60, sampling=both, constraint=_cycle(31), stop=stop)
    return prompts


def _cycle(stop: int | None = None) -> Cycle:
    return Cycle([X, Y, SIZE], stop, VOCAB)


def watch_logits(monkeypatch) -> list[tuple[list[int], list[float], list[int], torch.Tensor]]:
    """A list that gets, for each row that drafts in an eager step, its row state, drafts and their logits [G, V]."""
    seen, logits = [], []
    compute, draft = DraftHead.compute_logits, ModelDrafter.draft

    def compute_logits(self, *how):
        logits_SV = compute(self, *how)
        logits.append(logits_SV)
        return logits_SV.clone()  # the draw changes them

    def watch(self, count, *how):
        logits.clear()
        draft(self, count, *how)
        if self.positions_B.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # at start-up
        of_drafts_GRV = torch.stack(logits).cpu()
        for i, row in enumerate(self._rows_R[:count].tolist()):
            ints, floats = self.rows.ints[row].tolist(), self.rows.floats[row].tolist()
            seen.append((ints, floats, self.next_RG[row].tolist(), of_drafts_GRV[:, i]))

    monkeypatch.setattr(DraftHead, "compute_logits", compute_logits)
    monkeypatch.setattr(ModelDrafter, "draft", watch)
    return seen


def test_drafts_heed_rules_and_change_no_bit_of_rows_with_rules_and_constraints(folders, monkeypatch):
    """A draft is the best token of the draft model's own logits, changed by penalties, biases and bans."""
    fields = {"deterministic": True}
    plain = run(Bench(load_bf16(folders[0]), make_device("cuda"), **SIZES, **fields), submit_ruled)
    bench = Bench(load_drafted(folders), make_device("cuda"), **HEADS, **fields)
    with monkeypatch.context() as patch:
        seen = watch_logits(patch)
        prompts = submit_ruled(bench)
        bench.run()
    bench.close()
    assert all_of(bench) == all_of(plain)
    assert bench.drafts.drafted > 300

    seed_of = {bench.completions[f"ruled{seed}", 0].seed: seed for seed in RULED}
    checked, changed = dict.fromkeys(RULED, 0), set()
    for ints, floats, guesses, logits_GV in seen:
        seed = seed_of.get(ints[SEED])
        known = [] if seed is None else prompts[seed] + bench.tokens(f"ruled{seed}")
        if ints[LENGTH] + 1 + len(guesses) > len(known):
            continue  # it has ended, or has a constraint
        sampling, stops = RULED[seed]
        known = known[: ints[LENGTH] + 1]
        for index, token in enumerate(guesses):
            at = len(known) + index - ints[PROMPT]
            noise_V = floats[NOISE] * gumbel_noise(torch.tensor([ints[SEED]]), torch.tensor([at]), VOCAB)[0]
            stop = {"token_ids": stops, "min_tokens": 50 if stops else 0}
            ruled_V = changed_logits(logits_GV[index][None], ints, known + guesses[:index], sampling, stop, at)[0]
            scores_V = ruled_V / floats[TEMPERATURE] + noise_V
            assert scores_V[token] > scores_V.max() - 1e-3, (seed, at)
            changed.update({seed} if token != int((logits_GV[index] / floats[TEMPERATURE] + noise_V).argmax()) else ())
            checked[seed] += 1
    assert min(checked.values()) > 50, checked
    assert changed == RULED.keys() - {15}


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_right_and_wrong_drafts_of_rows_with_rules_and_constraints_change_no_bit(folders, wrong):
    fields = {"deterministic": True}
    plain = run(Bench(load_bf16(folders[0]), make_device("cuda"), **SIZES, **fields), submit_ruled)
    replayed = replayed_drafts(completions_by_seed(plain), wrong)
    bench = run(Bench(load_drafted(folders), make_device("cuda"), **HEADS, **fields, **replayed), submit_ruled)
    assert all_of(bench) == all_of(plain)
    drafts = bench.drafts
    assert drafts.accepted > 150 and (drafts.accepted < drafts.drafted or not wrong)
