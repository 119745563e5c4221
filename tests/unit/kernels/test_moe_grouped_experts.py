"""The kernels for many tokens against float64, in Triton's interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from rollout_kernels.moe.formats import FORMATS
from rollout_kernels.moe.triton_group_pairs import group_pairs
from rollout_kernels.moe.triton_grouped_experts import (
    GroupedConfig,
    combine,
    grouped_down,
    grouped_gate_up,
    narrow_rows,
)
from rollout_kernels.moe.triton_quantize import quantize_on_device
from rollout_kernels.moe.triton_warp_experts import WarpConfig, moe_down, moe_gate_up

from tests.support.kernels.grids import nightly
from tests.support.kernels.moe_cases import DEVICE, Layer, assert_close, exact, layer, relative

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = GroupedConfig(block_n=64, block_k=128)


def parts_of(case: Layer, config: GroupedConfig = SMALL, tile_rows: int = 16) -> torch.Tensor:
    groups = group_pairs(case.experts_TK, case.gate_up.values_ENK.shape[0], tile_rows)
    h = grouped_gate_up(case.x_TH, groups, case.gate_up, case.experts_TK.shape[1], config)
    return grouped_down(h, groups, case.weights_TK, case.down, config)


def run(case: Layer, config: GroupedConfig = SMALL, tile_rows: int = 16) -> torch.Tensor:
    return combine(parts_of(case, config, tile_rows), case.x_TH.dtype)


def warp(case: Layer) -> torch.Tensor:
    h = moe_gate_up(case.x_TH, case.experts_TK, case.gate_up, WarpConfig(rows=32))
    return moe_down(h, case.experts_TK, case.weights_TK, case.down, WarpConfig(rows=32))


@pytest.mark.parametrize(
    ("format", "bulk"),
    [*((format, False) for format in FORMATS), ("plain", True), *nightly(*((format, True) for format in FORMATS[1:]))],
)
def test_every_format_follows_float64(format, bulk):
    case = layer(5, format=format)
    config = GroupedConfig(block_n=64, block_k=128, bulk=bulk)
    assert_close(run(case, config), exact(case))


@pytest.mark.parametrize("format", ["plain", "fp8_row", "fp8_block"])
def test_half_precision(format):
    case = layer(5, format=format, dtype=torch.float16)
    assert_close(run(case), exact(case), 6e-4)


def test_mxfp8_with_f16_activations_is_refused():
    with pytest.raises(ValueError, match="bf16"):
        run(layer(2, format="mxfp8", dtype=torch.float16))


@pytest.mark.parametrize("bulk", [True, *nightly(False)])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "inner", "top_k"), [(160, 96, 3), *nightly((96, 288, 1))])
def test_odd_shapes(format, hidden, inner, top_k, bulk):
    case = layer(3, format=format, hidden=hidden, inner=inner, top_k=top_k)
    config = GroupedConfig(block_n=64, block_k=128, bulk=bulk)
    assert_close(run(case, config), exact(case))


@pytest.mark.parametrize("tile_rows", [4, 16, 64])
@pytest.mark.parametrize("routing", ["skewed", *nightly("even", "one")])
def test_tiles_of_any_height(routing, tile_rows):
    case = layer(40, hidden=128, inner=64, routing=routing)
    assert_close(run(case, tile_rows=tile_rows), exact(case))


@pytest.mark.parametrize("format", ["plain", "mxfp8", *nightly("fp8_row", "fp8_block")])
def test_a_row_does_not_depend_on_the_others(format):
    case = layer(4, format=format, hidden=128, inner=64, routing="skewed")
    together = run(case)
    alone = torch.cat([run(case.rows([row])) for row in range(4)])
    assert torch.equal(together, alone)


def test_parts_are_what_each_expert_adds():
    case = layer(3, hidden=128, inner=64)
    parts = parts_of(case)
    for slot in range(2):
        one = Layer(
            case.x_TH, case.experts_TK[:, slot : slot + 1], case.weights_TK[:, slot : slot + 1], case.gate_up, case.down
        )
        assert relative(parts[slot], exact(one)) < 4e-3
    assert relative(combine(parts, torch.float32), parts.double().sum(0)) < 1e-6


def test_a_tile_that_would_cross_blocks_of_scales_is_refused():
    with pytest.raises(AssertionError, match="crosses"):
        run(layer(2, format="fp8_block"), GroupedConfig(block_n=64, block_k=256))


def test_the_smallest_power_of_two_is_a_scale_too():
    case = layer(2, format="mxfp8")
    case.down.scales.fill_(0)  # 2^-127, below the normal float32 values
    groups = group_pairs(case.experts_TK, 6, 16)
    h = torch.ones(4, 64, dtype=torch.bfloat16, device=case.x_TH.device)  # launched between the two, which overlap
    parts = grouped_down(h, groups, case.weights_TK, case.down, SMALL)
    down = case.down.dequantized()[case.experts_TK.long()].sum(-1)
    assert relative(parts.sum(0), torch.einsum("tkh,tk->th", down, case.weights_TK.double())) < 2e-3  # bf16 ends here


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, where infinity is expected
@pytest.mark.parametrize("inner", [64, 128])
def test_all_codes_are_exact_with_all_scales_that_16_bits_can_represent(inner):
    columns = [32 * group + 5 * (group + 1) for group in range(inner // 32)]  # one in each group
    case = layer(len(columns), format="mxfp8", experts=1, top_k=1, hidden=256, inner=inner)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes.masked_fill((codes & 0x7F) == 0x7F, 0)  # not numbers
    case.down.values_ENK.copy_(codes[None, :, None])
    h = torch.eye(inner, dtype=torch.bfloat16, device=DEVICE)[columns]
    groups, weights = group_pairs(case.experts_TK, 1, 16), torch.ones(len(columns), 1, device=DEVICE)
    for scales in ([10, 127, 74, 126], [134, 126, 127, 133]):
        case.down.scales.copy_(torch.tensor(scales[: len(columns)], dtype=torch.uint8))
        parts = grouped_down(h, groups, weights, case.down, SMALL)
        assert torch.equal(parts[0], case.down.dequantized()[0][:, columns].T.float())
    case.down.scales.fill_(135)
    assert not grouped_down(h, groups, weights, case.down, SMALL).isfinite().any()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("number", [float("nan"), *nightly(float("inf"))])
def test_a_weight_that_is_not_finite_affects_only_tokens_of_its_expert(number):
    case = layer(4, format="mxfp8", top_k=1)
    case.experts_TK.copy_(torch.tensor([[0], [3], [1], [3]], dtype=torch.int32))
    weights = case.down.dequantized(torch.float32)
    weights[3, 7, 20] = number
    spoilt = replace(case, down=quantize_on_device(weights, "mxfp8"))
    for got in (run(spoilt), warp(spoilt)):
        assert got[:, 7].isfinite().tolist() == [True, False, True, False]
    assert torch.equal(run(spoilt)[[0, 2]], run(case)[[0, 2]])


@pytest.mark.filterwarnings("ignore:overflow")  # of exp(-gate), numpy's
@pytest.mark.parametrize(
    ("format", "size"),
    [
        ("fp8_row", 1e15),
        ("fp8_block", 1e-15),
        *nightly(("fp8_row", 1e-15), ("fp8_block", 1e15)),
        *nightly(*((format, size) for format in ("fp8_row", "fp8_block") for size in (1.0, 1e6))),
    ],
)
def test_activations_converted_to_f16_keep_the_range_of_bf16(format, size):
    case = layer(5, format=format, hidden=160, inner=96)
    case.x_TH[1:] *= size  # gate and up are about `size`, the activations between the kernels up to its square
    half = GroupedConfig(block_n=64, block_k=128, half=True)
    assert relative(run(case, half)[:1], exact(case)[:1]) < 4e-3
    assert relative(run(case, half)[1:], exact(case)[1:]) < 4e-3
    order = [3, 1, 0, 4, 2]
    assert torch.equal(run(case.rows(order), half), run(case, half)[order])


def test_rows_in_f16_keep_their_values():
    bits = torch.arange(0x8000, dtype=torch.int32, device=DEVICE)
    every = bits.to(torch.int16).view(torch.bfloat16)[:0x7F80]  # finite, not negative
    for low in (1, 15, 100, 226):  # exponents: a row has 28 powers of two below its largest value
        x = every[low << 7 : (low + 29) << 7].view(1, -1)
        half, scales = narrow_rows(torch.cat([x, -x]))
        assert torch.equal(half.double() * scales[:, None], torch.cat([x, -x]).double())
    half, scales = narrow_rows(torch.tensor([[0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0]]).to(every))
    assert torch.equal(half[0].float() * scales[0], torch.zeros(2, device=DEVICE)) and not half[1:, 0].isfinite().any()
