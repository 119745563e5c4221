"""Triton kernel that adds up a fingerprint of bytes on a GPU; `fingerprint` is its torch twin."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_PROGRAMS = 1056  # eight for each of 132 multiprocessors


@triton.jit(do_not_specialize=["words", "first"])
def _fingerprint_kernel(data_ptr, total_ptr, words, first, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0) * BLOCK):
        at = start + offset
        word = tl.load(data_ptr + at, mask=at < words, other=0)
        total += word.to(tl.int64) * ((2 * (at + first) + 1) * FACTOR)
    tl.atomic_add(total_ptr, tl.sum(total))


def add_words(words_N: torch.Tensor, total: torch.Tensor, factor: int, first: int = 0) -> None:
    """Add `words_N[i] * (2 * (first + i) + 1) * factor` for every i to `total`, modulo 2^64.

    Args:
        words_N: int32, contiguous.
        total: int64 without dimensions, changed in place.
        factor: constant of the fingerprint, below 2^63.
        first: number of the first word.
    """
    grid = (min(_PROGRAMS, triton.cdiv(words_N.numel(), _BLOCK)),)
    _fingerprint_kernel[grid](words_N, total, words_N.numel(), first, factor, _BLOCK, num_warps=8)
