"""Latent attention: the Triton kernel, its twin and attention by expanded keys, against attention in float64."""

import dataclasses

import pytest
import torch
from rollout_kernels.attention.latent import (
    expanded_attention,
    latent_decode_attention,
    plan_latent_decode,
    write_latent,
)
from rollout_kernels.attention.triton_latent_decode import decode_latents, heads_at_once, plan_latent_work

from tests.support.kernels.attention_cases import DEVICE, LENS, SCALE, SMALL, Pool, exact, queries, relative
from tests.support.kernels.grids import nightly

RANK, TURNED = 40, 8  # no powers of two


def exact_latent(q_BHL: torch.Tensor, pool: Pool, rank: int = RANK) -> torch.Tensor:
    contexts = [(k, k[..., :rank]) for k, _ in pool.contexts]
    pairs = zip(q_BHL, contexts, strict=True)
    return torch.stack([exact(q_HL, context, len(context[0]) - 1, None) for q_HL, context in pairs])


def attend(q: torch.Tensor, pool: Pool, shares: int, rank: int = RANK, **changes: object) -> torch.Tensor:
    """By the kernel, with about `shares` programs for a block of heads."""
    heads = q.shape[1]
    config = dataclasses.replace(SMALL, programs_per_sm=1, **changes)
    multiprocessors = shares * heads // heads_at_once(heads)
    work = plan_latent_work(pool.lens, heads, q.dtype, config=config, multiprocessors=multiprocessors)
    return decode_latents(q, pool.k, pool.table, pool.lens, rank=rank, scale=SCALE, work=work)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("heads", "shares"), [(20, 4), *nightly((1, 1), (5, 30), (16, 2), (32, 30))])
def test_the_kernel_for_blocks_of_heads_and_splits(heads: int, shares: int, fused: bool) -> None:
    pool, q = Pool(LENS, 6, 1, RANK + TURNED), queries(len(LENS), heads, RANK + TURNED)
    assert relative(attend(q, pool, shares, fused=fused), exact_latent(q, pool)) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), *nightly((torch.float16, 2e-3))])
def test_the_kernel_in_16_bits_and_real_widths(dtype: torch.dtype, bound: float) -> None:
    pool, q = Pool([70, 33], 16, 1, 576, dtype), queries(2, 16, 576, dtype)
    out = attend(q, pool, 2, rank=512, block_n=32)
    assert out.dtype == dtype and out.shape == (2, 16, 512)
    assert relative(out, exact_latent(q, pool, 512)) < bound


def test_a_row_without_context_gives_zeros_and_changes_no_other() -> None:
    pool, q = Pool([40, 0, 33], 16, 1, RANK + TURNED), queries(3, 4, RANK + TURNED)
    out = attend(q, pool, 3)
    assert not out[1].any()
    some = torch.tensor([0, 2], device=DEVICE)
    pool.contexts = [pool.contexts[0], pool.contexts[2]]
    assert relative(out[some], exact_latent(q[some], pool)) < 1e-5


def test_the_twin_reads_what_was_written() -> None:
    lens, width = [23, 5], RANK + TURNED
    pool, q = Pool(lens, 6, 1, width), queries(2, 5, width)
    cache = torch.full_like(pool.k, 3.0)
    for row, (latents, _) in enumerate(pool.contexts):
        at = torch.arange(len(latents), device=DEVICE)
        slots = pool.table[row, at // 6].long() * 6 + at % 6
        write_latent(latents[:, 0].to(DEVICE), cache, slots)
    plan = plan_latent_decode(pool.table, pool.lens, cache, heads=5, max_context=23)
    out = latent_decode_attention(q, cache, pool.table, pool.lens, rank=RANK, scale=SCALE, plan=plan)
    assert relative(out, exact_latent(q, pool)) < 1e-5


@pytest.mark.parametrize("bytes_at_once", [1 << 28, 1])
@pytest.mark.parametrize("value_dim", [7, 30])
def test_expanded_keys_give_what_absorbed_queries_give(value_dim, bytes_at_once) -> None:
    """A span of 37 queries that ends a context of 61 positions; by all heads at once, and by single ones."""
    heads, nope, context, count = 3, 12, 61, 37
    pool, q = Pool([context], 6, 1, RANK + TURNED, spare=2), queries(count, heads, nope + TURNED)
    kv_b = queries(heads, nope + value_dim, RANK)
    out = expanded_attention(q, pool.k, pool.table[0], context, kv_b, scale=SCALE, bytes_at_once=bytes_at_once)
    latents = pool.contexts[0][0][:, 0].double()
    kv = torch.einsum("cr,hyr->chy", latents[:, :RANK], kv_b.double().cpu())
    turned = latents[:, None, RANK:].expand(-1, heads, -1)
    keys_and_values = torch.cat((kv[..., :nope], turned), dim=-1), kv[..., nope:]
    expected = [exact(q[i], keys_and_values, context - count + i, None) for i in range(count)]
    assert out.shape == (count, heads, value_dim)
    assert relative(out, torch.stack(expected)) < 1e-5
