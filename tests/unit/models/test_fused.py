"""Whole steps by the fused kernels, in Triton's interpreter, compared with generic steps and transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.linear.table import MOST_ROWS
from rollout_kernels.moe.dispatch import MoEShape, moe_plan
from rollout_kernels.moe.triton_group_pairs import pairs_at_once
from triton.runtime.interpreter import InterpretedFunction

from rollout.config import ModelSettings
from rollout.models import Decoder, KVCache, fused, load_model
from rollout.models.batch import HiddenTaps
from rollout.models.fused import FusedDecoder, supports, takes_feed_forward, takes_mixer
from rollout.models.fused_experts import PLANS, ExpertPlans
from rollout.models.layers import Attention, DenseFeedForward, SparseFeedForward
from rollout.models.random_init import fill_random
from rollout.models.spec import RopeSpec
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PROMPT, PagedRunner
from tests.support.models.side_by_side import (
    COARSE,
    CPU,
    LONG,
    MODELS,
    SEEDS,
    coarse,
    error,
    errors,
    expected,
    load,
    make,
    save_rounded,
    side_by_side,
    steps,
    tokens,
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"),
    pytest.mark.filterwarnings("ignore:no measured plan"),
]

DENSE = ["qwen3", "qwen3-odd", "llama", "qwen2"]
AROUND = ["gemma3", "gemma4", "olmo2", "granite", *nightly("gemma2", "glm4")]
SPARSE = [
    "qwen3_moe",
    "qwen3_moe-odd",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "shared-gated",
    "shared",
    "llama4",
    "nemotron_h",
    "gemma4-experts",
    "minimax_m3",
]


@pytest.mark.parametrize("name", [*DENSE, *AROUND])
def test_a_dense_model_equals_transformers_in_float32(name: str, tmp_path: Path) -> None:
    model, reference = make(name, tmp_path, "float32")
    logits, runner, ids = steps(model, FusedDecoder(model), LONG)
    assert (logits - expected(reference, ids)).abs().max() < 1e-4
    _, generic, _ = steps(model, model, LONG)
    for mine, theirs in zip((*runner.kv.k, *runner.kv.v), (*generic.kv.k, *generic.kv.v), strict=True):
        assert torch.allclose(mine[1:], theirs[1:], atol=1e-5), "the same keys and values, and nothing elsewhere"


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("name", ["llama", *nightly("qwen3")])
def test_hidden_states_for_a_draft_model_are_transformers(name: str, wanted: bool, tmp_path: Path) -> None:
    """Before each layer, and after the last one where all tokens are wanted; by the kernels and by the modules."""
    model, reference = make(name, tmp_path, "float32")
    layers = len(model.spec.layers)
    taps = tuple(range(layers if wanted else layers + 1))
    ids, last = tokens(LONG + 2, model.spec.vocab, 1), []
    hook = reference.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        states = [*reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[:-1], last[0]]
    hook.remove()
    expected_TF = torch.cat([states[tap][0] for tap in taps], dim=-1)
    for forward in (FusedDecoder(model), model):
        runner, found = PagedRunner(model, rows=1, max_tokens=len(ids), forward=forward), []
        for count in (LONG, 1, 1):
            runner.taps = HiddenTaps(taps, torch.full((LONG + 3, expected_TF.shape[1]), torch.nan))
            begin = sum(map(len, found))
            if count > 1:
                wants = [0] if wanted and forward is not model else None
                runner.prefill({0: ids[begin : begin + count]}, last_of=wants)
            else:
                runner.decode({0: ids[begin]}, padding=1)
            found.append(runner.taps.hidden_TF[:count])
        torch.testing.assert_close(torch.cat(found), expected_TF, rtol=1e-4, atol=1e-4)


def test_hidden_states_of_experts_are_those_of_the_modules(tmp_path: Path) -> None:
    """In 16 bits: what the kernels leave to add is in the stream before the next layer reads it."""
    model, _ = make("qwen3_moe", tmp_path, "bfloat16")
    taps, ids = tuple(range(len(model.spec.layers) + 1)), tokens(LONG, model.spec.vocab, 1)
    found = []
    for forward in (FusedDecoder(model, plans=COARSE), model):
        runner = PagedRunner(model, rows=1, max_tokens=LONG, forward=forward)
        memory = torch.zeros(LONG, len(taps) * model.spec.hidden, dtype=torch.bfloat16)
        runner.taps = HiddenTaps(taps, memory)
        runner.prefill({0: ids})
        found.append(memory.unflatten(1, (len(taps), -1)))
    for tap in taps:
        assert error(found[0][:, tap], found[1][:, tap]) < 0.05, tap


@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("qwen3", {"num_hidden_layers": 6}, 3),
        pytest.param(
            *("gemma3", {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}, 4),
            marks=pytest.mark.nightly,
        ),
        pytest.param("shared", {"num_hidden_layers": 6}, 4, marks=pytest.mark.nightly),
    ],
)
def test_one_layer_of_each_kind_launches_every_kernel(
    name: str, sizes: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, others = MODELS[name]
    make_checkpoint(family, tmp_path, **{**others, **sizes})
    model = load(tmp_path, "bfloat16")
    launches: list[Any] = []
    run = InterpretedFunction.run

    def record(kernel: Any, *args: Any, **options: Any) -> Any:
        launches.append((kernel.fn.__name__, *map(kind, [*args, *options.items()])))
        return run(kernel, *args, **options)

    def kind(value: Any) -> Any:
        value = getattr(value, "base", value)  # of a descriptor
        return value.dtype if isinstance(value, torch.Tensor) else str(value)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    forward = FusedDecoder(model, plans=COARSE)
    whole, _, _ = steps(model, forward, LONG)
    of_all, launches = launches, []
    with forward.one_layer_of_each_kind():
        steps(model, forward, LONG)
    assert set(launches) == set(of_all)
    assert len(launches) <= len(of_all) * (most + 1) / sizes["num_hidden_layers"]
    assert torch.equal(steps(model, forward, LONG)[0], whole), "all layers again"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama-odd", "gpt_oss", *nightly("qwen3", "qwen3_moe")])
def test_products_of_many_tokens_are_added_to_the_residual_stream(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without biases, before dense layers and before experts."""
    model, _ = make(name, tmp_path, "float32")
    by_parts, _, _ = steps(model, FusedDecoder(model), LONG)
    added, add = [], torch.Tensor.addmm_
    monkeypatch.setattr(fused, "ADDED_FROM", 1)
    monkeypatch.setattr(fused, "linear_config", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda to, *of: added.append(to) or add(to, *of))
    logits, _, _ = steps(model, FusedDecoder(model, plans=ExpertPlans(joined_tokens=0)), LONG)
    assert added and error(logits, by_parts) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", *nightly("qwen3-odd", "llama")])
