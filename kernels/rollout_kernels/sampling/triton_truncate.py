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

Each rank of a tensor group has the logits of a part of the vocabulary. Histograms are whole numbers, and add up over
the ranks: after each of the 6 launches another one, with a program for each row, exchanges them and finds the same
digit on every rank. Logits never cross.

    over peers' memory   the program writes the row's histogram to every peer, as words with the number of the exchange
                         (`peer_buffers`), and waits for theirs; rows without a search exchange nothing. A launch for
                         each 256 rows, for which there is memory
    otherwise            the group gathers the histograms of all rows before the launch

The last histograms also say how many tokens with the key that was found are on the ranks before this one.

Legend: S rows that sample, V vocabulary or a part of it, B blocks of V, W words of a row's scratch, R ranks, D bins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import last_to_arrive
from rollout_kernels.parallel.triton_all_reduce import MOST_SPINS, next_number, receive_words, send_words
from rollout_kernels.sampling.reference import SamplingRows
from rollout_kernels.sampling.sharded import VocabShard
from rollout_kernels.sampling.sharded_truncation import DIGITS

_BLOCK = 2048
_BINS = tl.constexpr(2048)
_COPIES = tl.constexpr(4)  # histograms of a row; blocks use them in turn, so fewer atomic additions meet in one bin

# A row's scratch, int64: the search for top-k, the search for top-p, what both share, the histograms.
_KEY = tl.constexpr(0)  # digits found so far; finally the smallest key that stays. 0, which is no key: no search
_LEFT = tl.constexpr(1)  # the rest of the bound; finally how many tokens with that key stay
_GONE = tl.constexpr(2)  # how many tokens with that key go
_SEARCH = tl.constexpr(3)  # words of one search
_LOST = tl.constexpr(5)  # 1 if a histogram of a peer did not come; the search for top-p has no use for `_GONE`
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
def _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, vocab):
    """The row's top-k, top-p and min-p. `vocab`, infinity and 0 mean off; so does a padding row, whose top-k is 0."""
    top_k = tl.load(top_k_ptr + row * k_stride)
    padding = top_k <= 0
    top_k = tl.where(padding, vocab, tl.minimum(top_k, vocab))
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
def _searches(state, top_k, top_p, vocab, MASS: tl.constexpr):
    """Whether the row has this search."""
    if MASS:
        return (top_p < float("inf")) & _is_number(_value_of(tl.load(state + _BEST)))
    else:
        return top_k < vocab


@triton.jit
def _has_limit(top_k, top_p, min_p, vocab):
    """Whether one of the row's limits is on."""
    return (top_k < vocab) | (top_p < float("inf")) | (min_p > 0.0)


@triton.jit
def _reads(searches, top_k, top_p, min_p, vocab, FIRST: tl.constexpr):
    """Whether the launch reads the row. The first one also finds the largest logit, of every row with a limit."""
    if FIRST:
        return _has_limit(top_k, top_p, min_p, vocab)
    else:
        return searches


@triton.jit
def _take_histogram(state, digit):
    """The row's histogram, in the order of `digit`; clears it."""
    bins = state + _HISTOGRAM + digit
    found = tl.zeros_like(digit).to(tl.int64)
    for copy in tl.static_range(_COPIES):
        found += tl.load(bins + copy * _BINS, cache_modifier=".cg")  # other programs' additions are in the L2 cache
    tl.debug_barrier()  # one thread may clear a bin that another thread reads
    for copy in tl.static_range(_COPIES):
        tl.store(bins + copy * _BINS, tl.zeros_like(found))
    return found


@triton.jit
def _choose_digit(
    state, digit, found, before, top_k, top_p, best, MASS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr
):
    """Add the digit at which the bound is reached to the key.

    `digit` is in descending order, `found` the amount with these digits, and `before` the part of it on earlier ranks.
    """
    search = state + MASS * _SEARCH
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
        elsewhere = tl.sum(tl.where(here, before, 0))
        if MASS:
            one = tl.maximum(_units_of(_value_of(key), best), 1)
            left = (left + one - 1) // one - elsewhere // one
        else:
            tl.store(search + _GONE, tl.sum(tl.where(here, found, 0)) - left)
            left -= elsewhere
    tl.store(search + _KEY, key)
    tl.store(search + _LEFT, left)


