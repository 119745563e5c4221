"""Stop strings in the text of one completion: which token completes one, and what text comes before it.

Which match is found depends on the tokens alone, never on how many arrive at a time: the first token after which the
text holds a stop string ends the completion; of several strings that it completes, the one that begins first does,
then the one that the request names first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.service.text.detokenizer import Decode, Detokenizer

_DECODED_AT_ONCE = 256  # tokens


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found."""

    tokens: int  # the completion's tokens up to and including the one that completed the string
    string: str


def _pieces(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """A few tokens at a time: a tokenizer decodes with Python's lock held, which the engine's loop may wait for."""
    for start in range(0, len(token_ids), _DECODED_AT_ONCE):
        yield token_ids[start : start + _DECODED_AT_ONCE]


class StopText:
    """The text of one completion, and the search for stop strings in it.

    `strings` may be empty: then this is text only. A string is found if all of it is text of tokens at index
    `min_tokens` or later. `prior` tokens are text, too, and a string may begin in them, but one that lies in them
    altogether was there before and stops nothing. `taken` characters of their text were handed out before: `take`
    goes on after them; None says all.
    """

    def __init__(
        self,
        decode: Decode,
        strings: Sequence[str] = (),
        min_tokens: int = 0,
        prior: Sequence[int] = (),
        taken: int | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._strings = tuple(strings)
        self._reach = max((len(string) for string in strings), default=1) - 1
        self._min_tokens = min_tokens
        self._tokens = 0
        self._pieces: list[str] = []
        self._tail = ""  # the last `_reach` characters, as far as a match may begin in them
        self._pending = ""  # text that `take` has not handed out
        self._finished = False
        self.match: StopMatch | None = None
        early, late = self._split(prior)
        for ids, searched in ((early, False), (late, True)):
            for few in _pieces(ids):
                self._append(self._detokenizer.feed(few), len(few), searched=searched)
        taken = len(self.text) if taken is None else taken
        self._pending = self.text[taken:]
        self._skip = max(0, taken - len(self.text))  # handed out before, though not decoded yet

    def feed(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Add tokens. Returns the match, which is final: after it nothing may be fed."""
        assert self.match is None and not self._finished, "the completion is over"
        for few in _pieces(token_ids):
            if self.match is None:
                self._feed(few)
        return self.match

    def _feed(self, token_ids: Sequence[int]) -> None:
        early, late = self._split(token_ids)
        if early:
            self._append(self._detokenizer.feed(early), len(early), searched=False)
        before = self._detokenizer.copy()
        piece = self._detokenizer.feed(late)
        if self._find(piece) is None:
            self._append(piece, len(late), searched=True)
        else:
            self._replay(before, late)

    def finish(self) -> None:
        """No more tokens come: what waited for the rest of a character or of a stop string is text now."""
        if self.match is None:
            self._append(self._detokenizer.finish(), 0, searched=True)
        self._finished = True

    @property
    def text(self) -> str:
        """All text so far; what comes before the stop string when one was found."""
        return "".join(self._pieces)

    @property
    def settled(self) -> str:
        """The text that no more tokens can make part of a stop string."""
        text = self.text
        return text[: len(text) - self._possible_match()]

    def take(self) -> str:
        """Text that was not taken before and can no longer become part of a stop string."""
        settled = max(0, len(self._pending) - self._possible_match())
        ready, self._pending = self._pending[:settled], self._pending[settled:]
        skipped = min(self._skip, len(ready))
        self._skip -= skipped
        return ready[skipped:]

    def _split(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens before index `min_tokens`, and those from it on."""
        ids = list(token_ids)
        early = min(max(self._min_tokens - self._tokens, 0), len(ids))
        return ids[:early], ids[early:]

    def _append(self, piece: str, tokens: int, *, searched: bool) -> None:
        self._tokens += tokens
        self._pieces.append(piece)
        self._pending += piece
        self._tail = (self._tail + piece)[-self._reach :] if searched and self._reach else ""

    def _replay(self, detokenizer: Detokenizer, token_ids: list[int]) -> None:
        """Go through tokens that hold a match one at a time, to see which of them completes it."""
        self._detokenizer = detokenizer
        for token in token_ids:
            piece = detokenizer.feed([token])
            found = self._find(piece)
            if found is not None:
                self._cut(piece, *found)
                return
            self._append(piece, 1, searched=True)

    def _find(self, piece: str) -> tuple[int, str] | None:
        """Where in tail + piece a match begins that ends in the piece, and its string."""
        text, old = self._tail + piece, len(self._tail)
        starts = [(text.find(string, max(0, old - len(string) + 1)), i) for i, string in enumerate(self._strings)]
        found = [start for start in starts if start[0] >= 0]
        if not found:
            return None
        start, i = min(found)
        return start, self._strings[i]

    def _cut(self, piece: str, start: int, string: str) -> None:
        """End the text where the match begins."""
        surplus = len(self._tail) + len(piece) - start
        self._pending = (self._pending + piece)[: max(len(self._pending) + len(piece) - surplus, 0)]
        whole = "".join(self._pieces) + piece
        self._pieces = [whole[: len(whole) - surplus]]
        self.match = StopMatch(self._tokens + 1, string)

    def _possible_match(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string, and may become one."""
        longest = 0
        if self._finished or self.match is not None:
            return longest
        for string in self._strings:
            for length in range(min(len(string) - 1, len(self._tail)), longest, -1):
                if self._tail.endswith(string[:length]):
                    longest = length
                    break
        return longest
