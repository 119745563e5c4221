"""Norms, rotary embedding and gated activation against their definitions."""

import pytest
import torch
from rollout_kernels import apply_rope, head_rms_norm, rms_norm, rope_cos_sin, silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_follows_its_definition(dtype: torch.dtype) -> None:
    # Small values, so that epsilon counts.
    x, weight = (torch.randn(5, 24) * 1e-2).to(dtype), torch.randn(24).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_norm_treats_each_head_by_itself(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 3, 10).to(dtype), torch.randn(3, 10).to(dtype)
    out = head_rms_norm(x[:, :2], weight[:2], 1e-6)
    for head in range(2):
        torch.testing.assert_close(out[:, head], rms_norm(x[:, head].contiguous(), weight[head], 1e-6))


def test_norm_leaves_its_input_alone() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    rms_norm(x, torch.ones(8) * 2, 1e-6)
    assert torch.equal(x, before)


def test_rope_rotates_pairs_by_position_times_frequency() -> None:
    inv_freq, factor = torch.tensor([1.0, 0.25]), 1.5
    positions = torch.tensor([0, 3, 70_000], dtype=torch.int32)
    sign = torch.tensor([-factor, -factor, factor, factor])
    x = torch.randn(3, 2, 4)
    out = apply_rope(x, *rope_cos_sin(positions, inv_freq.repeat(2), sign))
    pairs = torch.complex(x[..., :2], x[..., 2:])
    angles = positions.double()[:, None, None] * inv_freq.double()
    expected = factor * pairs.to(torch.complex128) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(out.double(), torch.cat((expected.real, expected.imag), -1), rtol=1e-5, atol=1e-5)


def test_rope_keeps_the_type_and_computes_in_float32() -> None:
    cos_sin = rope_cos_sin(torch.arange(3), torch.rand(8), torch.ones(8))
    x = torch.randn(3, 1, 8).bfloat16()
    assert torch.equal(apply_rope(x, *cos_sin), apply_rope(x.float(), *cos_sin).bfloat16())


def test_silu_mul_gates_the_second_half_with_the_first() -> None:
    gate, up = torch.randn(3, 7), torch.randn(3, 7)
    packed = torch.cat((gate, up), -1)
    before = packed.clone()
    torch.testing.assert_close(silu_mul(packed), gate * torch.sigmoid(gate) * up)
    assert torch.equal(packed, before)
