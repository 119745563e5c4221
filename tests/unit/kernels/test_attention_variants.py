"""Attention with softcaps and sinks: the kernels and the torch twins against float64."""

import dataclasses
import itertools

import pytest
import torch
from rollout_kernels.attention import paged_decode_attention, paged_prefill_attention, plan_decode
from rollout_kernels.attention.segments import make_segments
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_decode_plan import plan_decode_work
from rollout_kernels.attention.triton_prefill import prefill_attention

from tests.support.kernels.attention_cases import (
    CONTEXTS,
    DEVICE,
    LENS,
    PIECES,
    SCALE,
    SMALL,
    TINY,
    Pool,
    plan,
    queries,
    relative,
)
from tests.support.kernels.grids import nightly

HEADS, KV_HEADS = 6, 2
SINKS = torch.tensor([0.5, -3.0, 4.0, 0.0, 2.0, -40.0])
#: (softcap, sinks)
VARIANTS = [(1.5, None), (None, SINKS), (1.5, SINKS)]


def exact(q_HD, context, position, window, softcap, sinks):
    """Attention of one token's heads in float64."""
    first = 0 if window is None else max(0, position - window + 1)
    k, v = (t[first : position + 1].double().repeat_interleave(q_HD.shape[0] // t.shape[1], 1) for t in context)
    scores = torch.einsum("hd,nhd->hn", q_HD.double().cpu(), k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp()
    total = weights.sum(1) + (0 if sinks is None else sinks.double().exp())
    return torch.einsum("hn,nhd->hd", weights / total[:, None], v)


def on_device(sinks, dtype=torch.float32):
    return None if sinks is None else sinks.to(DEVICE, dtype)


@pytest.mark.parametrize(("softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize(("shares", "fused", "window"), [(30, True, None), (4, False, 33), *nightly((1, True, None))])
def test_decode(softcap, sinks, shares, fused, window):
    pool, q = Pool(LENS, 16, KV_HEADS, 64), queries(len(LENS), HEADS, 64)
    work = plan(pool, KV_HEADS, window, dataclasses.replace(SMALL, fused=fused), shares=shares)
    options = {"scale": SCALE, "window": window, "softcap": softcap, "sinks_H": on_device(sinks)}
    out = decode_attention(q, pool.k, pool.v, pool.table, pool.lens, work=work, **options)
    expected = torch.stack([exact(q[r], pool.contexts[r], n - 1, window, softcap, sinks) for r, n in enumerate(LENS)])
    assert relative(out, expected) < 1e-5
    twin_plan = plan_decode(pool.table, pool.lens, 16, window, 100, torch.float32)
    twin = paged_decode_attention(
        q, *pool.without_nan(), pool.table, pool.lens, max_context=100, plan=twin_plan, **options
    )
    assert relative(twin, expected) < 1e-5


@pytest.mark.parametrize("window", [70, *nightly(None)])
def test_a_row_has_its_sink_once_also_where_rows_share_pages(window):
    lens, common, page = [100, 90, 120, 40], [64, 64, 0], 8
    pool, q = Pool(lens, page, KV_HEADS, 64), queries(len(lens), HEADS, 64)
    for row, positions in enumerate(common, start=1):
        pool.table[row, : positions // page] = pool.table[row - 1, : positions // page]
        for mine, other in zip(pool.contexts[row], pool.contexts[row - 1], strict=True):
            mine[:positions] = other[:positions]
    segments = make_segments(common, len(lens), 4, 16)
    assert segments is not None
    for shares in (1, 12):
        work = plan_decode_work(
            pool.lens,
            KV_HEADS,
            group=HEADS // KV_HEADS,
            window=window,
            config=dataclasses.replace(SMALL, programs_per_sm=1, block_m=16),
            max_context=max(lens),
            multiprocessors=shares * KV_HEADS,
            segments_SW=torch.from_numpy(segments).to(DEVICE),
        )
        out = decode_attention(
            q, pool.k, pool.v, pool.table, pool.lens, scale=SCALE, window=window, work=work, sinks_H=on_device(SINKS)
        )
        expected = [exact(q[r], pool.contexts[r], n - 1, window, None, SINKS) for r, n in enumerate(lens)]
        assert relative(out, torch.stack(expected)) < 1e-5


@pytest.mark.parametrize(("softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize("window", [20, *nightly(None)])
def test_prefill(softcap, sinks, window):
    pool, q = Pool(CONTEXTS, 16, KV_HEADS, 64), queries(sum(PIECES), HEADS, 64)
    starts = list(itertools.accumulate(PIECES, initial=0))
    options = {"scale": SCALE, "window": window, "softcap": softcap, "sinks_H": on_device(sinks)}
    out = prefill_attention(
        q,
        pool.k,
        pool.v,
        pool.table,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        pool.lens,
        max_query=max(PIECES),
        config=TINY,
        **options,
    )
    expected = torch.stack(
        [
            exact(q[start + i], context, total - length + i, window, softcap, sinks)
            for start, length, total, context in zip(starts, PIECES, CONTEXTS, pool.contexts, strict=False)
            for i in range(length)
        ]
    )
    assert relative(out, expected) < 1e-5
    chunks = list(zip(starts, PIECES, CONTEXTS, strict=False))
    twin = paged_prefill_attention(q, *pool.without_nan(), pool.table, chunks, **options)
    assert relative(twin, expected) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_decode_and_prefill_in_16_bits(dtype, bound):
    pool, q = Pool([70, 33], 16, 1, 80, dtype), queries(2, HEADS, 80, dtype)
    options = {"scale": SCALE, "window": None, "softcap": 1.5, "sinks_H": on_device(SINKS, dtype)}
    expected = torch.stack(
        [exact(q[r], pool.contexts[r], n - 1, None, 1.5, SINKS.to(dtype)) for r, n in enumerate([70, 33])]
    )
    out = decode_attention(q, pool.k, pool.v, pool.table, pool.lens, work=plan(pool, 1), **options)
    assert out.dtype == dtype and relative(out, expected) < bound
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    out = prefill_attention(q, pool.k, pool.v, pool.table, starts, pool.lens, max_query=1, **options)
    assert out.dtype == dtype and relative(out, expected) < bound
