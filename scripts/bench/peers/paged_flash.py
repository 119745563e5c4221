"""Replaces the two functions of the flash-attn package that transformers' continuous batching uses.

    varlen_attention    packed prompts                          torch's FlashAttention kernel
    append_and_attend   one token per row over a paged cache    this project's paged decode kernel, planned per step

Without flash-attn, transformers falls back to dense masks and is several times slower, which would be an unfair
comparison. Its cache, scheduler, graphs and sampling are unchanged. On a CPU both have a slow equivalent for tests.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from rollout_kernels.attention import DecodePlan, paged_decode_attention, plan_paged_decode
from rollout_kernels.attention.triton_decode_plan import DecodeWork

Window = tuple[int, int]
_NO_WINDOW: Window = (-1, -1)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NO_WINDOW,
) -> torch.Tensor:
    """Attention of packed sequences; q [tokens, heads, dim], k and v [tokens, kv heads, dim]; returns q's shape.

    With `causal` the last query of a sequence is aligned with its last key.
    """
    assert causal and window_size == _NO_WINDOW, "only what these models need"
    if not q.is_cuda:
        return _varlen_on_cpu(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), 0.0, True, False, scale=softmax_scale
    )[0]
    return out


def _varlen_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    q_at, k_at = q_starts.tolist(), k_starts.tolist()
    for i in range(len(q_at) - 1):
        queries, keys = slice(q_at[i], q_at[i + 1]), slice(k_at[i], k_at[i + 1])
        if q_at[i] == q_at[i + 1]:
            continue
        positions = torch.arange(k_at[i + 1] - k_at[i])
        visible = positions[None] <= positions[-(q_at[i + 1] - q_at[i]) :, None]
        out[queries] = F.scaled_dot_product_attention(
            q[queries].transpose(0, 1),
            k[keys].transpose(0, 1).repeat_interleave(group, 0),
            v[keys].transpose(0, 1).repeat_interleave(group, 0),
            visible,
            scale=scale,
        ).transpose(0, 1)
    return out


@triton.jit
def _append_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    lens_ptr,
    table_stride,
    S: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.load(lens_ptr + row)
    if at >= 0:
        page = tl.load(table_ptr + row * table_stride + at // S).to(tl.int64)
        x = tl.arange(0, BLOCK)
        there = (page * S + at % S) * W + x
        tl.store(k_cache_ptr + there, tl.load(k_ptr + row * W + x, mask=x < W), mask=x < W)
        tl.store(v_cache_ptr + there, tl.load(v_ptr + row * W + x, mask=x < W), mask=x < W)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write one token per row after its `lens` tokens; a row of length -1 is padding and is skipped.

    k and v are [rows, kv heads, dim], contiguous as the caches [pages, page size, kv heads, dim] are.
    """
    assert k.is_contiguous() and v.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    rows, page_size, width = k.shape[0], k_cache.shape[1], k.shape[1] * k.shape[2]
    if k.is_cuda:
        block = triton.next_power_of_2(width)
        _append_kernel[(rows,)](k, v, k_cache, v_cache, table, lens, table.stride(0), S=page_size, W=width, BLOCK=block)
        return
    for row, at in enumerate(lens.tolist()):
        if at >= 0:
            page = table[row, at // page_size]
            k_cache[page, at % page_size], v_cache[page, at % page_size] = k[row], v[row]


class PagedDecode:
    """`append_and_attend` with a plan that the layers of a step share.

    The first layer of a step makes the plan, also while a graph is captured.
    """

    def __init__(self) -> None:
        self._first_cache: int | None = None
        self._plan: DecodePlan | DecodeWork | None = None

    def append_and_attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = _NO_WINDOW,
    ) -> torch.Tensor:
        """Append a token per row and attend to its row; q, k, v are [rows, 1, heads, dim]; returns q's shape.

        `cache_seqlens` (int32) are the lengths before this token, -1 for padding rows, whose result is undefined.
        """
        assert q.shape[1] == 1 and window_size == _NO_WINDOW, "only what these models need"
        append(k[:, 0], v[:, 0], k_cache, v_cache, block_table, cache_seqlens)
        lens = cache_seqlens + 1
        table = (
            block_table if q.is_cuda else block_table.clamp(min=0)
        )  # the twin gathers pages and masks them afterwards
        most = table.shape[1] * k_cache.shape[1]
        if self._first_cache is None:
            self._first_cache = k_cache.data_ptr()
        if self._plan is None or k_cache.data_ptr() == self._first_cache:
            self._plan = plan_paged_decode(table, lens, k_cache, heads=q.shape[2], window=None, max_context=most)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out = paged_decode_attention(
            q[:, 0], k_cache, v_cache, table, lens, scale=scale, window=None, max_context=most, plan=self._plan
        )
        return out[:, None]
