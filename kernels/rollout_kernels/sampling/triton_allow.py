"""The mask of a constraint on a GPU: a program handles one constrained row and one block of the vocabulary.

Legend: S rows that sample, V vocabulary, C constrained rows, W words of a mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _allow_kernel(logits_ptr, at_ptr, masks_ptr, V, W, first_token, BLOCK: tl.constexpr):
    row = tl.load(at_ptr + tl.program_id(0))
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = v < V
    token = first_token + v
    words = tl.load(masks_ptr + tl.program_id(0).to(tl.int64) * W + token // 32, mask=live, other=0)
    banned = ((words >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * V + v, float("-inf"), mask=live & banned)


def allow_only(logits_SV: torch.Tensor, at_C: torch.Tensor, masks_CW: torch.Tensor, first_token: int = 0) -> None:
    """`rollout_kernels.sampling.allow_only` on a GPU; the arguments are the same. All tensors are contiguous."""
    assert logits_SV.is_contiguous() and masks_CW.is_contiguous()
    vocab, words = logits_SV.shape[1], masks_CW.shape[1]
    grid = (len(at_C), triton.cdiv(vocab, _BLOCK))
    _allow_kernel[grid](logits_SV, at_C, masks_CW, vocab, words, first_token, _BLOCK)
