"""Formats of expert weights: representable weights are exact, and the device quantises as torch does."""

import pytest
import torch
from rollout_kernels.moe.formats import FORMATS, ExpertWeights
from rollout_kernels.moe.quantize import power_code, quantize
from rollout_kernels.moe.triton_quantize import empty_weights, quantize_in_pieces, quantize_into, quantize_on_device

from tests.support.kernels.moe_cases import DEVICE

CODED = [format for format in FORMATS if format != "plain"]
#: The largest relative error of rounding to three bits of mantissa: half a step.
HALF_STEP = 2.0**-4


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * torch.exp(spread * torch.randn(*shape, generator=generator))).to(
        DEVICE, dtype
    )


@pytest.mark.parametrize("format", CODED)
@pytest.mark.parametrize(("shape", "halves"), [((2, 24, 96), 1), ((1, 264, 160), 2), ((1, 130, 288), 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_device_computes_the_codes_and_scales_of_the_twin(format, shape, halves, dtype):
    w = weights(*shape, dtype=dtype, spread=2.0)
    w[0, 3] = 0.0
    got, expected = quantize_on_device(w, format, halves), quantize(w, format, halves)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values_ENK, expected.values_ENK)


def test_every_code_is_reached_by_its_value_and_by_values_that_round_to_it():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].sort().values.unique()
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1])])
    w = torch.zeros(1, 1, -(-len(near) // 31) * 32).unflatten(2, (-1, 32))
    w[..., 31] = 448.0  # a scale of one
    w[..., :31] = torch.nn.functional.pad(near, (0, w[..., :31].numel() - len(near))).view(w[..., :31].shape)
    w = w.flatten(2).to(DEVICE)
    got = quantize_on_device(w, "mxfp8")
    assert (got.scales == 127).all()
    assert torch.equal(got.values_ENK, w.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("number", [float("nan"), -float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_gets_a_nan_scale(number):
    w = weights(1, 4, 96)
    w[0, 2, 40] = number
    got, expected = quantize_on_device(w, "mxfp8"), quantize(w, "mxfp8")
    assert torch.equal(got.scales, expected.scales) and torch.equal(got.values_ENK, expected.values_ENK)
    spoilt = torch.zeros(4, 3, dtype=torch.bool, device=DEVICE)
    spoilt[2, 1] = True
    assert torch.equal(got.scales[0] == 255, spoilt) and not got.dequantized()[0, 2, 32:64].isfinite().any()


@pytest.mark.parametrize("make", [quantize, quantize_on_device])
def test_mxfp8_comes_back_exactly(make):
    first = make(weights(2, 64, 96, spread=3.0), "mxfp8")
    second = make(first.dequantized(torch.float32), "mxfp8")
    assert torch.equal(second.dequantized(), first.dequantized())


@pytest.mark.parametrize("make", [quantize, quantize_on_device])
@pytest.mark.parametrize("format", CODED)
def test_codes_times_a_power_of_two_come_back_exactly(make, format):
    codes = torch.randint(0, 0x7F, (1, 128, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes[:, :, ::32] = 0x7E  # the largest value in every row, block and group
    w = (codes.view(torch.float8_e4m3fn).float() * 2.0**-9).to(DEVICE)
    assert torch.equal(make(w, format).dequantized(torch.float32), w)


@pytest.mark.parametrize("format", CODED)
def test_values_are_off_by_half_a_step_at_most(format):
    w = weights(2, 64, 96, spread=0.3, dtype=torch.float32)
    got = quantize(w, format).dequantized()
    largest = w.abs().amax(dim=(1, 2), keepdim=True).double()
    assert ((got - w.double()).abs() <= HALF_STEP * w.double().abs() + largest * 2.0**-17).all()


@pytest.mark.parametrize("format", CODED)
def test_rows_and_columns_of_any_size_come_back(format):
    w = weights(1, 2 * 136, 160, spread=0.3, dtype=torch.float32)
    w *= torch.exp2(torch.arange(2 * 136.0) // 17)[:, None].to(DEVICE)  # rows and columns of very different size
    w[:, :, 128:] *= 1000
    got = quantize(w, format, halves=2).dequantized()
    wide = 0.05 if format != "fp8_block" else 0.2  # some share a block with much larger ones
    error = (got - w.double()).norm(dim=2) / w.double().norm(dim=2)
    assert error[:, ::8].max() < wide
    assert ((got - w.double())[:, :, 128:].norm(dim=2) / w.double()[:, :, 128:].norm(dim=2)).max() < wide


def test_the_power_is_the_smallest_that_holds_the_largest_value():
    amax = torch.tensor([448.0, 448.0000305, 224.0, 1e-38, 0.0, 3.3e38])
    powers = torch.exp2(power_code(amax).double() - 127)
    assert powers[:3].tolist() == [1.0, 2.0, 0.5]
    assert (amax.double() <= 448 * powers).all()
    assert (amax[[0, 1, 2, 5]].double() > 448 * powers[[0, 1, 2, 5]] / 2).all()


@pytest.mark.parametrize("format", CODED)
def test_parts_are_quantised_as_they_arrive(format):
    w = weights(2, 2 * 40, 64)
    whole = quantize(w, format, halves=2)
    out = empty_weights(2, 2 * 40, 64, format, 2, torch.device(DEVICE))
    quantize_into(w[1:], out.part(1))
    for half in range(2):
        quantize_into(w[:1, half * 40 : half * 40 + 40], out.part(0, half))
    assert torch.equal(out.values_ENK, whole.values_ENK) and torch.equal(out.scales, whole.scales)
    assert torch.equal(out.dequantized(), whole.dequantized())


@pytest.mark.parametrize("format", CODED)
def test_experts_are_quantised_some_at_a_time(format):
    w = weights(5, 2 * 40, 64)
    out = empty_weights(5, 2 * 40, 64, format, 2, torch.device(DEVICE))
    quantize_in_pieces(w.cpu().transpose(0, 1).contiguous().transpose(0, 1), out, 2)
    whole = quantize(w, format, halves=2)
    assert torch.equal(out.values_ENK, whole.values_ENK) and torch.equal(out.scales, whole.scales)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    codes = torch.zeros(2, 64, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="dtype"):
        ExpertWeights(codes)
    with pytest.raises(ValueError, match=r"shape \(2, 64\)"):
        ExpertWeights(codes, torch.zeros(2, 63), "fp8_row")
    with pytest.raises(ValueError, match="float32"):
        ExpertWeights(codes, torch.zeros(2, 64).double(), "fp8_row")
    with pytest.raises(ValueError, match="multiple of 32"):
        ExpertWeights(codes[..., :80].contiguous(), torch.zeros(2, 64, 2, dtype=torch.uint8), "mxfp8")
    with pytest.raises(ValueError, match="contiguous"):
        ExpertWeights(codes.transpose(1, 2), torch.zeros(2, 96), "fp8_row")
    with pytest.raises(ValueError, match="halves"):
        ExpertWeights(codes[:, :63].contiguous(), torch.zeros(2, 63), "fp8_row", 2)
