"""The words that differ between two versions of the same bytes, coded for an update that sends changes alone.

A word has 16 bits, the size of a bfloat16 number. A bucket of the stream has one of these forms, the smallest:

    nothing                 no word differs
    gaps and words          for each changed word the words since the last one, in one byte, and its new value
    bits and words          one bit for each word, and the new values of the words whose bit is set
    all                     every word

    words    . . A . B . ... 300 unchanged ... C .
    gaps     2   1   255 45                          255: skip 255 words, none of them changed

Values are new values, not differences, so the same change can be made twice. All is computed on the device of the
bytes. Codes are stored as bfloat16, like weights, so that every transport takes them; their bits are not changed on the
way. A part that needs an odd number of bytes ends with one more: 255 in gaps, 0 in bits.
"""

from collections.abc import Mapping

import torch

from trainer_bridge.wire.delta import WORD_BYTES, Part

_SKIP = 255
_BITS = 8


def changed_words(old: torch.Tensor, new: torch.Tensor) -> dict[Part, torch.Tensor]:
    """The form of `new` (uint8, one dimension, an even number of bytes) for a reader that has `old`; bfloat16 [n]."""
    after = new.view(torch.int16)
    changed = old.view(torch.int16) != after
    count, words = int(torch.count_nonzero(changed)), len(after)
    if count == 0:
        return {}
    bits_bytes = -(-words // 16) * 2
    gaps: torch.Tensor | None = None
    if count < bits_bytes:  # otherwise gaps are longer than bits
        index = changed.nonzero()[:, 0]
        gaps = _gaps(index, bits_bytes)
        if gaps is not None:
            return {"gaps": gaps.view(torch.bfloat16), "words": after[index].view(torch.bfloat16)}
    if bits_bytes + WORD_BYTES * count >= WORD_BYTES * words:
        return {"all": new.clone().view(torch.bfloat16)}
    return {"bits": _bits(changed).view(torch.bfloat16), "words": after[changed].view(torch.bfloat16)}


def find_words(parts: Mapping[Part, torch.Tensor], words: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The positions (int64, ascending) and the values (int16) of a form's words in a bucket of `words` words.

    None if the form is damaged: another number of positions than of values, or a position outside of the bucket.
    """
    values = parts["words"].view(torch.int16)
    if "gaps" in parts:
        codes = parts["gaps"].view(torch.uint8)
        ends = (codes.to(torch.int16) + 1 - (codes == _SKIP).to(torch.int16)).cumsum(0, dtype=torch.int64)
        index = ends[codes != _SKIP] - 1
    else:
        codes = parts["bits"].view(torch.uint8)
        shifts = torch.arange(_BITS, dtype=torch.uint8, device=codes.device)
        index = ((codes[:, None] >> shifts) & 1).view(-1).nonzero()[:, 0]
    if len(index) != len(values) or (len(index) and int(index[-1]) >= words):
        return None
    return index, values


def _gaps(index: torch.Tensor, most: int) -> torch.Tensor | None:
    """uint8, an even number of codes; None if there would be more than `most`."""
    gaps = index.diff(prepend=index.new_full((1,), -1)) - 1
    positions = (gaps // _SKIP + 1).cumsum(0) - 1
    count = int(positions[-1]) + 1
    if count > most:
        return None
    codes = torch.full((-(-count // 2) * 2,), _SKIP, dtype=torch.uint8, device=index.device)
    codes[positions] = (gaps % _SKIP).to(torch.uint8)
    return codes


def _bits(changed: torch.Tensor) -> torch.Tensor:
    """uint8, the first word in the lowest bit; an even number of bytes."""
    padded = torch.zeros(-(-len(changed) // 16) * 16, dtype=torch.uint8, device=changed.device)
    padded[: len(changed)] = changed
    weights = torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=changed.device)
    return (padded.view(-1, _BITS) * weights).sum(1, dtype=torch.uint8)
