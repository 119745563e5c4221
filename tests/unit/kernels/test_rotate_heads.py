"""Turning heads in place is what transformers does in vision towers."""

import pytest
import torch
from rollout_kernels import rotate_heads
from rollout_kernels.norm_rope import triton_rotate
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 4), (7, 3, 72), (10, 16, 80), (5, 20, 64)])
def test_queries_and_keys_turn_and_values_stay(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, 3, heads, dim, generator=generator).to(DEVICE, dtype)
    angles = torch.randn(tokens, dim, generator=generator).to(DEVICE) * 30  # both halves have angles of their own
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], cos, sin)
    for rotate in (rotate_heads, triton_rotate.rotate_heads):
        found = qkv.clone()
        rotate(found[:, :2].flatten(1, 2), cos, sin)
        for part, exact in zip(found[:, :2].unbind(1), expected, strict=True):
            torch.testing.assert_close(part, exact, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-6)
        assert torch.equal(found[:, 2], qkv[:, 2])
