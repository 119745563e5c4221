"""The text of one completion in pieces: as the worker writes it, or made here from the tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollout.text.codec import TextCodec
from rollout.text.detokenizer import Detokenizer
from rollout_gateway.prompts.sampling import SamplingBody
from rollout_gateway.prompts.tokenizer import GatewayTokenizer, shown_text
from trainer_bridge.client.results import Completion


def worker_decodes(text: GatewayTokenizer, body: SamplingBody, shown: frozenset[int] = frozenset()) -> bool:
    """True if the worker makes the text of completions. `shown`: special tokens that the text must have.

    A worker leaves out all special tokens. It writes the token that ended a completion.
    """
    return text.available and body.skip_special_tokens and not shown and not body.stop_token_ids


def text_pieces(
    text: GatewayTokenizer, body: SamplingBody, keep_stop: bool, shown: frozenset[int] = frozenset()
) -> TextPieces:
    """The text of one completion in pieces; empty without a tokenizer. `shown` is as for `worker_decodes`."""
    if not text.available or worker_decodes(text, body, shown):
        return TextPieces(keep_stop)
    codec = text.codec("")
    special = codec.special_tokens
    visible = {name: token for name, token in special.items() if token in shown or not body.skip_special_tokens}
    hidden = frozenset(special.values()).difference(visible.values())
    return DecodedPieces(codec, hidden, list(visible), shown, body.stop, keep_stop)


class TextPieces:
    """The worker's text of one completion."""

    def __init__(self, keep_stop: bool) -> None:
        self._keep_stop = keep_stop

    def take(self, part: Completion) -> str:
        """The text that new tokens add; the last part has a finish reason."""
        text = part.text or ""
        return text + part.stop if self._keep_stop and isinstance(part.stop, str) else text

    def end(self, part: Completion) -> str:
        """The text of the token that ended the completion, if it may be a mark of the format of answers."""
        return ""


class DecodedPieces(TextPieces):
    """The text of one completion, made here: with some special tokens, and without the token that ended it.

    `hidden` are tokens without text, `visible` the texts of special tokens that are shown, `marks` the special tokens
    of the format of answers. The worker finds stop strings, in the text without special tokens. As many characters as a
    stop string has are kept back, so that it is never shown.
    """

    def __init__(
        self,
        codec: TextCodec,
        hidden: frozenset[int],
        visible: Sequence[str],
        marks: frozenset[int],
        stop: Sequence[str],
        keep_stop: bool,
    ) -> None:
        super().__init__(keep_stop)
        self._codec = codec
        self._hidden = hidden
        self._marks = marks
        self._detokenizer = Detokenizer(self._decode)
        longest_first = sorted(filter(None, visible), key=len, reverse=True)
        self._visible = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._reach = max(map(len, stop), default=0)
        self._kept = ""

    def take(self, part: Completion) -> str:
        """The text that new tokens add; the last part has a finish reason."""
        tokens = part.token_ids.tolist()
        stop = part.stop if part.finish_reason == "stop" else None
        if isinstance(stop, int) and not self._keep_stop:
            tokens = tokens[:-1]
        self._kept += self._detokenizer.feed(tokens[:-1])
        before = len(self._plain())
        self._kept += self._detokenizer.feed(tokens[-1:])
        if part.finish_reason is None:
            end = self._position(max(0, len(self._plain()) - self._reach))
        else:
            self._kept += self._detokenizer.finish()
            end = self._end_before(stop, before) if isinstance(stop, str) else len(self._kept)
        text, self._kept = self._kept[:end], self._kept[end:]
        return text

    def end(self, part: Completion) -> str:
        """The text of the token that ended the completion, if it may be a mark of the format of answers."""
        if part.finish_reason != "stop" or part.stop not in self._marks or self._keep_stop:
            return ""
        return self._decode([part.stop])

    def _end_before(self, stop: str, before: int) -> int:
        """The position at which the text ends. The stop string ends after `before` in the plain text."""
        found = self._plain().find(stop, max(0, before - len(stop) + 1))
        if found < 0:
            return len(self._kept)
        return self._position(found + (len(stop) if self._keep_stop else 0))

    def _plain(self) -> str:
        """The kept text without special tokens."""
        return self._visible.sub("", self._kept)

    def _position(self, characters: int) -> int:
        """The position in the kept text with this number of characters before it, special tokens not counted."""
        position = 0
        for part in self._visible.split(self._kept):
            if self._visible.fullmatch(part):
                position += len(part)
            elif characters <= len(part):
                return position + characters
            else:
                position, characters = position + len(part), characters - len(part)
        return position

    def _decode(self, token_ids: Sequence[int]) -> str:
        return shown_text(self._codec, [token for token in token_ids if token not in self._hidden])
