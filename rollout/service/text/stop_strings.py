"""Finds stop strings in the text of one completion: the token that completes a stop string, and the text before it.

The match depends on the tokens only, not on how many arrive at a time. The first token after which the text contains a
stop string ends the completion. If a token completes several strings, the one that begins first counts, then the
request's order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.text.detokenizer import Decode, Detokenizer

_DECODED_AT_ONCE = 256  # tokens


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found."""

    tokens: int  # number of tokens, including the one that completed the string
    string: str


def _pieces(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The tokens in small pieces: a tokenizer holds Python's lock while it decodes, and the engine's loop waits."""
    for start in range(0, len(token_ids), _DECODED_AT_ONCE):
        yield token_ids[start : start + _DECODED_AT_ONCE]


class StopText:
    """The text of one completion, and the search for stop strings in it.

    `strings` may be empty; then nothing is searched. A match consists of text of tokens at index `min_tokens` or later.
    The text of `prior` tokens counts: a match may begin in it, but a string that lies in it completely stops nothing.
    `taken`: number of characters of that text that were sent before; `take` continues after them. None means all.
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
        self._tail = ""  # up to the last `_reach` characters, in which a match may begin
        self._pending = ""  # text that `take` has not returned
        self._finished = False
        self.match: StopMatch | None = None
        early, late = self._split(prior)
        for ids, searched in ((early, False), (late, True)):
            for few in _pieces(ids):
                self._append(self._detokenizer.feed(few), len(few), searched=searched)
        taken = len(self.text) if taken is None else taken
        self._pending = self.text[taken:]
        self._skip = max(0, taken - len(self.text))  # sent before, but not decoded yet

    def feed(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Add tokens. Returns the match, if any; do not call `feed` after a match."""
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
        """End the text: kept beginnings of characters and stop strings become text."""
        if self.match is None:
            self._append(self._detokenizer.finish(), 0, searched=True)
        self._finished = True

    @property
    def text(self) -> str:
        """All present text, or the text before the stop string."""
        return "".join(self._pieces)

    @property
    def sendable(self) -> str:
        """The text without an end that may become part of a stop string."""
        text = self.text
        return text[: len(text) - self._possible_match()]

    def take(self) -> str:
        """The sendable text that was not taken before."""
        count = max(0, len(self._pending) - self._possible_match())
        ready, self._pending = self._pending[:count], self._pending[count:]
        skipped = min(self._skip, len(ready))
        self._skip -= skipped
        return ready[skipped:]

    def _split(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens before index `min_tokens`, and the others."""
        ids = list(token_ids)
        early = min(max(self._min_tokens - self._tokens, 0), len(ids))
        return ids[:early], ids[early:]

    def _append(self, piece: str, tokens: int, *, searched: bool) -> None:
        self._tokens += tokens
        self._pieces.append(piece)
        self._pending += piece
        self._tail = (self._tail + piece)[-self._reach :] if searched and self._reach else ""

    def _replay(self, detokenizer: Detokenizer, token_ids: list[int]) -> None:
        """Add tokens one at a time, to find the token that completes a match."""
        self._detokenizer = detokenizer
        for token in token_ids:
            piece = detokenizer.feed([token])
            found = self._find(piece)
            if found is not None:
                self._cut(piece, *found)
                return
            self._append(piece, 1, searched=True)

    def _find(self, piece: str) -> tuple[int, str] | None:
        """The start, in tail + piece, of a match that ends in the piece; and its string."""
        text, old = self._tail + piece, len(self._tail)
        starts = [(text.find(string, max(0, old - len(string) + 1)), i) for i, string in enumerate(self._strings)]
        found = [start for start in starts if start[0] >= 0]
        if not found:
            return None
        start, i = min(found)
        return start, self._strings[i]

    def _cut(self, piece: str, start: int, string: str) -> None:
        """End the text at the start of the match."""
        surplus = len(self._tail) + len(piece) - start
        self._pending = (self._pending + piece)[: max(len(self._pending) + len(piece) - surplus, 0)]
        whole = "".join(self._pieces) + piece
        self._pieces = [whole[: len(whole) - surplus]]
        self.match = StopMatch(self._tokens + 1, string)

    def _possible_match(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = 0
        if self._finished or self.match is not None:
            return longest
        for string in self._strings:
            for length in range(min(len(string) - 1, len(self._tail)), longest, -1):
                if self._tail.endswith(string[:length]):
                    longest = length
                    break
        return longest
