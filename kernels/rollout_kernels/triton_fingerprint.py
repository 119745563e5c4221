"""The fingerprint of bytes on a GPU, in one pass over them; `trainer_bridge.wire.fingerprint` defines it and is the
twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_PROGRAMS = 1056  # eight for each multiprocessor of the largest chips


@triton.jit(do_not_specialize=["words"])
def _fingerprint_kernel(data_ptr, total_ptr, words, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, words, tl.num_programs(0) * BLOCK):
        at = start + lane
        word = tl.load(data_ptr + at, mask=at < words, other=0)
        total += word.to(tl.int64) * ((2 * at + 1) * FACTOR)
    tl.atomic_add(total_ptr, tl.sum(total))


def add_words(words: torch.Tensor, total: torch.Tensor, factor: int) -> None:
    """Add `words[i] * (2 i + 1) * factor` for every i to `total`, modulo 2^64; int32 [n], and int64 of no dimension."""
    grid = (min(_PROGRAMS, triton.cdiv(words.numel(), _BLOCK)),)
    _fingerprint_kernel[grid](words, total, words.numel(), factor, _BLOCK, num_warps=8)