def test_tokens_that_are_not_wanted_leave_their_kv_alone(name: str, tmp_path: Path) -> None:
    """Two chunks of three rows; of the first step no logits are wanted, of the second those of two rows."""
    model, _ = make(name, tmp_path, "float32")
    whole, wanted = (PagedRunner(model, 3, 30, forward=FusedDecoder(model)) for _ in range(2))
    first, second = {0: PROMPT[:9], 1: PROMPT[3:8], 2: PROMPT[:2]}, {2: PROMPT[2:6], 0: PROMPT[9:12], 1: PROMPT[8:13]}
    whole.prefill(first)
    wanted.prefill(first, last_of=[])
    logits, last = whole.prefill(second), wanted.prefill(second, last_of=[0, 1])
    assert last.keys() == {0, 1}
    for row, row_logits in last.items():
        assert torch.allclose(row_logits, logits[row][-1:], atol=1e-4)
    for mine, theirs in zip((*wanted.kv.k, *wanted.kv.v), (*whole.kv.k, *whole.kv.v), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3-odd", "float32"), *nightly(("olmoe", "bfloat16"), ("qwen3", "float32"))]
)
def test_kv_in_fp8_is_what_the_generic_path_keeps(name: str, dtype: str, tmp_path: Path) -> None:
    """With its window, and with both norms of queries and keys: by head, and over all heads."""
    save_rounded(name, tmp_path, 0)
    model, wide = load(tmp_path, dtype), load(tmp_path, "float32")
    coded, plain = (side_by_side(model, wide, kv_dtype, COARSE) for kv_dtype in (torch.float8_e4m3fn, None))
    runner, generic = coded.by_kernels, coded.by_modules
    assert all(cache.dtype == torch.uint8 for cache in runner.kv.k)
    if dtype == "float32":  # in bf16 the paths' last bits differ too often
        for mine, theirs in zip((*runner.kv.k, *runner.kv.v), (*generic.kv.k, *generic.kv.v), strict=True):
            # A value between two codes goes either way; the next layers then differ by more than a last bit.
            assert (mine[1:] != theirs[1:]).float().mean() < 0.05
        assert (runner.kv.k[0][1:] != generic.kv.k[0][1:]).sum() + (runner.kv.v[0][1:] != generic.kv.v[0][1:]).sum() < 3
        for mine, theirs in zip(runner.kv.scales, generic.kv.scales, strict=True):
            assert torch.allclose(mine[1:], theirs[1:], rtol=0.05)
    by_kernels, by_modules = errors([coded])
    assert by_kernels < 1.25 * by_modules + 1e-4
    assert errors([plain])[0] < by_kernels, "it is another, coarser cache"