@triton.jit
def _search_kernel(
    logits_ptr, state_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    k_stride, p_stride,
    vocab, V,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, vocab)
    state = state_ptr + row * _WORDS
    FIRST: tl.constexpr = (not MASS) and SHIFT + BITS == 32
    best = 0.0
    if MASS:
        best = _value_of(tl.load(state + _BEST))
    searches = _searches(state, top_k, top_p, vocab, MASS)
    if _reads(searches, top_k, top_p, min_p, vocab, FIRST):
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
            if not SHARD:
                if last_to_arrive(state + _ARRIVED):
                    descending = (1 << BITS) - 1 - tl.arange(0, 1 << BITS)
                    found = _take_histogram(state, descending)
                    none = tl.zeros_like(found)
                    _choose_digit(state, descending, found, none, top_k, top_p, best, MASS, SHIFT, BITS)


@triton.jit
def _merge_kernel(
    state_ptr, gathered_ptr, addresses_ptr, exchanges_ptr, fault_ptr,
    row_words, most_rows, most_spins,
    top_k_ptr, top_p_ptr, min_p_ptr,
    k_stride, p_stride,
    vocab,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, vocab)
    state = state_ptr + row * _WORDS
    FIRST: tl.constexpr = (not MASS) and SHIFT + BITS == 32
    searches = _searches(state, top_k, top_p, vocab, MASS)
    if _reads(searches, top_k, top_p, min_p, vocab, FIRST):
        digit = (1 << BITS) - 1 - tl.arange(0, 1 << BITS)
        own = _take_histogram(state, digit)
        best_key = tl.load(state + _BEST)
        found = tl.zeros_like(own)
        before = tl.zeros_like(own)
        if gathered_ptr is None:
            live = tl.where(searches, digit, -1) >= 0
            one = digit == 0
            number = next_number(exchanges_ptr + row)
            half = (number & 1).to(tl.int64)
            stamp = number.to(tl.int64) << 32
            for step in tl.static_range(1, RANKS):
                peer = tl.load(addresses_ptr + (RANK + step) % RANKS).to(tl.pointer_type(tl.int64))
                to = peer + ((half * RANKS + RANK) * most_rows + row) * row_words
                if FIRST:
                    send_words(to + 2 * _BINS + digit, tl.zeros_like(own) + (best_key | stamp), one)
                send_words(to + digit, (own & 0xFFFFFFFF) | stamp, live)
                if MASS:
                    send_words(to + _BINS + digit, (own >> 32) | stamp, live)
            mine = tl.load(addresses_ptr + RANK).to(tl.pointer_type(tl.int64))
            lost = 0
            for rank in tl.static_range(RANKS):
                part = own
                if rank != RANK:
                    at = mine + ((half * RANKS + rank) * most_rows + row) * row_words
                    low, came, missed = receive_words(at + digit, live, number, fault_ptr, most_spins, rank)
                    lost = lost | missed
                    part = tl.where(live, low.to(tl.int64) & 0xFFFFFFFF, 0)
                    if MASS:
                        high, came, missed = receive_words(
                            at + _BINS + digit, live, number, fault_ptr, most_spins, rank
                        )
                        lost = lost | missed
                        part += tl.where(live, high.to(tl.int64) << 32, 0)
                    if FIRST:
                        key, came, missed = receive_words(
                            at + 2 * _BINS + digit, one, number, fault_ptr, most_spins, rank
                        )
                        lost = lost | missed
                        best_key = tl.maximum(best_key, tl.max(tl.where(one, key.to(tl.int64) & 0xFFFFFFFF, 0)))
                found += part
                if rank < RANK:
                    before += part
            tl.store(exchanges_ptr + row, number | (lost << 31))  # negative for ever, as in `triton_all_reduce`
            if lost != 0:
                tl.store(state + _LOST, 1)
        else:
            for rank in tl.static_range(RANKS):
                at = gathered_ptr + (rank * tl.num_programs(0) + row) * (_BINS + 1)
                part = tl.load(at + digit)
                found += part
                if rank < RANK:
                    before += part
                if FIRST:
                    best_key = tl.maximum(best_key, tl.load(at + _BINS))
        if FIRST:
            tl.store(state + _BEST, best_key)
        if searches:
            _choose_digit(state, digit, found, before, top_k, top_p, _value_of(best_key), MASS, SHIFT, BITS)


@triton.jit
def _threshold(state, top_p, best):
    """The smallest key that stays, and how many tokens with this key stay."""
    search = state
    if (top_p < float("inf")) & _is_number(best):
        search = state + _SEARCH
    return tl.load(search + _KEY), tl.load(search + _LEFT)


