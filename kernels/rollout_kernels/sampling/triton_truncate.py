"""Top-k, top-p and min-p on a GPU without a sort: `rollout_kernels.sampling.truncate`, in place.

A logit maps to a key, an integer with the same order. Top-k and top-p each search for the smallest key that stays: the
key at which the number (top-k) or the probability (top-p) of the tokens at and above it reaches a bound. This is a
radix search: it finds a key digit by digit, the highest first. Each launch builds a histogram of the next digit, over
the tokens whose higher digits match the digits found so far.

    3 launches  number of tokens by digit: find the key of the k-th token; the first launch also finds the largest logit
    3 launches  probability by digit, over the tokens that top-k keeps: find the key at which top-p is reached
    1 launch    number of tokens with that key in each block of the vocabulary: of equal tokens the first stay, by index
    1 launch    write -inf for all tokens that go

Probabilities are added as integer multiples of 2^-40 of the most likely token's probability. So results depend neither
on the order of additions nor on the other rows. Rows without a limit are not read. The host reads nothing, so a graph
can capture all launches.

Legend: S rows that sample, V vocabulary, B blocks of the vocabulary, W words of a row's scratch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import last_to_arrive
from rollout_kernels.sampling.reference import SamplingRows

_BLOCK = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))  # lowest bit and number of bits of each
_BINS = tl.constexpr(2048)
_COPIES = tl.constexpr(4)  # histograms of a row; blocks use them in turn, so fewer atomic additions meet in one bin

# A row's scratch, int64: the search for top-k, the search for top-p, what both share, the histograms.
_KEY = tl.constexpr(0)  # digits found so far; finally the smallest key that stays. 0, which is no key: no search
_LEFT = tl.constexpr(1)  # the rest of the bound; finally how many tokens with that key stay
_GONE = tl.constexpr(2)  # how many tokens with that key go
_SEARCH = tl.constexpr(3)  # words of one search
_BEST = tl.constexpr(6)  # the largest key
_ARRIVED = tl.constexpr(7)
_HISTOGRAM = tl.constexpr(8)
_WORDS = tl.constexpr(8 + _COPIES.value * _BINS.value)


@triton.jit
def _key_of(x):
    """The key of a logit, int64, 0 < key < 2^32, in the order of a sort: NaN is the largest, both zeros are equal."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, tl.where(x != x, 0x7FFFFFFF, bits))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _value_of(key):
    """The logit of a key."""
    bits = (key - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _units_of(x, best):
    """A token's probability, in units of 2^-40 of the best token's probability."""
    return (tl.exp(x - best) * 1099511627776.0).to(tl.int64)


@triton.jit
def _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, V):
    """The row's top-k, top-p and min-p. V, infinity and 0 mean off; so does a padding row, whose top-k is 0."""
    top_k = tl.load(top_k_ptr + row * k_stride)
    padding = top_k <= 0
    top_k = tl.where(padding, V, tl.minimum(top_k, V))
    top_p = tl.where(padding, float("inf"), tl.load(top_p_ptr + row * p_stride))
    return top_k, top_p, tl.where(padding, 0.0, tl.load(min_p_ptr + row * p_stride))


@triton.jit
def _is_number(best):
    """False for NaN and infinities: such a row has no probabilities, and only top-k applies to it."""
    return tl.abs(best) < float("inf")


@triton.jit
def _mass_bound(state, mass, top_p, best):
    """The bound of the search for top-p: top-p's share of the probability that top-k keeps, at least one unit."""
    gone = tl.load(state + _GONE)  # tokens with the k-th token's key that top-k drops, but the histogram counted
    if gone > 0:
        mass -= gone * _units_of(_value_of(tl.load(state + _KEY)), best)
    share = top_p.to(tl.float64) * mass.to(tl.float64)
    bound = share.to(tl.int64)
    bound += (bound.to(tl.float64) < share).to(tl.int64)
    return tl.minimum(tl.maximum(bound, 1), mass)


