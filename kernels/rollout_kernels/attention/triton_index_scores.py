"""The kernel of `index_scores`: a program for a token and a tile of positions reads keys from their pages.

Neither products by head nor copies of keys go to memory. Tiles after a token's own position read nothing, so a captured
graph, whose grid covers the longest context, costs what the present contexts need.

Legend: T tokens, H heads of the indexer, D their dimension, N positions of a tile, C positions of a context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import dot, follow, follow_options

_TILE = 128  # positions of a program
_MOST_HEADS = 64  # heads that are multiplied at once


# Spans of a step begin at any token and in any row, so these pointers have any alignment.
@triton.jit(
    do_not_specialize=["width", "stride_table"],
    do_not_specialize_on_alignment=["q_ptr", "weights_ptr", "table_ptr", "positions_ptr"],
)
def _index_scores_kernel(
    q_ptr, weights_ptr, keys_ptr, table_ptr, positions_ptr, out_ptr,
    width,
    stride_q, stride_table,
    H: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out = out_ptr + t * width + n
    follow()
    position = tl.load(positions_ptr + t)
    live = (n <= position) & (n < width)
    if tile * BLOCK_N > position:
        tl.store(out, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=n < width)
    else:
        d = tl.arange(0, BLOCK_D)
        page = tl.load(table_ptr + t * stride_table + n // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        at = (page * PAGE_SIZE + n % PAGE_SIZE) * D
        keys_ND = tl.load(keys_ptr + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        total = tl.zeros([BLOCK_N], tl.float32)
        for first in tl.static_range(0, H, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            q = q_ptr + t * stride_q + h[:, None] * D + d[None, :]
            q_HD = tl.load(q, mask=(h < H)[:, None] & (d < D)[None, :], other=0.0)
            weight = tl.load(weights_ptr + t * H + h, mask=h < H, other=0.0)
            products = dot(q_HD, tl.trans(keys_ND), tl.zeros([BLOCK_H, BLOCK_N], tl.float32))
            if RELU:
                products = tl.maximum(products, 0.0)
            total += tl.sum(products * weight[:, None], 0)
        tl.store(out, tl.where(live, total, float("-inf")), mask=n < width)


def index_scores(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_PS1D: torch.Tensor,
    table_TP: torch.Tensor,
    positions_T: torch.Tensor,
    relu: bool = True,
) -> torch.Tensor:
    """See `rollout_kernels.attention.index_scores`."""
    tokens, heads, dim = q_THD.shape
    page_size = keys_PS1D.shape[1]
    width = table_TP.shape[1] * page_size
    assert q_THD.stride()[1:] == (dim, 1) and keys_PS1D.is_contiguous() and weights_TH.is_contiguous()
    assert q_THD.dtype == keys_PS1D.dtype and weights_TH.dtype == torch.float32
    assert table_TP.stride(1) == 1 and positions_T.is_contiguous()
    out_TC = torch.empty(tokens, width, dtype=torch.float32, device=q_THD.device)
    _index_scores_kernel[(triton.cdiv(width, _TILE), tokens)](
        q_THD, weights_TH, keys_PS1D, table_TP, positions_T, out_TC, width, q_THD.stride(0), table_TP.stride(0),
        H=heads, D=dim, PAGE_SIZE=page_size, BLOCK_H=min(_MOST_HEADS, max(16, triton.next_power_of_2(heads))),
        BLOCK_N=_TILE, BLOCK_D=max(16, triton.next_power_of_2(dim)), RELU=relu, num_warps=4,
        **follow_options(q_THD.device),
    )  # fmt: skip
    return out_TC
