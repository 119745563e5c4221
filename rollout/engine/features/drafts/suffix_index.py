"""Earlier occurrences of a text's last tokens, in the texts of one prompt.

    texts     0: the prompt | 1, 2, ...: completions, each after the end of the prompt, in the order of their beginning
    gram      the last `LEAST` tokens before a position, as one integer; two grams are equal only if their tokens are
    place     (text, position) where a gram ends and a token follows. Places are numbered as they become known; each
              refers to the place before it with the same gram, so the newest ones are found first

A match is the place, among the newest `CANDIDATES` of the text's last gram, before which most tokens are equal, counted
up to `MOST`. Of several such places it is the newest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

#: The fewest equal tokens of a match, and the most tokens that are compared.
LEAST, MOST = 3, 32
#: Places that are compared.
CANDIDATES = 16
_TOKEN_BITS = 24  # bits of one token in a gram


class Match(NamedTuple):
    """A place like the end of a text."""

    text: int
    position: int  # position in `text` of the token that follows
    length: int  # equal tokens before it, `LEAST` to `MOST`


class SuffixIndex:
    """The texts of one prompt."""

    def __init__(self, prompt: Seq[int]) -> None:
        self._texts: list[array] = []
        self._newest: dict[int, int] = {}  # gram -> number of its newest place
        # Index: number of a place.
        self._text_of, self._position_of, self._before = array("i"), array("i"), array("i")
        self._texts.append(array("i"))
        self.add(0, prompt)
        self._context = array("i", prompt[-MOST:])

    def __len__(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self._texts))

    def open(self) -> int:
        """Begin a completion; returns its text."""
        self._texts.append(array("i", self._context))
        return len(self._texts) - 1

    def length(self, text: int) -> int:
        """Number of tokens in a completion."""
        return len(self._texts[text]) - len(self._context)

    def size(self, text: int) -> int:
        """Tokens that a text takes; a completion includes the end of the prompt before it."""
        return len(self._texts[text])

    @property
    def prompt(self) -> Seq[int]:
        """Its tokens."""
        return self._texts[0]

    def completion(self, text: int) -> Seq[int]:
        """The present tokens of a completion."""
        return self._texts[text][len(self._context) :]

    def add(self, text: int, tokens: Seq[int]) -> None:
        """Add tokens to the end of a text."""
        own, newest = self._texts[text], self._newest
        for token in tokens:
            if len(own) >= LEAST:
                gram = _gram(own)
                self._before.append(newest.get(gram, -1))
                newest[gram] = len(self._text_of)
                self._text_of.append(text)
                self._position_of.append(len(own))
            own.append(token)

    def match(self, text: int) -> Match | None:
        """The place that is most like the end of a text, or None."""
        own = self._texts[text]
        if len(own) < LEAST:
            return None
        best, place = None, self._newest.get(_gram(own), -1)
        for _ in range(CANDIDATES):
            if place < 0:
                break
            other, position = self._text_of[place], self._position_of[place]
            length = _equal_before(own, self._texts[other], position)
            if best is None or length > best.length:
                best = Match(other, position, length)
                if length == MOST:
                    break
            place = self._before[place]
        return best

    def after(self, text: int, match: Match, want: int) -> list[int]:
        """At most `want` tokens that follow a match. A text that repeats itself is expected to do so again."""
        _, position, _ = match
        path = self._texts[match.text][position : position + want].tolist()
        if match.text == text:
            period = len(self._texts[text]) - position
            while len(path) < want:
                path.append(path[-period])
        return path


def _gram(tokens: array) -> int:
    gram = 0
    for token in tokens[-LEAST:]:
        gram = gram << _TOKEN_BITS | token
    return gram


def _equal_before(own: array, other: array, position: int) -> int:
    """Number of equal tokens before the end of `own` and before `position` of `other`, at most `MOST`."""
    most = min(len(own), position, MOST)
    end, length = len(own), LEAST
    while length < most and own[end - length - 1] == other[position - length - 1]:
        length += 1
    return length
