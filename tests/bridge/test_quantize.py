"""The codes that a trainer makes are those of the worker, bit for bit."""

import pytest
import torch
from rollout_kernels.moe.quantize import quantize

from trainer_bridge import quantize_fp8_block, quantize_fp8_row


def check_codes(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for rows, columns in ((128, 256), (130, 100), (1, 700), (300, 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = torch.randn(rows, columns, generator=generator).to(dtype).to(device)
            weight[0] *= 3e-5
            weight[:, :1] = 0
            for make, format in ((quantize_fp8_block, "fp8_block"), (quantize_fp8_row, "fp8_row")):
                codes, scales = make(weight)
                expected = quantize(weight.cpu()[None], format)
                assert torch.equal(codes.view(torch.uint8).cpu(), expected.values_ENK[0])
                assert torch.equal(scales.cpu(), expected.scales[0])


def test_codes_are_those_of_a_worker():
    check_codes("cpu")


@pytest.mark.gpu
def test_codes_of_a_gpu_are_those_of_a_worker():
    check_codes("cuda")


def test_values_of_codes_come_back_exactly():
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 126, (256, 128), generator=generator).to(torch.uint8)
    codes[::128, ::128] = 126  # the largest value in each block
    again, scales = quantize_fp8_block(codes.view(torch.float8_e4m3fn).float() * 2.0**-5)
    assert torch.equal(again.view(torch.uint8), codes) and torch.equal(scales, torch.full((2, 1), 2.0**-5))


def test_other_tensors_are_refused():
    for wrong in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)):
        for make in (quantize_fp8_block, quantize_fp8_row):
            with pytest.raises(ValueError, match="floating-point matrix"):
                make(wrong)
