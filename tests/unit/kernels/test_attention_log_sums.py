"""The logarithms of the sums of decode attention, by which ranks merge parts of a context, against float64."""

import dataclasses
import math

import pytest
import torch
from rollout_kernels.attention import paged_decode_attention
from rollout_kernels.attention.latent import latent_decode_attention, plan_latent_decode
from rollout_kernels.attention.segments import make_segments
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_latent_decode import decode_latents, plan_latent_work
from rollout_kernels.common.fp8 import quantize_heads, values_of

from tests.support.kernels.attention_cases import DEVICE, LENS, SCALE, SMALL, Pool, plan, queries
from tests.support.kernels.grids import nightly
from tests.unit.kernels.test_attention_groups import COMMON, shared_pool, work_of
from tests.unit.kernels.test_attention_groups import LENS as SHARED_LENS


def exact_log_sums(q_BHD: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
    """In base 2, float64 [B, H], of queries and the keys [C, G, D] that each row sees."""
    found = []
    for q_HD, k_CGD in zip(q_BHD.double().cpu(), keys, strict=True):
        k_CHD = k_CGD.double().cpu().repeat_interleave(len(q_HD) // k_CGD.shape[1], 1)
        found.append((torch.einsum("hd,chd->hc", q_HD, k_CHD) * SCALE).logsumexp(1) * math.log2(math.e))
    return torch.stack(found)


def empty(q_BHD: torch.Tensor) -> torch.Tensor:
    return torch.full(q_BHD.shape[:2], float("nan"), device=DEVICE)


def assert_close(log_sum_BH: torch.Tensor, exact_BH: torch.Tensor) -> None:
    assert (log_sum_BH.double().cpu() - exact_BH).abs().max() < 1e-4


@pytest.mark.parametrize(("shares", "fused"), [(1, True), (9, True), (9, False), *nightly((30, True))])
def test_of_rows_in_one_part_and_in_several(shares: int, fused: bool) -> None:
    pool, q, log_sum = Pool(LENS, 6, 2, 64), queries(len(LENS), 6, 64), empty(queries(len(LENS), 6, 64))
    work = plan(pool, 2, config=dataclasses.replace(SMALL, fused=fused), shares=shares)
    given = (q, pool.k, pool.v, pool.table, pool.lens)
    decode_attention(*given, scale=SCALE, window=None, work=work, log_sum_BH=log_sum)
    assert_close(log_sum, exact_log_sums(q, [k for k, _ in pool.contexts]))


@pytest.mark.parametrize("fused", [True, False])
def test_of_rows_that_share_pages(fused: bool) -> None:
    pool, q = shared_pool(SHARED_LENS, COMMON), queries(len(SHARED_LENS), 8, 64)
    config, log_sum = dataclasses.replace(SMALL, block_m=16, fused=fused), empty(q)
    work = work_of(pool, make_segments(COMMON, len(q), config.rows_at_once(4), 16), 8, config=config, shares=5)
    given = (q, pool.k, pool.v, pool.table, pool.lens)
    decode_attention(*given, scale=SCALE, window=None, work=work, log_sum_BH=log_sum)
    assert_close(log_sum, exact_log_sums(q, [k for k, _ in pool.contexts]))


def test_of_codes() -> None:
    pool, q = Pool(LENS, 16, 2, 64), queries(len(LENS), 8, 64)
    log_sum = empty(q)
    (k, k_scales), (v, v_scales) = quantize_heads(pool.k.nan_to_num(0.0)), quantize_heads(pool.v.nan_to_num(0.0))
    scales = torch.stack((k_scales, v_scales), 1).transpose(2, 3).contiguous()
    how = {"scale": SCALE, "window": None, "scales_P2GS": scales, "work": plan(pool, 2, shares=9)}
    decode_attention(q, k, v, pool.table, pool.lens, **how, log_sum_BH=log_sum)
    decoded = values_of(k).double() * k_scales[..., None].double()
    keys = [decoded[table.long()].flatten(0, 1)[:n] for table, n in zip(pool.table, LENS, strict=True)]
    assert_close(log_sum, exact_log_sums(q, keys))


@pytest.mark.parametrize("shares", [1, 9])
def test_of_latents(shares: int) -> None:
    pool, q = Pool(LENS, 6, 1, 48), queries(len(LENS), 4, 48)
    log_sum, config = empty(q), dataclasses.replace(SMALL, programs_per_sm=1)
    work = plan_latent_work(pool.lens, 4, q.dtype, config=config, multiprocessors=shares)
    decode_latents(q, pool.k, pool.table, pool.lens, rank=40, scale=SCALE, work=work, log_sum_BH=log_sum)
    assert_close(log_sum, exact_log_sums(q, [k for k, _ in pool.contexts]))


def test_of_the_twins() -> None:
    pool, q = Pool(LENS, 6, 2, 64), queries(len(LENS), 6, 64).cpu()
    (k, v), table, lens = (x.cpu() for x in pool.without_nan()), pool.table.cpu(), pool.lens.cpu()
    log_sum = torch.empty(q.shape[:2])
    how = {"scale": SCALE, "window": None, "max_context": max(LENS), "softcap": None}
    paged_decode_attention(q, k, v, table, lens, **how, log_sum_BH=log_sum)
    assert_close(log_sum, exact_log_sums(q, [k for k, _ in pool.contexts]))
    latents = Pool(LENS, 6, 1, 48)
    (k, _), q = (x.cpu() for x in latents.without_nan()), queries(len(LENS), 4, 48).cpu()
    work = plan_latent_decode(latents.table.cpu(), lens, k, heads=4, max_context=max(LENS))
    log_sum = torch.empty(q.shape[:2])
    latent_decode_attention(q, k, latents.table.cpu(), lens, rank=40, scale=SCALE, plan=work, log_sum_BH=log_sum)
    assert_close(log_sum, exact_log_sums(q, [k for k, _ in latents.contexts]))


def test_of_a_row_without_context_count_for_nothing() -> None:
    pool, q = Pool([40, 0, 33], 16, 1, 64), queries(3, 4, 64)
    for decode in ("kernel", "twin"):
        log_sum = empty(q)
        if decode == "kernel":
            work = plan(pool, 1)
            given = (q, pool.k, pool.v, pool.table, pool.lens)
            decode_attention(*given, scale=SCALE, window=None, work=work, log_sum_BH=log_sum)
        else:
            given = (q.cpu(), *(x.cpu() for x in pool.without_nan()), pool.table.cpu(), pool.lens.cpu())
            log_sum = log_sum.cpu()
            paged_decode_attention(*given, scale=SCALE, window=None, max_context=40, log_sum_BH=log_sum)
        assert (log_sum[1] < -1e4).all() and log_sum.isfinite().all()
