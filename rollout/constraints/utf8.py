"""Bytes that are no character, though the compiler takes them for one (xgrammar 0.2.8): their text would be U+FFFD.

After the first byte of some characters the range of the second is smaller than elsewhere: less would be another way to
write a shorter one, or half of a pair that UTF-8 does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: First bytes, and the second ones that break the character.
_BREAKS: Mapping[int, range] = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90)}
_BROKEN = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")


def broken(texts: Sequence[bytes]) -> list[int]:
    """The tokens with such bytes in them."""
    return [token for token, text in enumerate(texts) if _BROKEN.search(text)]


def breaks(texts: Sequence[bytes]) -> dict[int, list[int]]:
    """By token at whose end a character begins: the tokens that would break it."""
    begins = {
        byte: [token for token, text in enumerate(texts) if text and text[0] in seconds]
        for byte, seconds in _BREAKS.items()
    }
    return {token: begins[text[-1]] for token, text in enumerate(texts) if text and text[-1] in begins}
