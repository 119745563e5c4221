"""Decodes tokens to text as they arrive.

Tokens cannot be decoded one by one: a character may consist of several tokens, and some tokenizers decode a token
differently at the start of a text. So a window of tokens is decoded. It starts where an earlier text was complete, and
only the added text is new:

    ids      ....... a b c d | e f g            shown: the text of this window that was emitted
             prefix--^       ^--complete        the tail waits until it is a whole character
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_UNFINISHED = "\ufffd"  # decoders write it for bytes that are not a character (yet)
_MAX_TAIL = 3  # a UTF-8 character that lacks its last byte has at most three, so at most three tokens
_MAX_PENDING = 256  # tokens without a character after which their bytes are not text: stop waiting
_MAX_WINDOW = 4096  # tokens without visible text


class Detokenizer:
    """The text of one completion in pieces, which joined are the text of all its tokens.

    `decode` turns token ids into text, and bytes that form no character into U+FFFD.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window, and what follows it
        self._complete = 0  # tokens of the window whose text is whole
        self._shown = ""  # emitted text of the window

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add. An incomplete character at the end is kept for the next call."""
        if not token_ids:
            return ""
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        end = self._whole_tokens(text)
        if end is None:
            return self._emit_ahead(text.rstrip(_UNFINISHED))
        whole = text if end == len(self._ids) else self._decode(self._ids[:end])
        piece = whole[len(self._shown) :]
        self._shown = max(whole, self._shown, key=len)
        piece += self._emit_ahead(text.rstrip(_UNFINISHED))
        self._advance(end, ahead=self._shown[len(whole) :])
        return piece

    def finish(self) -> str:
        """The text that was kept back. Do not call `feed` afterwards."""
        return self._decode(self._ids)[len(self._shown) :] if self._ids else ""

    def copy(self) -> Detokenizer:
        """An independent detokenizer that has seen the same tokens."""
        twin = Detokenizer(self._decode)
        twin._ids, twin._complete, twin._shown = list(self._ids), self._complete, self._shown
        return twin

    def _emit_ahead(self, text: str) -> str:
        """The text that the whole characters of an incomplete token add; none if the decoder changed emitted text."""
        if len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def _whole_tokens(self, text: str) -> int | None:
        """The number of tokens of the window that form whole characters; None if it has not grown."""
        size = len(self._ids)
        if not text.endswith(_UNFINISHED):
            return size
        for end in range(size - 1, max(self._complete, size - _MAX_TAIL - 1), -1):
            if not self._decode(self._ids[:end]).endswith(_UNFINISHED):
                return end
        return size if size - self._complete > _MAX_PENDING else None

    def _advance(self, end: int, ahead: str) -> None:
        """Start the window at the tokens that were completed last.

        If they have no visible text, the window stays: some decoders strip the space at the start of a text, so the
        window must begin with text.
        """
        start = self._complete
        context = self._decode(self._ids[start:end])
        if context or end > _MAX_WINDOW:
            self._ids, end = self._ids[start:], end - start
            self._shown = context + ahead
        self._complete = end