@triton.jit
def _choose_digit(state, top_k, top_p, best, MASS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Add the digit at which the bound is reached to the key, and clear the histograms."""
    search = state + MASS * _SEARCH
    digit = (1 << BITS) - 1 - tl.arange(0, 1 << BITS)  # in descending order
    bins = state + _HISTOGRAM + digit
    found = tl.zeros([1 << BITS], tl.int64)
    for copy in tl.static_range(_COPIES):
        found += tl.load(bins + copy * _BINS, cache_modifier=".cg")  # other programs' additions are in the L2 cache
    tl.debug_barrier()  # one thread may clear a bin that another thread reads
    for copy in tl.static_range(_COPIES):
        tl.store(bins + copy * _BINS, tl.zeros([1 << BITS], tl.int64))
    reached = tl.cumsum(found)
    above = reached - found
    if SHIFT + BITS < 32:
        left = tl.load(search + _LEFT)
    elif MASS:
        left = _mass_bound(state, tl.sum(found), top_p, best)
    else:
        left = tl.minimum(top_k, tl.sum(found))
    here = (above < left) & (left <= reached)
    left -= tl.sum(tl.where(here, above, 0))
    key = tl.load(search + _KEY) + (tl.sum(tl.where(here, digit, 0)).to(tl.int64) << SHIFT)
    if SHIFT == 0:
        if MASS:
            one = tl.maximum(_units_of(_value_of(key), best), 1)
            left = (left + one - 1) // one
        else:
            tl.store(search + _GONE, tl.sum(tl.where(here, found, 0)) - left)
    tl.store(search + _KEY, key)
    tl.store(search + _LEFT, left)


@triton.jit
def _search_kernel(
    logits_ptr,
    state_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    k_stride,
    p_stride,
    V,
    MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, V)
    state = state_ptr + row * _WORDS
    FIRST: tl.constexpr = (not MASS) and SHIFT + BITS == 32
    best = 0.0
    searches = top_k < V
    if MASS:
        best = _value_of(tl.load(state + _BEST))
        searches = (top_p < float("inf")) & _is_number(best)
    reads = searches
    if FIRST:
        reads = searches | (top_p < float("inf")) | (min_p > 0.0)
    if reads:
        v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + v, mask=v < V, other=-float("inf"))
        key = _key_of(x)
        if FIRST:
            tl.atomic_max(state + _BEST, tl.max(key), sem="relaxed")
        if searches:
            # Do not count banned tokens: there are many, all in one bin, and it does not matter whether they stay.
            counted = (key >> (SHIFT + BITS)) == (tl.load(state + MASS * _SEARCH + _KEY) >> (SHIFT + BITS))
            counted = counted & (x != -float("inf"))
            amount = tl.full([BLOCK], 1, tl.int64)
            if MASS:
                amount = _units_of(x, best)
                counted = counted & (key >= tl.load(state + _KEY)) & (amount > 0)
            digit = (key >> SHIFT) & ((1 << BITS) - 1)
            bins = state + _HISTOGRAM + (tl.program_id(0) % _COPIES) * _BINS
            tl.atomic_add(bins + digit, amount, mask=counted, sem="relaxed")
            if last_to_arrive(state + _ARRIVED):
                _choose_digit(state, top_k, top_p, best, MASS, SHIFT, BITS)


@triton.jit
def _threshold(state, top_p, best):
    """The smallest key that stays, and how many tokens with this key stay."""
    search = state
    if (top_p < float("inf")) & _is_number(best):
        search = state + _SEARCH
    return tl.load(search + _KEY), tl.load(search + _LEFT)


@triton.jit
def _cut_kernel(
    logits_ptr,
    state_ptr,
    ties_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    k_stride,
    p_stride,
    V,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, V)
    if (top_k < V) | (top_p < float("inf")) | (min_p > 0.0):
        state = state_ptr + row * _WORDS
        best = _value_of(tl.load(state + _BEST))
        smallest, stay = _threshold(state, top_p, best)
        v = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + v, mask=v < V, other=-float("inf"))
        key = _key_of(x)
        equal = ((key == smallest) & (v < V)).to(tl.int32)
        ties = ties_ptr + row * tl.num_programs(0)
        if COUNT:
            tl.store(ties + block, tl.sum(equal))
        else:
            b = tl.arange(0, BLOCKS)
            rank = tl.sum(tl.load(ties + b, mask=b < block, other=0)) + tl.cumsum(equal) - equal
            goes = (key < smallest) | ((equal != 0) & (rank >= stay))
            goes = goes | (tl.exp(x - best) < tl.where(_is_number(best), min_p, 0.0))
            tl.store(logits_ptr + row * V + v, float("-inf"), mask=goes & (v < V))


def truncate(logits_SV: torch.Tensor, rows: SamplingRows) -> None:
    """Set the logits of all tokens that top-k, then top-p, then min-p drop to -inf, in place.

    Args:
        logits_SV: float32, contiguous, already tempered.
        rows: `top_k_S`, `top_p_S` and `min_p_S` are required; the last two have the same stride.
    """
    assert rows.top_k_S is not None and rows.top_p_S is not None and rows.min_p_S is not None
    assert logits_SV.is_contiguous() and rows.top_p_S.stride(0) == rows.min_p_S.stride(0)
    count, vocab = logits_SV.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    grid = (blocks, count)
    state_SW = torch.zeros(count, _WORDS.value, dtype=torch.int64, device=logits_SV.device)
    ties_SB = torch.empty(count, blocks, dtype=torch.int32, device=logits_SV.device)
    limits = (rows.top_k_S, rows.top_p_S, rows.min_p_S, rows.top_k_S.stride(0), rows.top_p_S.stride(0), vocab)
    for mass in (0, 1):
        for shift, bits in _DIGITS:
            sizes = {"MASS": mass, "SHIFT": shift, "BITS": bits, "BLOCK": _BLOCK}
            _search_kernel[grid](logits_SV, state_SW, *limits, **sizes, num_warps=8)
    for counts in (True, False):
        sizes = {"COUNT": counts, "BLOCK": _BLOCK, "BLOCKS": triton.next_power_of_2(blocks)}
        _cut_kernel[grid](logits_SV, state_SW, ties_SB, *limits, **sizes, num_warps=8)
