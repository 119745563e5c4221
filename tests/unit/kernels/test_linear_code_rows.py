"""Activations as codes: their rounding against torch, and products of two codes against float64."""

from __future__ import annotations

import pytest
import torch
from rollout_kernels.linear.coded import rounded_rows
from rollout_kernels.linear.products import product_of_codes
from rollout_kernels.linear.triton_code_rows import code_rows
from rollout_kernels.linear.triton_linear import LinearConfig, gated_linear, linear_parts
from rollout_kernels.norm_rope.triton_elementwise import gated, gated_codes

from tests.support.kernels.linear_cases import DEVICE, operands, relative
from tests.unit.kernels.test_linear_coded import case

#: block_n, block_k, split, warps, stages, programs.
SIZES = [
    (64, 128, 1, 4, 8, 132),
    (128, 128, 2, 8, 6, 40),
    (64, 128, 4, 8, 4, 264),
    (128, 128, 8, 8, 3, 7),
    (192, 128, 1, 8, 5, 132),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "inputs"), [(2, 128), (16, 384), (35, 2688)])
def test_rows_become_codes_with_a_scale_for_128_neighbours(dtype, rows, inputs):
    """As the twin rounds them, and as near as a code can be."""
    x, _, _ = operands(rows, 8, inputs)
    x = (x * torch.arange(1, rows + 1, device=DEVICE)[:, None]).to(dtype)
    x[0, 3:70], x[0, 100] = 0, 1e-3
    x[rows // 2, :128] = 0
    made = code_rows(x)
    assert made.codes_MK.shape == (-(-rows // 16) * 16, inputs) and made.codes_MK.dtype == torch.float8_e4m3fn
    assert torch.equal(made.dequantized().float(), rounded_rows(x.float()))
    exact, scales = x.double(), made.scales_BM.T.double().repeat_interleave(128, dim=1)[:rows]
    largest = exact.abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, dim=1)
    assert (((largest / 448).clamp(min=2.0**-126) - scales).abs() <= 2e-7 * scales).all()
    # Half the distance of two codes: of normal codes, and of the smallest ones.
    assert ((made.dequantized() - exact).abs() <= (exact.abs() * 2.0**-4).clamp(min=2.0**-10 * scales)).all()
    assert relative(made.dequantized(), x.double()) < 0.03


def test_rows_that_are_a_view_and_values_that_are_not_finite():
    x, _, _ = operands(3, 8, 512)
    x[1, 5], x[2, 300] = float("nan"), float("inf")
    values = code_rows(x[:, 128:384]).dequantized()
    assert relative(values[0], x[0, 128:384].double()) < 0.03
    assert torch.equal(values[1], code_rows(x[1:2, 128:384].contiguous()).dequantized()[0])
    assert not values[2, 128:].isfinite().all() and values[2, :128].isfinite().all()
    assert not code_rows(x).dequantized()[1, 5].isfinite()


@pytest.mark.parametrize(("rows", "width"), [(3, 128), (20, 1280)])
def test_gated_activations_become_the_codes_of_their_16_bits(rows, width):
    x, _, _ = operands(rows, 8, 2 * width)
    made, expected = gated_codes(x), code_rows(gated(x))
    assert torch.equal(made.codes_MK[:rows].view(torch.uint8), expected.codes_MK[:rows].view(torch.uint8))
    assert torch.equal(made.scales_BM[:, :rows], expected.scales_BM[:, :rows])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs"), [(1, 512), (130, 2048), (1000, 640)])
def test_products_of_many_codes_are_those_of_float64(rows, inputs):
    """By cuBLAS, and where a row is no multiple of 512 by our own kernel."""
    x, weights, _ = case(rows, (256, 128, 192), inputs, "fp8_block")
    expected = code_rows(x).dequantized() @ weights.dequantized().T
    assert relative(product_of_codes(x, weights), expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize(("rows", "widths"), [(1, (4096,)), (64, (128, 150)), (65, (1024, 256)), (300, (512,))])
def test_products_of_two_codes_are_those_of_float64(shape, stagger, rows, widths):
    config = LinearConfig(*shape, streamed=True, stagger=stagger, codes=True)
    for _ in range(3):  # a race would move the error
        x, weights, _ = case(rows, widths, 2048, "fp8_block")
        expected = code_rows(x).dequantized() @ weights.dequantized().T
        parts = linear_parts(x, weights, config)
        # The tensor cores add 128 products with 14 bits.
        assert relative(parts.double().sum(0), expected) < 1e-3
    if config.split == 1:
        x, weights, _ = case(rows, (256, 256), 2048, "fp8_block")
        gate, up = (code_rows(x).dequantized() @ weights.dequantized().T).chunk(2, dim=1)
        assert relative(gated_linear(x, weights, config), torch.nn.functional.silu(gate) * up) < 5e-3
