"""A token has the same logits, bit for bit, in any batch, chunking and recomputation: in Triton's interpreter.

The interpreter leaves the order of a tile's sums to numpy, which has another order for each shape. Here it adds as the
tensor cores do: 16 products at a time, in order.
"""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.delta import triton_conv, triton_rule
from rollout_kernels.linear.table import linear_config
from rollout_kernels.moe.dispatch import moe_plan
from rollout_kernels.sampling import SamplingRows, truncate
from triton.runtime import interpreter

from rollout.config import ModelSettings
from rollout.models import Decoder, delta_net, deterministic, load_model
from rollout.models.deterministic import check_deterministic, head_product, layer_products
from rollout.models.fused import FusedDecoder
from rollout.models.fused_experts import ExpertPlans, FusedExperts
from tests.support.kernels.grids import nightly
from tests.support.models import sigmoid_router
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid
from tests.support.models.paged import PagedRunner
from tests.support.models.side_by_side import MODELS, tokens

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"),
    pytest.mark.filterwarnings("ignore:no measured plan"),
]
LENGTHS = [15, 3]
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def add_in_order(self, a, b, d, input_precision, max_num_imprecise_acc):
    sums = d.data.astype(np.float32)
    for k in range(0, a.data.shape[-1], 16):
        part = np.matmul(a.data[..., k : k + 16].astype(np.float64), b.data[..., k : k + 16, :].astype(np.float64))
        sums = (sums + part).astype(np.float32)
    return interpreter.TensorHandle(sums, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", add_in_order)
    small = dataclasses.replace(deterministic.CONFIG, block_n=16, chunk=16)
    monkeypatch.setattr(deterministic, "CONFIG", small)
    monkeypatch.setattr(deterministic, "PROMPT_TOKENS", 7)


def load(name: str, folder: Path, dtype: str = "bfloat16") -> Decoder:
    family, sizes = MODELS[name]
    own = name in ("olmoe", "qwen3-odd", "olmo2", "gpt_oss")
    make_checkpoint(family, folder, **{**(sizes if own else SIZES), "num_hidden_layers": 2})
    return load_model(ModelSettings(path=str(folder), dtype=dtype), torch.device("cpu")).model


class Schedule:
    """Feeds the same sequences to a model in steps of random order and size, and keeps the logits of every token."""

    def __init__(self, model: Decoder, forward: FusedDecoder, seed: int, kv_dtype: torch.dtype | None) -> None:
        self.rng = random.Random(seed)
        self.ids = [tokens(length, model.spec.vocab, row) for row, length in enumerate(LENGTHS)]
        self.runner = PagedRunner(model, len(LENGTHS), max(LENGTHS), seed=seed, forward=forward, kv_dtype=kv_dtype)
        self.found: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.restarts = 1 if seed else 0

    def keep(self, row: int, start: int, logits: torch.Tensor) -> None:
        for i, one in enumerate(logits):
            self.found.setdefault((row, start + i), []).append(one.clone())

    def run(self) -> dict[tuple[int, int], list[torch.Tensor]]:
        lengths = self.runner.lengths
        while rows := [row for row in range(len(LENGTHS)) if lengths[row] < LENGTHS[row]]:
            rows = self.rng.sample(rows, self.rng.randint(1, len(rows)))
            before = {row: lengths[row] for row in rows}
            if self.rng.random() < 0.4:
                step = {row: self.ids[row][lengths[row]] for row in rows}
                logits = {row: one[None] for row, one in self.runner.decode(step, self.rng.randint(0, 2)).items()}
            else:
                most = {row: LENGTHS[row] - lengths[row] for row in rows}
                takes = {row: self.rng.randint(-(-most[row] // 2), most[row]) for row in rows}
                logits = self.runner.prefill({r: self.ids[r][before[r] : before[r] + takes[r]] for r in rows})
            for row in rows:
                self.keep(row, before[row], logits[row])
            if self.restarts and lengths[0] > 8:
                lengths[0], self.restarts = 0, self.restarts - 1  # preempted: computed again from the start
        return self.found


def differing(model: Decoder, seeds: range, kv_dtype: torch.dtype | None = None) -> int:
    """Number of tokens whose logits differ between schedules."""
    forward = FusedDecoder(model, deterministic=True)
    runs = [Schedule(model, forward, seed, kv_dtype).run() for seed in seeds]
    assert all(set(run) == set(runs[0]) and len(run) == sum(LENGTHS) for run in runs)
    return sum(not all(torch.equal(one, runs[0][at][0]) for run in runs for one in run[at]) for at in runs[0])


@pytest.mark.parametrize(("name", "fp8"), [("qwen3", True), ("olmo2", False), *nightly(("mixtral", False))])
def test_logits_do_not_depend_on_batch_chunks_or_recomputation(name, fp8, tmp_path):
    """With a window, experts, FP8 KV, norms after blocks and of all heads together.

    Steps of few and of many tokens, several prompts in a step, padding.
    """
    model = load(name, tmp_path)
    kv_dtype = torch.float8_e4m3fn if fp8 else None
    assert differing(model, range(2), kv_dtype) == 0


@pytest.mark.nightly
def test_a_router_that_the_kernels_do_not_have_adds_in_one_order_too(tmp_path, monkeypatch):
    sigmoid_router.declare(monkeypatch)
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_hidden_layers": 1, "attention_bias": False}
    reference = make_checkpoint("qwen3_moe", tmp_path, **sizes)
    sigmoid_router.give_biases(tmp_path, reference)
    model = load_model(ModelSettings(path=str(tmp_path), dtype="bfloat16"), torch.device("cpu")).model
    assert differing(model, range(2)) == 0


#: Tiny hybrids whose products the kernels take.
HYBRID = {
    **SIZES,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mlp_only_layers": []}


@pytest.mark.nightly
@pytest.mark.parametrize("stem", ["Qwen3_5", *nightly("Qwen3_5Moe", "Qwen3Next")])
def test_a_hybrids_logits_do_not_depend_on_batch_chunks_or_recomputation(stem, tmp_path, monkeypatch):
    """By the kernels of linear attention; with gated attention, and with a shared expert."""
    for name, kernels in (("short_conv", triton_conv), ("gated_delta", triton_rule), ("gated_norm", triton_rule)):
        monkeypatch.setattr(delta_net, name, getattr(kernels, name))
    experts = {} if stem == "Qwen3_5" else EXPERTS
    make_hybrid(stem, tmp_path, **HYBRID, **experts)
    model = load_model(ModelSettings(path=str(tmp_path), dtype="bfloat16"), torch.device("cpu")).model
    assert differing(model, range(2)) == 0


def attention_of_a_library(q, k, v, bias, scale):
    """Attention that rounds the softmax weights of prompts to bf16, as a library's kernel for prompts may."""
    weights = (q.float() @ k.float().transpose(-1, -2) * scale + bias.float()).softmax(-1)
    if bias.dim() == 2:  # one row's queries
        weights = weights.bfloat16().float()
    return (weights @ v.float()).to(q.dtype)


@pytest.mark.nightly
def test_without_deterministic_a_decoded_token_differs_from_a_prefilled_one(tmp_path, monkeypatch):
    """So the comparison above can fail. Two orders of a sum may round alike, so several prompts are tried."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention_of_a_library)
    model = load("qwen3", tmp_path)
    for in_one_order, seeds in ((True, (1,)), (False, (1, 2, 3))):
        equal = []
        for seed in seeds:
            ids, found = tokens(20, model.spec.vocab, seed), []
            forward = FusedDecoder(model, in_one_order)
            for prompt in (20, 13):
                runner = PagedRunner(model, 1, 20, forward=forward)
                logits = [runner.prefill({0: ids[:prompt]})[0][13:]]
                logits += [runner.decode({0: token})[0][None] for token in ids[prompt:]]
                found.append(torch.cat(logits))
            equal.append(torch.equal(*found))
            if not equal[-1]:
                break
        assert all(equal) == in_one_order, equal


def test_tokens_of_a_prompt_attend_as_tokens_of_decode_steps_do():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 8, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(16, 4, 16, generator=generator)
    table = torch.randperm(8, generator=generator)[None].int() + 1
    from rollout.models.batch import AttentionBatch, LayerKV, PromptChunk

    for window in (None, 11):
        at = torch.arange(20, 36)
        chunks = (PromptChunk(0, 16, 36),)
        batch = AttentionBatch(at, at, table, torch.tensor([36]), 36, chunks)
        out = deterministic.attend(q, batch, LayerKV(k, v, None), 0.3, window)
        for i in (0, 6, 7, 15):
            lens = torch.tensor([21 + i, 5])
            alone = AttentionBatch(lens - 1, lens, table.expand(2, -1), lens, 64)
            got = deterministic.attend(q[[i, 0]], alone, LayerKV(k, v, None), 0.3, window)
            assert torch.equal(got[0], out[i])
        exact = decode_attention(
            q, k, v, table.expand(16, -1), at + 1, scale=0.3, window=window, work=_whole(at + 1, window)
        )
        assert torch.allclose(out, exact, atol=1e-5)


def _whole(lens, window):
    from rollout_kernels.attention.triton_decode_plan import DecodeConfig, plan_decode_work

    return plan_decode_work(lens, 2, group=1, window=window, config=DecodeConfig(block_n=16), multiprocessors=1)


def test_steps_of_any_size_have_one_plan_for_experts_and_one_split_of_each_product(tmp_path):
    model, sizes, plans = load("mixtral", tmp_path), (1, 5, 40, 129, 3000), []

    def noted(*asked, **options):
        plans.append(moe_plan(*asked, **options))
        return plans[-1]

    products = [*layer_products(model.spec.layers[0]).values(), head_product(model.spec)]
    for in_one_order in (True, False):
        experts = FusedExperts.of_model(model, in_one_order, ExpertPlans(noted))
        plans.clear()
        for count in sizes:
            experts.begin_step(count)
        assert (len(set(plans)) == 1) == in_one_order
        configs = [[linear_config(*product, count, in_one_order) for product in products] for count in sizes]
        splits = [[config and config.split for config in of_size] for of_size in configs]
        assert all(found == splits[0] and None not in found for found in splits) == in_one_order


def test_models_whose_products_depend_on_the_batch_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a softcap or sinks"):
        check_deterministic(load("gpt_oss", tmp_path / "sinks").spec)
    with pytest.raises(ValueError, match="80 inputs of its product '.*' are no multiple of 32"):
        check_deterministic(load("qwen3-odd", tmp_path / "odd").spec)
    check_deterministic(load("mixtral", tmp_path / "mixtral").spec)


def test_sums_in_whole_numbers_keep_the_meaning_of_top_p():
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) * 3
    rows = SamplingRows(
        temperature_S=torch.ones(40),
        noise_S=None,
        seed_S=torch.zeros(40).long(),
        index_S=torch.zeros(40).long(),
        top_k_S=torch.full((40,), 3000),
        top_p_S=torch.linspace(0.1, 0.99, 40),
        min_p_S=torch.zeros(40),
    )
    kept = truncate(logits, rows).isfinite()
    probs = logits.double().softmax(1)
    for row in range(40):
        mine = probs[row][kept[row]]
        assert mine.sum() >= rows.top_p_S[row] - 1e-6 and mine.sum() - mine.min() < rows.top_p_S[row] + 1e-6