@pytest.mark.parametrize(
    "name",
    [
        "olmoe",
        "gemma3",
        *nightly("gemma4", "olmo2", "granite", "gemma2", "glm4", "gpt_oss", "qwen3", *SPARSE[:3], *SPARSE[5:]),
    ],
)
def test_a_bf16_model_is_as_close_to_float32_as_by_the_generic_path(name: str, tmp_path: Path) -> None:
    """Of a mixture the first step takes the kernels for many tokens, the second those for more than a few."""
    plans, runs = ExpertPlans(coarse, joined_tokens=2), []
    for seed in SEEDS:
        reference = save_rounded(name, tmp_path / str(seed), seed)
        wide = load(tmp_path / str(seed), "float32")
        runs.append(side_by_side(load(tmp_path / str(seed), "bfloat16"), wide, plans=plans))
        exact, _, ids = steps(wide, wide, LONG)  # with experts of its own choice
        assert (exact - expected(reference, ids)).abs().max() < 1e-4
        mine, theirs = runs[-1].by_kernels.kv, runs[-1].by_modules.kv
        for ours, others in zip(mine.tensors, theirs.tensors, strict=True):
            assert error(ours[1:], others[1:]) < 2e-3, "unwritten entries are large: a stray write would show"
    by_kernels, by_modules = errors(runs)
    assert by_kernels < 1.25 * by_modules + 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "generic"),
    [("llama-odd", {DenseFeedForward}), ("glm", set()), ("qwen3_moe", {SparseFeedForward})],
)
def test_a_block_that_the_kernels_do_not_take_runs_by_its_own_code(
    name: str, generic: set[type], tmp_path: Path
) -> None:
    """Biases of feed-forward products, experts in float32; the other blocks stay fused, neighbours turn or not."""
    ran: set[type] = set()
    model, reference = make(name, tmp_path, "float32")
    for block in model.modules():
        if isinstance(block, Attention | DenseFeedForward | SparseFeedForward):
            block.forward = noting(block.forward, ran, type(block))
    logits, _, ids = steps(model, FusedDecoder(model), LONG)
    assert ran == generic
    assert (logits - expected(reference, ids)).abs().max() < 1e-4


def noting(forward: Any, ran: set[type], block: type) -> Any:
    def noted(*args: Any) -> Any:
        ran.add(block)
        return forward(*args)

    return noted


