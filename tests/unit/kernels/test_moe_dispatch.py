"""The plans of a layer of experts, and a whole layer by each kind of plan."""

import json
import warnings
from functools import partial

import pytest
import torch
from rollout_kernels import gated
from rollout_kernels.moe import dispatch, gluon_experts
from rollout_kernels.moe.dispatch import (
    Entry,
    GroupedPlan,
    MoEShape,
    PaddedPlan,
    WarpPlan,
    default_entry,
    moe_plan,
    padded_from,
    read_table,
    run_experts,
    write_table,
)
from rollout_kernels.moe.formats import FORMATS, ClampedGLU
from rollout_kernels.moe.quantize import quantize
from rollout_kernels.moe.torch_moe import clamped_glu, moe_experts
from rollout_kernels.moe.triton_grouped_experts import GroupedConfig
from rollout_kernels.moe.triton_router import Routing
from rollout_kernels.moe.triton_warp_experts import WarpConfig

from tests.support.kernels.grids import checkered
from tests.support.kernels.moe_cases import DEVICE, exact, layer, relative

QWEN3_30B = MoEShape(experts=128, top_k=8, hidden=2048, inner=768)
PLANS = [
    WarpPlan(WarpConfig(rows=32, at_once=2), WarpConfig(rows=32, at_once=2)),
    GroupedPlan(GroupedConfig(), GroupedConfig()),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("plan", PLANS, ids=["warp", "grouped"])
def test_a_layer_runs_by_any_plan(plan, format):
    case = layer(3, format=format)
    routing = Routing(case.experts_TK, case.weights_TK)
    out = run_experts(case.x_TH, routing, case.gate_up, case.down, plan)
    assert out.dtype == torch.bfloat16 and relative(out, exact(case)) < 4e-3
    parts = run_experts(case.x_TH, routing, case.gate_up, case.down, plan, parts=True)
    assert parts.dtype == torch.float32 and parts.shape[1:] == out.shape
    added = torch.zeros_like(parts[0])
    for part in parts:
        added += part
    assert torch.equal(added.bfloat16(), out), "the norm that adds the parts gets the same sum"


@pytest.mark.parametrize("plan", [*PLANS, GroupedPlan(*2 * (GroupedConfig(bulk=False),))], ids=lambda plan: plan.path)
@pytest.mark.parametrize(("hidden", "inner"), [(256, 64), (160, 96)])
@pytest.mark.parametrize("format", ["plain", "fp8_row", "mxfp8"])
def test_a_layer_may_have_a_clamped_glu_with_biases(plan, hidden, inner, format):
    """Gate and up rows alternate; large gates and values of either sign are bounded."""
    case = layer(3, hidden=hidden, inner=inner, format=format)
    bias = torch.randn(6, 2 * inner, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    glu, routing = ClampedGLU(bias, 1.7, 0.9), Routing(case.experts_TK, case.weights_TK)
    out = run_experts(case.x_TH, routing, case.gate_up, case.down, plan, glu=glu)
    expected = moe_experts(
        case.x_TH.double(),
        case.weights_TK,
        case.experts_TK.long(),
        case.gate_up.dequantized(),
        case.down.dequantized(),
        partial(clamped_glu, alpha=1.7, limit=0.9),
        (bias.double(), torch.zeros(6, hidden, dtype=torch.float64, device=DEVICE)),
    )
    assert relative(out, expected) < 4e-3


@pytest.mark.parametrize(("plan", "format"), checkered(PLANS, FORMATS))
@pytest.mark.parametrize(
    ("activation", "limit"), [("gelu_tanh", None), ("relu2", None), ("silu", 0.3), ("bounded_silu", 0.3)]
)
def test_a_layer_has_the_activation_that_is_asked_for(activation, limit, plan, format):
    """`relu2` is one of values without a gate."""
    case = layer(3, hidden=256, inner=128, format=format)
    halves = 1 if activation == "relu2" else 2
    rows = case.gate_up.dequantized(torch.float32)[:, : halves * 128].contiguous()
    first = quantize(rows.bfloat16(), format, halves=halves)
    routing = Routing(case.experts_TK, case.weights_TK)
    out = run_experts(case.x_TH, routing, first, case.down, plan, activation=activation, limit=limit)
    both = first.dequantized(torch.float32), case.down.dequantized(torch.float32)
    how = partial(gated, activation=activation, limit=limit)
    expected = moe_experts(case.x_TH.float(), case.weights_TK, case.experts_TK.long(), *both, how)
    assert relative(out, expected) < 5e-3


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [MoEShape(60, 4, 2048, 1408), MoEShape(8, 2, 4096, 14336), MoEShape(6, 3, 100, 42)])
def test_every_shape_has_a_plan(shape, format):
    entry = default_entry(shape, format)
    assert [most for most, _ in entry.bands] == sorted({most for most, _ in entry.bands})
    for tokens in (1, 5, 300, 100_000):
        plan = entry.plan(tokens, deterministic=False)
        if isinstance(plan, GroupedPlan):
            element_bytes = 2 if format == "plain" else 1
            assert not plan.gate_up.bulk or shape.hidden * element_bytes % 16 == 0
            assert not plan.down.bulk or shape.inner * element_bytes % 16 == 0


@pytest.mark.filterwarnings("ignore:no measured plan")
def test_few_tokens_go_by_output_and_many_by_expert():
    for format in FORMATS:
        assert moe_plan(QWEN3_30B, format, torch.bfloat16, 1).path == "warp"
        assert moe_plan(QWEN3_30B, format, torch.bfloat16, 128).path == "grouped"


@pytest.mark.filterwarnings("ignore:no measured plan")
def test_the_deterministic_plan_is_one_for_any_number_of_tokens():
    for format in FORMATS:
        plans = {moe_plan(QWEN3_30B, format, torch.bfloat16, t, deterministic=True) for t in (1, 4, 5, 128, 9000)}
        assert len(plans) == 1


@pytest.fixture
def hopper(monkeypatch):
    """Have plans take a CUDA device for a Hopper GPU with so many multiprocessors."""

    def pretend(multiprocessors):
        monkeypatch.setattr(gluon_experts, "is_hopper", lambda device: device.type == "cuda")
        monkeypatch.setattr(dispatch, "multiprocessors", lambda device: multiprocessors)

    return pretend


def test_many_tokens_an_expert_are_padded_on_hopper_alone(hopper):
    device, tokens = torch.device("cuda"), 2048
    hopper(114)
    assert padded_from(QWEN3_30B, "plain", torch.bfloat16, device) == tokens
    for dtype in (torch.bfloat16, torch.float16):
        assert moe_plan(QWEN3_30B, "plain", dtype, tokens, device=device) == PaddedPlan(programs=114)
    today = moe_plan(QWEN3_30B, "plain", torch.bfloat16, tokens)
    assert today.path == "grouped"
    assert moe_plan(QWEN3_30B, "plain", torch.bfloat16, tokens - 1, device=device) == today
    assert moe_plan(QWEN3_30B, "plain", torch.bfloat16, tokens, device=torch.device("cpu")) == today
    assert moe_plan(QWEN3_30B, "plain", torch.bfloat16, tokens, deterministic=True, device=device).path == "grouped"
    assert moe_plan(QWEN3_30B, "fp8_block", torch.bfloat16, tokens, device=device).path == "grouped"


@pytest.mark.filterwarnings("ignore:no measured plan")
def test_shapes_that_tiles_do_not_divide_are_not_padded(hopper):
    device = torch.device("cuda")
    hopper(132)
    assert moe_plan(MoEShape(8, 2, 4096, 14336), "plain", torch.bfloat16, 512, device=device).path == "padded"
    assert moe_plan(MoEShape(8, 2, 4096, 14336), "plain", torch.bfloat16, 511, device=device).path == "grouped"
    for shape in (MoEShape(8, 2, 384, 128), MoEShape(8, 2, 512, 192), MoEShape(1024, 10, 512, 128)):
        assert moe_plan(shape, "plain", torch.bfloat16, 1 << 20, device=device).path == "grouped"


def test_mxfp8_with_f16_activations_uses_the_warp_path():
    assert moe_plan(QWEN3_30B, "mxfp8", torch.float16, 1000).path == "warp"


def test_an_unmeasured_shape_warns_once():
    shape = MoEShape(7, 2, 64, 32)
    with pytest.warns(RuntimeWarning, match="no measured plan"):
        plan = moe_plan(shape, "plain", torch.bfloat16, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moe_plan(shape, "plain", torch.bfloat16, 1) == plan
        moe_plan(QWEN3_30B, "plain", torch.bfloat16, 1)


def test_the_table_holds_only_measured_entries():
    """An entry that equals the default was not measured: without it, its shape gets the same plan and a warning."""
    assert all(entry != default_entry(*key) for key, entry in dispatch.measured_table().items())


def test_the_table_is_read_as_it_was_written():
    table = dispatch.measured_table()
    again = read_table(json.loads(json.dumps(write_table(table, {"device": "none"}))))
    assert again == table and all(isinstance(entry, Entry) for entry in table.values())
