"""Keys from a terminal, one at a time, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


def keys_in(text: str) -> list[str]:
    """The keys in a terminal's input: single characters, `up` and `down`; other escape sequences are ignored."""
    keys: list[str] = []
    while text:
        if text[0] == "\x1b" and len(text) > 1:
            if text[:3] in _SEQUENCES:
                keys.append(_SEQUENCES[text[:3]])
            end = 2  # a sequence ends with its first letter or tilde
            while end < len(text) and not (text[end].isalpha() or text[end] == "~"):
                end += 1
            text = text[end + 1 :]
        else:
            keys.append(text[0])
            text = text[1:]
    return keys


class Keys:
    """Reads typed keys."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> list[str]:
        """The keys typed since the last call, or within `seconds`: none without a terminal, `q` when it is closed."""
        if self._descriptor is None:
            select.select([], [], [], seconds)
            return []
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._descriptor, 1024)
        return keys_in(data.decode("utf-8", "replace")) if data else ["q"]


@contextmanager
def keyboard() -> Iterator[Keys]:
    """Keys of stdin, if it is a terminal. Its mode is restored at the end of the block."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
