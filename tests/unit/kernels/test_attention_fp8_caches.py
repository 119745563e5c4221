"""Caches of e4m3 codes: writing them, and attention against float64 attention over the same dequantised values."""

import dataclasses
import itertools

import pytest
import torch
from rollout_kernels import paged_decode_attention, paged_prefill_attention, plan_decode, rope_cos_sin, write_kv
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_prefill import prefill_attention
from rollout_kernels.common.fp8 import LEAST_SCALE, quantize_heads, quantize_values, values_of
from rollout_kernels.norm_rope.triton_elementwise import finish_qkv

from tests.support.kernels.attention_cases import (
    CONTEXTS,
    DEVICE,
    LENS,
    PIECES,
    SCALE,
    SMALL,
    TINY,
    Pool,
    exact_decode,
    exact_prefill,
    plan,
    queries,
    relative,
)
from tests.support.kernels.grids import nightly

NAN = 0x7F
HALF_STEP = 2.0**-4
VALUES = pytest.mark.parametrize("values", [torch.uint8, torch.int8], ids=["e4m3 values", "int8 values"])


class CodedPool(Pool):
    """Contexts as codes and scales; all other codes and scales are NaN. `contexts` holds the dequantised values."""

    def __init__(self, lens, page_size, kv_heads, dim, spare=0, values=torch.uint8):
        super().__init__(lens, page_size, kv_heads, dim, spare=spare)
        table, plain = self.table.cpu(), self.contexts
        shape = self.k.shape
        self.k, self.v = (torch.full(shape, NAN, dtype=dtype) for dtype in (torch.uint8, values))
        self.scales = torch.full((shape[0], 2, kv_heads, page_size), float("nan"))
        self.contexts = []
        for row, (k, v) in enumerate(plain):
            # Tokens and heads differ widely in size, so a wrong scale has a visible effect.
            size = torch.exp2(torch.randint(-6, 7, (*k.shape[:2], 1), generator=torch.Generator().manual_seed(row)))
            k, v = k * size.clamp(max=2.0), v * size
            at = torch.arange(lens[row])
            slots = table[row, at // page_size].long() * page_size + at % page_size
            write_kv(k, v, self.k, self.v, slots, self.scales)
            self.contexts.append(tuple(self.read(cache, which, slots) for which, cache in enumerate((self.k, self.v))))
        self.k, self.v, self.scales = (tensor.to(DEVICE) for tensor in (self.k, self.v, self.scales))

    def read(self, cache, which, slots):
        page_size = cache.shape[1]
        scales_TG = self.scales[slots // page_size, which, :, slots % page_size]
        return values_of(cache.flatten(0, 1)[slots]).double() * scales_TG[..., None].double()

    def forget(self, row, positions):
        at = torch.arange(max(0, positions), device=DEVICE)
        page_size = self.k.shape[1]
        pages = self.table[row, at // page_size].long()
        self.k[pages, at % page_size] = self.v[pages, at % page_size] = NAN
        self.scales[pages, :, :, at % page_size] = float("nan")

    def without_nan(self):
        """Caches and scales without NaN, for the torch twin, which multiplies hidden values by zero."""
        caches = (
            cache if cache.dtype == torch.int8 else cache.where(cache & NAN != NAN, 0x30) for cache in (self.k, self.v)
        )
        return (*(cache.cpu() for cache in caches), self.scales.nan_to_num(2))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_the_error_is_at_most_half_a_step():
    x = torch.randn(50, 3, 64) * torch.exp(4 * torch.randn(50, 3, 64))
    codes, scales = quantize_heads(x)
    off = (values_of(codes).double() * scales[..., None] - x).abs()
    assert (off <= HALF_STEP * x.abs() + scales[..., None].double() * 2.0**-10).all()
    assert torch.equal(scales, x.abs().amax(-1) / 448.0)
    assert ((codes & NAN).amax(-1) == 0x7E).all(), "the largest value of a head is the largest code"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_heads_of_zeros_and_of_extreme_numbers_keep_their_values(dtype):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor([[0.0] * 4, [most, -most, 0.0, most / 2], [least, 0.0, -least, 0.0]], dtype=dtype)[:, None]
    codes, scales = quantize_heads(x)
    assert scales[0] == LEAST_SCALE and (scales > 0).all() and not bool(((codes & NAN) == NAN).any())
    back = values_of(codes) * scales[..., None]
    assert back[0].eq(0).all()
    assert torch.allclose(back[1].double(), x[1].double(), rtol=2.0**-22)
    # Below 448 times the least scale there are fewer codes, but the error is still at most half a step.
    assert (back[2] - x[2].float()).abs().max() <= max(least * HALF_STEP, LEAST_SCALE * 2.0**-10)


def test_int8_values_are_at_most_half_a_step_off_and_nearer_than_e4m3():
    x = torch.randn(50, 3, 64) * torch.exp(4 * torch.randn(50, 3, 1))
    codes, scales = quantize_values(x)
    off = values_of(codes).double() * scales[..., None] - x
    assert (off.abs() <= 0.5001 * scales[..., None]).all() and codes.abs().amax(-1).eq(127).all()
    e4m3, e4m3_scales = quantize_heads(x)
    assert off.norm() < 0.35 * (values_of(e4m3).double() * e4m3_scales[..., None] - x).norm()


def test_a_value_that_is_not_finite_makes_its_head_of_int8_nan_and_no_other():
    x = torch.randn(3, 2, 8)
    x[0, 1, 3], x[2, 0, 5], x[1, 0] = float("nan"), float("-inf"), 0
    codes, scales = quantize_values(x)
    back = values_of(codes) * scales[..., None]
    assert back[[0, 2], [1, 0]].isnan().all() and back[1, 0].eq(0).all()
    assert back[[0, 1, 1, 2], [0, 0, 1, 1]].isfinite().all()


def test_a_nan_stays_a_nan_and_affects_no_other_head():
    x = torch.randn(3, 2, 8)
    x[0, 1, 3], x[2, 0, 5] = float("nan"), float("inf")
    codes, scales = quantize_heads(x)
    back = values_of(codes) * scales[..., None]
    assert back[0, 1].isnan().nonzero().tolist() == [[3]], "a NaN does not affect its neighbours"
    assert back[2, 0].isnan().all()
    assert back[[0, 1, 1, 2], [0, 0, 1, 1]].isfinite().all()


@VALUES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("norm", "dim", "q_heads", "kv_heads"), [(True, 24, 4, 2), (False, 16, 7, 3)])
def test_the_kernel_stores_the_codes_and_scales_of_the_twin(norm, dim, q_heads, kv_heads, dtype, values):
    """The codes of exactly those values that it stores in a cache without codes; zeros and NaN included."""
    rows, page_size = 5, 4
    parts = torch.randn(1, rows, (q_heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    parts.view(rows, -1, dim)[2, q_heads:] = 0.0
    parts.view(rows, -1, dim)[3, -1, 5] = float("nan")
    parts.view(rows, -1, dim)[4, q_heads:] *= 1e4 if dtype != torch.float16 else 100
    norm_2D = torch.rand(2, dim, device=DEVICE).to(dtype) if norm else None
    inv_freq = (10_000.0 ** (-torch.arange(dim // 2) / (dim // 2))).repeat(2).to(DEVICE)
    sign = torch.cat([-torch.ones(dim // 2), torch.ones(dim // 2)]).to(DEVICE)
    cos_sin = rope_cos_sin(torch.arange(rows, device=DEVICE) * 9, inv_freq, sign)
    slots = torch.tensor([3, 14, 8, 5, 13], device=DEVICE)
    shape = (4, page_size, kv_heads, dim)
    plain = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2)]
    q = finish_qkv(parts, None, norm_2D, 1e-6, *cos_sin, slots, *plain, q_heads)
    coded = [torch.full(shape, 77, dtype=each, device=DEVICE) for each in (torch.uint8, values)]
    scales = torch.full((4, 2, kv_heads, page_size), -1.0, device=DEVICE)
    again = finish_qkv(parts, None, norm_2D, 1e-6, *cos_sin, slots, *coded, q_heads, scales, dtype)
    assert torch.equal(q, again) and again.dtype == dtype
    expected = [torch.full_like(cache, 77) for cache in coded]
    expected_scales = torch.full_like(scales, -1.0)
    write_kv(*(cache.flatten(0, 1)[slots] for cache in plain), *expected, slots, expected_scales)
    assert torch.equal(scales.nan_to_num(-2.0), expected_scales.nan_to_num(-2.0))
    assert expected_scales.eq(LEAST_SCALE).sum() == 2 * kv_heads
    if values == torch.int8:
        assert expected_scales.isnan().sum() == 1 and torch.equal(coded[1], expected[1])
    else:
        assert (expected[1] & NAN).eq(NAN).sum() == 1
    for got, wanted in [*zip(coded, expected, strict=True)][: 1 if values == torch.int8 else 2]:
        not_numbers = (wanted & NAN) == NAN
        assert torch.equal(got[~not_numbers], wanted[~not_numbers]) and (got[not_numbers] & NAN).eq(NAN).all()


# --- decode ----------------------------------------------------------------------------------------------------------


def attend(q, pool, work):
    return decode_attention(
        q, pool.k, pool.v, pool.table, pool.lens, scale=SCALE, window=work.window, scales_P2GS=pool.scales, work=work
    )


@VALUES
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 1), *nightly((2, 2))])
@pytest.mark.parametrize(("shares", "fused"), [(4, True), (30, False), *nightly((1, True))])
def test_decode_for_head_groups_and_splits(heads, kv_heads, shares, fused, values):
    pool, q = CodedPool(LENS, 16, kv_heads, 64, values=values), queries(len(LENS), heads, 64)
    out = attend(q, pool, plan(pool, kv_heads, config=dataclasses.replace(SMALL, fused=fused), shares=shares))
    assert relative(out, exact_decode(q, pool, LENS, None)) < 1e-5


@VALUES
@pytest.mark.parametrize("window", [1, 33, *nightly(7, 150)])
@pytest.mark.parametrize(("page_size", "block_n"), [(16, 16), (6, 32), *nightly((32, 16))])
def test_decode_sees_its_window_and_nothing_else_and_equals_the_twin(page_size, block_n, window, values):
    pool, q = CodedPool(LENS, page_size, 2, 64, spare=2, values=values), queries(len(LENS), 4, 64)
    for row, length in enumerate(LENS):
        pool.forget(row, length - window)
    out = attend(q, pool, plan(pool, 2, window, dataclasses.replace(SMALL, block_n=block_n)))
    expected = exact_decode(q, pool, LENS, window)
    assert relative(out, expected) < 1e-5
    k, v, scales = pool.without_nan()
    table, lens = pool.table.cpu(), pool.lens.cpu()
    options = {"scale": SCALE, "window": window, "max_context": 100, "scales_P2GS": scales.cpu()}
    twin_plan = plan_decode(table, lens, page_size, window, 100, torch.float32)
    twin = paged_decode_attention(q.cpu(), k, v, table, lens, plan=twin_plan, **options)
    assert relative(twin, expected) < 1e-5


@VALUES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("dim", [16, 80, *nightly(64, 128)])
def test_decode_for_dtypes_and_head_dimensions(dim, dtype, bound, values):
    """With bf16 queries the kernel multiplies f16 values, which have smaller rounding errors."""
    pool, q = CodedPool([70, 33], 16, 1, dim, values=values), queries(2, 4, dim, dtype)
    out = attend(q, pool, plan(pool, 1))
    assert out.dtype == dtype
    assert relative(out, exact_decode(q, pool, [70, 33], None)) < bound


def test_values_that_are_tiny_for_f16_are_not_lost():
    pool, q = CodedPool([70, 33], 16, 1, 64), queries(2, 4, 64, torch.float16)
    pool.scales[:, 1] *= 2.0**-12
    expected = exact_decode(q, pool, [70, 33], None) * 2.0**-12
    assert relative(attend(q, pool, plan(pool, 1)), expected) < 1e-3


@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_queries_that_f16_does_not_hold_are_not_lost(size):
    pool, q = CodedPool([70, 33], 16, 1, 64), queries(2, 4, 64, torch.bfloat16)
    q[1, 2] = 0.0
    expected = exact_decode(q, pool, [70, 33], None)
    pool.scales[:, 0] /= size
    assert relative(attend(q * size, pool, plan(pool, 1)), expected) < 4e-3


def test_weights_count_beside_those_of_much_larger_values():
    """A token with small values stays as exact as the rounding of its weight, next to a token with large values."""
    pool, q = CodedPool([70], 16, 1, 64), queries(1, 4, 64, torch.float16)
    pool.scales[:, 1] *= torch.tensor([1.0, 2.0**-10], device=DEVICE).repeat(8)
    k, v = pool.contexts[0]
    pool.contexts[0] = k, v * torch.tensor([1.0, 2.0**-10]).repeat(35)[:, None, None].double()
    assert relative(attend(q, pool, plan(pool, 1)), exact_decode(q, pool, [70], None)) < 1e-3


@pytest.mark.parametrize(
    ("score", "size", "dtype"),
    [
        (17.5, 2.0**-12, torch.float16),
        (-35.0, 2.0**26, torch.bfloat16),
        *nightly((17.5, 2.0**-12, torch.bfloat16), (-35.0, 2.0**26, torch.float16)),
    ],
)
def test_small_weights_are_not_lost_next_to_one_extreme_token(score, size, dtype):
    """The extreme token has a large weight and a small value (an attention sink), or a small weight and a large one."""
    pool, q = CodedPool([700], 16, 1, 64), queries(1, 1, 64, dtype)
    (k, v), page = pool.contexts[0], pool.table[0, 0].long()
    scores = torch.einsum("hd,nhd->n", q[0].cpu().double(), k) * SCALE
    sizes = torch.full((700,), 0.5 / scores.std())
    sizes[0] = score / scores[0]
    pool.scales[:, 0] *= sizes[1].item()
    pool.scales[page, 0, :, 0] *= (sizes[0] / sizes[1]).item()
    pool.scales[page, 1, :, 0] *= size
    pool.v &= 0x7F  # all positive, so that values don't cancel
    v = v.abs()
    v[0] *= size
    pool.contexts[0] = k * sizes[:, None, None], v
    assert relative(attend(q, pool, plan(pool, 1)), exact_decode(q, pool, [700], None)) < 3e-3


def test_a_nan_value_affects_only_its_own_row():
    pool, q = CodedPool([40, 33], 16, 1, 64), queries(2, 4, 64)
    pool.v[pool.table[1, 1].long(), 2, 0, 9] = NAN
    out = attend(q, pool, plan(pool, 1))
    assert out[0].isfinite().all() and out[1, :, 9].isnan().all() and out[1].isnan().sum() == 4


def test_row_without_context_gives_zeros():
    pool, q = CodedPool([40, 0, 33], 16, 1, 64), queries(3, 4, 64)
    out = attend(q, pool, plan(pool, 1))
    assert bool((out[1] == 0).all()) and out.isfinite().all()


# --- prefill ---------------------------------------------------------------------------------------------------------


def prefill(q, pool, window, config=TINY):
    starts = torch.tensor([0, *itertools.accumulate(PIECES)], dtype=torch.int32, device=DEVICE)
    options = {"max_query": 40, "scale": SCALE, "window": window, "scales_P2GS": pool.scales, "config": config}
    return prefill_attention(q, pool.k, pool.v, pool.table, starts, pool.lens, **options)


@VALUES
@pytest.mark.parametrize(("page_size", "block_n"), [(16, 16), (6, 32)])
@pytest.mark.parametrize("window", [None, 33, *nightly(1)])
def test_prefill_sees_its_past_and_nothing_else_and_equals_the_twin(window, page_size, block_n, values):
    pool, q = CodedPool(CONTEXTS, page_size, 2, 64, values=values), queries(sum(PIECES), 4, 64)
    if window is not None:
        for row, (length, context) in enumerate(zip(PIECES, CONTEXTS, strict=True)):
            pool.forget(row, context - length - window + 1)
    out = prefill(q, pool, window, dataclasses.replace(TINY, block_n=block_n))
    expected = exact_prefill(q, pool, window)
    assert relative(out, expected) < 1e-5
    k, v, scales = pool.without_nan()
    chunks = list(zip(itertools.accumulate(PIECES[:-1], initial=0), PIECES, CONTEXTS, strict=True))
    options = {"scale": SCALE, "window": window, "scales_P2GS": scales.cpu()}
    twin = paged_prefill_attention(q.cpu(), k, v, pool.table.cpu(), chunks, **options)
    assert relative(twin, expected) < 1e-5


@VALUES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
def test_prefill_for_dtypes(dtype, bound, values):
    pool, q = CodedPool(CONTEXTS, 16, 1, 80, values=values), queries(sum(PIECES), 2, 80, dtype)
    out = prefill(q, pool, None, config=None)
    assert out.dtype == dtype
    assert relative(out, exact_prefill(q, pool, None)) < bound