@triton.jit
def _cut_kernel(
    logits_ptr, state_ptr, ties_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    k_stride, p_stride,
    vocab, V,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, k_stride, p_stride, row, vocab)
    if _has_limit(top_k, top_p, min_p, vocab):
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
            cut = tl.zeros_like(x) - float("inf")
            if SHARD:
                lost = (tl.zeros_like(key) + tl.load(state + _LOST)) != 0
                cut = tl.where(lost, float("nan"), cut)  # the log-probs of this row become NaN on every rank
                goes = goes | lost
            tl.store(logits_ptr + row * V + v, cut, mask=goes & (v < V))


def truncate(
    logits_SV: torch.Tensor, rows: SamplingRows, shard: VocabShard | None = None, most_spins: int = MOST_SPINS
) -> None:
    """Set the logits of all tokens that top-k, then top-p, then min-p drop to -inf, in place.

    Args:
        logits_SV: float32, contiguous, already tempered.
        rows: `top_k_S`, `top_p_S` and `min_p_S` are required; the last two have the same stride.
        shard: if the logits are one rank's part of the vocabulary. All ranks call this.
        most_spins: reads of a peer's missing words before the fault flag is set; then the row becomes NaN.
    """
    assert rows.top_k_S is not None and rows.top_p_S is not None and rows.min_p_S is not None
    assert logits_SV.is_contiguous() and rows.top_p_S.stride(0) == rows.min_p_S.stride(0)
    count, width = logits_SV.shape
    blocks = triton.cdiv(width, _BLOCK)
    grid = (blocks, count)
    state_SW = torch.zeros(count, _WORDS.value, dtype=torch.int64, device=logits_SV.device)
    ties_SB = torch.empty(count, blocks, dtype=torch.int32, device=logits_SV.device)
    vocab = width if shard is None else shard.vocab
    limits = _limit_arguments(rows, slice(None), vocab)
    for mass in (0, 1):
        for shift, bits in DIGITS:
            digit = {"MASS": mass, "SHIFT": shift, "BITS": bits}
            sizes = {"BLOCK": _BLOCK, "SHARD": shard is not None}
            _search_kernel[grid](logits_SV, state_SW, *limits, width, **digit, **sizes, num_warps=8)
            if shard is not None:
                _merge(state_SW, rows, digit, shard, most_spins)
    for counts in (True, False):
        sizes = {"COUNT": counts, "BLOCK": _BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "SHARD": shard is not None}
        _cut_kernel[grid](logits_SV, state_SW, ties_SB, *limits, width, **sizes, num_warps=8)


def _limit_arguments(rows: SamplingRows, part: slice, vocab: int) -> tuple[Any, ...]:
    """The arguments of a kernel from which `_limits` reads."""
    assert rows.top_k_S is not None and rows.top_p_S is not None and rows.min_p_S is not None
    strides = rows.top_k_S.stride(0), rows.top_p_S.stride(0)
    return rows.top_k_S[part], rows.top_p_S[part], rows.min_p_S[part], *strides, vocab


def _merge(
    state_SW: torch.Tensor, rows: SamplingRows, digit: dict[str, int], shard: VocabShard, most_spins: int
) -> None:
    """Exchange the histograms of the rows, and find the next digit of each."""
    group, peers = shard.group, shard.group.histogram_peers
    gathered_RSD, addresses_R, exchanges_M, fault, words, at_once = None, None, None, None, 0, len(state_SW)
    if peers is None:
        histogram_SD = state_SW[:, _HISTOGRAM.value :].unflatten(1, (_COPIES.value, _BINS.value)).sum(dim=1)
        best_S1 = state_SW[:, _BEST.value, None]
        gathered_RSD = group.all_gather(torch.cat([histogram_SD, best_S1], dim=1))
    else:
        addresses_R, exchanges_M, fault = peers.addresses_R, peers.exchanges_M, peers.fault
        words, at_once = peers.words, peers.rows
    for begin in range(0, len(state_SW), at_once):
        part = slice(begin, begin + at_once)
        _merge_kernel[(len(state_SW[part]),)](
            state_SW[part], gathered_RSD, addresses_R, exchanges_M, fault, words, at_once, most_spins,
            *_limit_arguments(rows, part, shard.vocab),
            RANK=group.rank, RANKS=group.size, num_warps=8, **digit,
        )  # fmt: skip
