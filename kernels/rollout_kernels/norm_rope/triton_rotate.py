"""The kernel of `rotate_heads`: each pair of a head is read once and written once; the angles stay in the cache.

Legend: T tokens, A heads, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import narrow

_TOKENS = 4  # tokens of a program
_BLOCK = 512  # pairs of a token, of a program


@triton.jit(do_not_specialize=["tokens"])
def _rotate_heads_kernel(
    heads_ptr, cos_ptr, sin_ptr,
    tokens,
    stride,
    PAIRS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (t < tokens) & (pair < PAIRS)
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    first_ptr = heads_ptr + t * stride + pair // HALF * (2 * HALF) + pair % HALF
    table = t * (2 * HALF) + pair % HALF
    first = tl.load(first_ptr, mask=live, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=live, other=0.0).to(tl.float32)
    turned = first * tl.load(cos_ptr + table, mask=live, other=0.0)
    turned -= second * tl.load(sin_ptr + table, mask=live, other=0.0)
    tl.store(first_ptr, narrow(turned, dtype), mask=live)
    turned = second * tl.load(cos_ptr + table + HALF, mask=live, other=0.0)
    turned += first * tl.load(sin_ptr + table + HALF, mask=live, other=0.0)
    tl.store(first_ptr + HALF, narrow(turned, dtype), mask=live)


def rotate_heads(heads_TAD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """See `elementwise.rotate_heads`."""
    tokens, heads, dim = heads_TAD.shape
    assert heads_TAD.stride(1) == dim and heads_TAD.stride(2) == 1 and dim % 2 == 0
    assert cos_TD.is_contiguous() and sin_TD.is_contiguous() and cos_TD.dtype == sin_TD.dtype == torch.float32
    pairs = heads * dim // 2
    _rotate_heads_kernel[(triton.cdiv(tokens, _TOKENS), triton.cdiv(pairs, _BLOCK))](
        heads_TAD, cos_TD, sin_TD, tokens, heads_TAD.stride(0),
        PAIRS=pairs, HALF=dim // 2, TOKENS=_TOKENS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
