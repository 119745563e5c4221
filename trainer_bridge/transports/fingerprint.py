"""A fingerprint of bytes, computed where they lie: on a GPU it costs one pass over the memory, and 8 bytes.

    fingerprint = sum over words i of word_i * (2 i + 1) * K    modulo 2^64, words of 32 bits, little-endian

Every word has its own odd weight, so any change of a word, and any swap of two different words, changes the
fingerprint. Sums of integers don't depend on their order: every device gives the same number. It finds damage; it is no
defence against a forger.
"""

import hashlib
from collections.abc import Sequence

import torch

_K = 0x1E3779B97F4A7C15  # odd, below 2^63
_WORDS = 1 << 16  # words of one piece: their int64 copy stays in a CPU's cache


def fingerprint(data: torch.Tensor, first: int = 0) -> torch.Tensor:
    """int64, no dimension, on the device of `data` (uint8, one dimension, any length).

    The fingerprints of parts that follow each other add up to the fingerprint of the whole: `first` is the number of
    the first
    word. All parts but the last have whole words.
    """
    whole = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if data.is_cuda and whole:
        from trainer_bridge.transports.triton_fingerprint import add_words

        with torch.cuda.device(data.device):  # Triton's GPU: a new thread's current device is the first one
            add_words(data[:whole].view(torch.int32), total, _K, first)
    else:
        total += _sum(data[:whole].view(torch.int32), first)
    if whole < data.numel():
        rest = torch.zeros(4, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        total += _sum(rest.view(torch.int32), first + whole // 4)
    return total + data.numel()


def prepare_fingerprints(device: torch.device) -> None:
    """Compile the kernel now, not while rows decode."""
    fingerprint(torch.zeros(4, dtype=torch.uint8, device=device))


def _sum(words: torch.Tensor, first: int) -> torch.Tensor:
    """The sum over words (int32); the first one has number `first`."""
    weights = torch.arange(min(len(words), _WORDS), device=words.device).mul_(2).add_(1).mul_(_K)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _WORDS):
        piece = words[start : start + _WORDS].to(torch.int64)
        total += piece.sum() * _wrapped(2 * (first + start) * _K)  # the weights of this part begin at a larger place
        total += piece.mul_(weights[: len(piece)]).sum()
    return total


def _wrapped(number: int) -> int:
    """The number modulo 2^64, as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def fingerprints_digest(fingerprints: Sequence[torch.Tensor]) -> str:
    """BLAKE2b (hex) of fingerprints in order; waits for the device."""
    values = torch.stack(list(fingerprints)).cpu() if fingerprints else torch.empty(0, dtype=torch.int64)
    return hashlib.blake2b(values.numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()