@pytest.mark.parametrize("kv_dtype", [torch.float32, *nightly(torch.float8_e4m3fn)])
def test_layers_may_differ_in_heads_rope_window_and_width(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    """The cache has the size of each layer, and both paths agree."""
    plain = make("qwen3", tmp_path, "float32")[0].spec
    layers = list(plain.layers)
    rope = RopeSpec("default", 700.0)
    other = dataclasses.replace(layers[1].mixer, heads=2, kv_heads=1, head_dim=32, rope=rope, window=5, qk_norm="none")
    narrow = dataclasses.replace(layers[1].feed_forward, intermediate=64)
    layers[1] = dataclasses.replace(layers[1], mixer=other, feed_forward=narrow)
    spec = dataclasses.replace(plain, layers=tuple(layers))
    model = Decoder(spec, torch.float32, CPU)
    fill_random(model, seed=1)
    kv = KVCache.allocate(spec, 5, 4, kv_dtype, "cpu")
    assert [tuple(k.shape[2:]) for k in kv.k] == [(2, 16), (1, 32), (2, 16)]
    held = sum(tensor.nbytes for tensor in kv.tensors)
    assert held == 5 * 4 * spec.kv_bytes_per_token(kv_dtype) and kv.pages == 5
    by_kernels, by_generic = (steps(model, forward, LONG, kv_dtype)[0] for forward in (FusedDecoder(model), model))
    assert error(by_kernels, by_generic) < (1e-5 if kv_dtype == torch.float32 else 0.05)
    whole = PagedRunner(model, rows=1, max_tokens=LONG + 2, kv_dtype=kv_dtype)
    assert error(whole.prefill({0: tokens(LONG + 2, spec.vocab, 1)})[0], by_generic[-LONG - 2 :]) < 1e-5


def test_the_next_step_uses_weights_that_were_copied_into_parameters(tmp_path: Path) -> None:
    """A hot swap writes into the parameters; the kernels' weights are the same memory."""
    model, _ = make("mixtral", tmp_path / "old", "bfloat16")
    forward = FusedDecoder(model)
    other = make_checkpoint("mixtral", tmp_path / "new", 5, **MODELS["mixtral"][1]).bfloat16()
    swapped, views = (
        load_model(ModelSettings(path=str(tmp_path / "new"), dtype="bfloat16"), CPU).model,
        model.hf_views(),
    )
    with torch.inference_mode():
        for name, weight in other.state_dict().items():
            views[name].copy_(weight)
    ids = {0: tokens(3, model.spec.vocab, 1)}
    after = PagedRunner(model, rows=1, max_tokens=8, forward=forward).prefill(ids)[0]
    assert torch.equal(after, PagedRunner(swapped, rows=1, max_tokens=8, forward=FusedDecoder(swapped)).prefill(ids)[0])


def test_kernel_sizes_bound_the_steps_that_run_the_same_kernels(tmp_path: Path) -> None:
    """A step of any size launches the kernels of the next larger one of these sizes."""
    forward = FusedDecoder(make("mixtral", tmp_path, "bfloat16")[0])
    sizes, shape = forward.kernel_sizes(), MoEShape(experts=5, top_k=2, hidden=64, inner=96)
    assert sizes == sorted(set(sizes)) and min(sizes) > 0
    for tokens_ in range(1, 3000):
        largest = next((size for size in sizes if size >= tokens_), 5000)
        plans = [moe_plan(shape, "plain", torch.bfloat16, size) for size in (tokens_, largest)]
        assert plans[0] == plans[1]
        assert pairs_at_once(2 * tokens_) == pairs_at_once(2 * largest)
        for bound in (MOST_ROWS, PLANS.joined_tokens):
            assert (tokens_ <= bound) == (largest <= bound)


def test_fused_kernels_run_on_a_gpu_and_take_blocks_without_rare_options(tmp_path: Path) -> None:
    dense, sparse, biased = (make(name, tmp_path / name, "bfloat16")[0] for name in ("qwen3", "qwen3_moe", "llama-odd"))
    assert not any(supports(model) for model in (dense, sparse, biased)), "on a CPU the generic path runs"
    for model, taken in ((dense, True), (biased, False)):
        layer = model.spec.layers[0]
        assert takes_mixer(layer.mixer) and takes_feed_forward(layer.feed_forward, torch.float32) == taken
    plain = dense.spec.layers[0].mixer
    for rare in ({"value_dim": 8}, {"value_scale": 0.5}):
        assert not takes_mixer(dataclasses.replace(plain, **rare))
    assert takes_feed_forward(sparse.spec.layers[0].feed_forward, torch.bfloat16)
    assert not takes_feed_forward(sparse.spec.layers[0].feed_forward, torch.float32), "experts need 16 bits"
