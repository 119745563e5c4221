"""A fingerprint of bytes that is computed where they lie: on a GPU it costs one pass over its memory, and 8 bytes.

    fingerprint = sum over words i of word_i * (2 i + 1) * K    modulo 2^64, words of 32 bits, little-endian

Every word counts with an odd weight of its own, so any change of one word, and any swap of two different ones, changes
it. Sums of integers don't depend on their order: every device gives the same number. It finds damage; it is no defence
against a forger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

_K = 0x1E3779B97F4A7C15  # odd, below 2^63
_WORDS = 4 << 20  # words of one piece: bounds the int64 copies, which take a few times 8 bytes a word


def fingerprint(data: torch.Tensor) -> torch.Tensor:
    """int64, no dimension, on the device of `data` (uint8, one dimension, any length)."""
    whole = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if data.is_cuda and whole:
        from trainer_bridge.transports.triton_fingerprint import add_words

        with torch.cuda.device(data.device):  # Triton's GPU: a new thread's current device is the first one
            add_words(data[:whole].view(torch.int32), total, _K)
    else:
        for start in range(0, whole, 4 * _WORDS):
            total += _piece(data[start : min(start + 4 * _WORDS, whole)], start // 4)
    if whole < data.numel():
        rest = torch.zeros(4, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        total += _piece(rest, whole // 4)
    return total + data.numel()


def _piece(data: torch.Tensor, first: int) -> torch.Tensor:
    words = data.view(torch.int32).to(torch.int64)
    weights = torch.arange(first, first + len(words), dtype=torch.int64, device=data.device).mul_(2).add_(1).mul_(_K)
    return words.mul_(weights).sum()


def fingerprints_digest(fingerprints: Sequence[torch.Tensor]) -> str:
    """BLAKE2b (hex) of fingerprints in order; waits for the device."""
    values = torch.stack(list(fingerprints)).cpu() if fingerprints else torch.empty(0, dtype=torch.int64)
    return hashlib.blake2b(values.numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()
