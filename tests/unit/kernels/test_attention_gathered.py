"""Attention over gathered keys and values: the copy in the interpreter; the attention on a Hopper GPU."""

import itertools
import math

import pytest
import torch
from rollout_kernels.attention.gluon_prefill import gathered_attention
from rollout_kernels.attention.triton_gather_kv import TILE, gather_kv, gathered_rows
from rollout_kernels.attention.triton_gathered_items import block_count, prefill_items
from rollout_kernels.common.fp8 import quantize_heads, quantize_values, values_of

from tests.support.kernels.attention_cases import DEVICE, SCALE, Pool, exact, queries, relative

CONTEXTS = [130, 1, 128, 300]


def gather(pool: Pool, contexts: list[int], dtype: torch.dtype, scales=None):
    rows = gathered_rows(contexts)
    return gather_kv(
        pool.k, pool.v, pool.table, pool.lens, rows=rows, most=max(contexts), dtype=dtype, scales_P2GS=scales
    )


@pytest.mark.parametrize("page_size", [16, 5])
def test_contexts_begin_at_tiles_and_zeros_follow_them(page_size):
    pool = Pool(CONTEXTS, page_size, 2, 24, torch.bfloat16)
    for got_GND, which in zip(gather(pool, CONTEXTS, torch.bfloat16), (0, 1), strict=True):
        expected = torch.zeros_like(got_GND)
        start = 0
        for context, length in zip(pool.contexts, CONTEXTS, strict=True):
            expected[:, start : start + length] = context[which].transpose(0, 1).to(DEVICE)
            start += -(-length // TILE) * TILE
        assert start == got_GND.shape[1]
        assert torch.equal(got_GND, expected)


@pytest.mark.parametrize("quantize_v", [quantize_heads, quantize_values])
def test_codes_are_decoded_with_the_scales_of_their_token_and_head(quantize_v):
    pool = Pool(CONTEXTS, 16, 2, 32, torch.bfloat16)
    shape = pool.k.shape[:3]
    k, k_scales = quantize_heads(pool.k.nan_to_num().flatten(0, 1))
    v, v_scales = quantize_v(pool.v.nan_to_num().flatten(0, 1))
    scales = torch.stack([x.view(shape).transpose(1, 2) for x in (k_scales, v_scales)], dim=1).contiguous()
    plain = [(values_of(codes).float() * of[..., None]).bfloat16() for codes, of in ((k, k_scales), (v, v_scales))]
    pool.k, pool.v = (codes.view(pool.k.shape) for codes in (k, v))
    got = gather(pool, CONTEXTS, torch.bfloat16, scales)
    pool.k, pool.v = (values.view(pool.k.shape) for values in plain)
    for coded, decoded in zip(got, gather(pool, CONTEXTS, torch.bfloat16), strict=True):
        assert torch.equal(coded, decoded)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100, 128, 700])
@pytest.mark.parametrize("programs", [132, 5, 1])
@pytest.mark.parametrize(
    "chunks", [[(1, 1)], [(777, 1500), (130, 130), (1, 900), (40, 170)], [(128, 128)] * 3, [(300, 428)]]
)
def test_attention_follows_float64_where_other_pages_are_nan(chunks, programs, window):
    """The bound is the error of weights and results in bf16."""
    contexts = [context for _, context in chunks]
    pool = Pool(contexts, 16, 2, 128, torch.bfloat16)
    counts = [count for count, _ in chunks]
    q = queries(sum(counts), 8, 128, torch.bfloat16)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    items = prefill_items(starts, pool.lens, block_count(counts), window)
    how = {"scale": SCALE, "window": window, "programs": programs}
    out = gathered_attention(q, *gather(pool, contexts, torch.bfloat16), items, **how)
    worst, at = 0.0, 0
    for row, (count, context) in enumerate(chunks):
        for i in sorted({0, 1, 63, 64, 127, 128, count // 2, count - 2, count - 1} & set(range(count))):
            error = relative(out[at + i], exact(q[at + i], pool.contexts[row], context - count + i, window))
            worst = max(worst, math.inf if math.isnan(error) else error)
        at += count
    assert worst < 1e-2
