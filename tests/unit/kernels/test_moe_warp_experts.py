"""The kernels for few tokens against float64, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from rollout_kernels.moe.formats import FORMATS
from rollout_kernels.moe.triton_warp_experts import WarpConfig, moe_down, moe_gate_up
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm

from tests.support.kernels.grids import nightly
from tests.support.kernels.moe_cases import DEVICE, Layer, assert_close, exact, layer, relative

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = WarpConfig(rows=64, at_once=2)  # few programs: the interpreter takes milliseconds for each


def run(case: Layer, config: WarpConfig = SMALL, parts: bool = False) -> torch.Tensor:
    h = moe_gate_up(case.x_TH, case.experts_TK, case.gate_up, config)
    return moe_down(h, case.experts_TK, case.weights_TK, case.down, config, parts)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_format_follows_float64(format, dtype):
    case = layer(3, format=format, dtype=dtype)
    assert_close(run(case), exact(case), 4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "inner", "top_k"), [(160, 96, 3), *nightly((1056, 32, 1), (32, 544, 2), (32, 576, 2))]
)
def test_odd_shapes(format, hidden, inner, top_k):
    case = layer(2, format=format, hidden=hidden, inner=inner, top_k=top_k)
    assert_close(run(case), exact(case))


def test_widths_that_are_only_even():
    case = layer(2, hidden=150, inner=46)
    assert_close(run(case), exact(case))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_neurons_that_do_not_fill_a_program(format):
    case = layer(2, format=format, hidden=160, inner=96, top_k=1)
    assert_close(run(case, WarpConfig(rows=16, neurons=4, at_once=3)), exact(case))


@pytest.mark.parametrize("routing", ["skewed", "one"])
def test_tokens_that_share_experts(routing):
    case = layer(5, routing=routing)
    assert_close(run(case), exact(case))


@pytest.mark.parametrize("format", ["plain", "mxfp8", *nightly("fp8_row", "fp8_block")])
def test_a_row_does_not_depend_on_the_others(format):
    case = layer(4, format=format, hidden=128, inner=64)
    together = run(case)
    alone = torch.cat([run(case.rows([row])) for row in range(4)])
    assert torch.equal(together, alone)
    order = [3, 1, 0, 2]
    assert torch.equal(run(case.rows(order)), together[order])


@pytest.mark.parametrize("format", ["mxfp8", *nightly("plain")])
@pytest.mark.parametrize(
    "config",
    [
        WarpConfig(rows=16, neurons=2, at_once=1),
        WarpConfig(rows=32, at_once=8, num_warps=1, across=True, once=False),
        *nightly(WarpConfig(rows=32, at_once=4, fence=False)),
    ],
)
def test_configurations_agree(format, config):
    case = layer(2, format=format, hidden=512, inner=64, top_k=4)
    assert_close(run(case, config), exact(case))


def test_the_sum_over_experts_is_kept_in_float32_for_the_norm_that_follows():
    case = layer(3)
    parts = run(case, parts=True)
    h = moe_gate_up(case.x_TH, case.experts_TK, case.gate_up, SMALL)
    down = case.down.dequantized()[case.experts_TK.long()]
    expected = torch.einsum("tki,tkhi,tk->th", h.double(), down, case.weights_TK.double())
    assert parts.dtype == torch.float32 and relative(parts[0], expected) < 1e-6
    residual = torch.zeros_like(case.x_TH)
    add_rms_norm(residual, parts, torch.ones(256, dtype=residual.dtype, device=DEVICE), 1e-6)
    assert torch.equal(residual, run(case))


def test_unchosen_experts_are_not_read():
    case = layer(2, experts=8)
    for weights in (case.gate_up, case.down):
        unused = [e for e in range(8) if e not in case.experts_TK]
        weights.values_ENK[unused] = float("nan")
    assert run(case).isfinite().all()


def test_the_smallest_power_of_two_is_a_scale_too():
    case = layer(2, format="mxfp8")
    case.down.scales.fill_(0)  # 2^-127, below the normal float32 values
    h = torch.ones(2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    parts = moe_down(h, case.experts_TK, case.weights_TK, case.down, SMALL, parts=True)
    down = case.down.dequantized()[case.experts_TK.long()].sum(-1)
    assert relative(parts[0], torch.einsum("tkh,tk->th", down, case.weights_TK.double())) < 1e-5
