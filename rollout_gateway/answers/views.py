"""The views of a chat completion: its text, and in it reasoning, content and tool calls.

    tokens --> text --> reasoning | content | tool calls

Only the tokens are what the model wrote. No view can fail a request: where one cannot be made, `missing` says so, the
text is content, and the completion arrives with its tokens and log-probs.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_gateway.answers.text_pieces import TextPieces
from rollout_gateway.formats.answer_segments import AnswerPiece, Segments
from rollout_gateway.formats.regions import AnswerRegion
from rollout_gateway.formats.tool_calls import NotACall, demanded_calls
from trainer_bridge.client.results import Completion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DemandedCalls:
    """A completion that must be calls: the arguments of this function, or for None a list of calls."""

    function: str | None


class CompletionViews:
    """The views of one completion, while it arrives.

    `regions` are looked for in its text, which goes on with `begun`, the prompt's part of the answer. The arguments of
    calls have the types that `tools` say. Calls after the first `most_calls` are left out. `seen` gets new tokens and
    what they add.
    """

    def __init__(
        self,
        text: TextPieces,
        regions: Sequence[AnswerRegion] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        begun: str = "",
        demand: DemandedCalls | None = None,
        most_calls: int | None = None,
        seen: Callable[[Completion, AnswerPiece], None] | None = None,
    ) -> None:
        self.missing: dict[str, str] = {}  # why a view is not whole, by its name
        self.calls = 0
        self._text = text
        self._segments = Segments(regions, tools, begun) if regions else None
        self._demand = demand
        self._demanded = ""  # content that should be calls
        self._most_calls = most_calls
        self._seen = seen
        self._said = False

    def take(self, part: Completion) -> AnswerPiece:
        """The additions of new tokens to the views; the last part has a finish reason."""
        last = part.finish_reason is not None
        text, end = self._text_of(part)
        piece = self._cut(text, end, last)
        if self._demand is not None:
            self._demanded += piece.content
            piece.parts = [part for part in piece.parts if part[0] != "content"]
            if last:
                self._find_demanded(self._demand, piece)
        calls = piece.calls
        if self._most_calls is not None and self.calls + len(calls) > self._most_calls:
            left_out = calls[self._most_calls - self.calls :]
            piece.parts = [part for part in piece.parts if not any(part[1] is call for call in left_out)]
            self.missing["tool_calls"] = f"calls after the first {self._most_calls} are left out"
        self.calls += len(piece.calls)
        self._said = self._said or bool(piece.content)
        if self._seen is not None:
            self._seen(part, piece)
        return piece

    def facts(self, part: Completion) -> dict[str, Any]:
        """The field by which an answer names its missing views; only the last part has it."""
        return {"missing_views": self.missing} if part.finish_reason is not None and self.missing else {}

    @property
    def empty(self) -> bool:
        """True if there is neither content nor a call."""
        return not (self._said or self.calls)

    def _text_of(self, part: Completion) -> tuple[str, str]:
        """The text that tokens add, and the text of the token that ended the completion."""
        try:
            return self._text.take(part), self._text.end(part)
        # Tokenizers raise errors of many types, such as for unknown ids.
        except Exception as error:
            self._lose("text", error)
            return "", ""

    def _cut(self, text: str, end: str, last: bool) -> AnswerPiece:
        """The text in its regions. The end of a turn may close a region; otherwise it is no text."""
        if self._segments is None:
            return _content(text)
        waiting = self._segments.waiting
        try:
            piece = self._segments.feed(text, last and not end)
            if last and end:
                closing = self._segments.feed(end if self._segments.inside else "", True)
                piece.extend(_without_end(closing, end))
            self.missing |= self._segments.unparsed
            return piece
        # A format may come from a checkpoint, and its patterns meet unforeseen text.
        except Exception as error:
            self._lose("message", error)
            self._segments = None
            return _content(waiting + text)

    def _find_demanded(self, demand: DemandedCalls, piece: AnswerPiece) -> None:
        try:
            piece.call(demanded_calls(self._demanded, demand.function))
        except NotACall as error:
            self.missing["tool_calls"] = str(error)
            piece.add("content", self._demanded)

    def _lose(self, view: str, error: Exception) -> None:
        if view not in self.missing:
            log.error("the %s of a completion cannot be shown", view, exc_info=error)
        self.missing[view] = f"{type(error).__name__}: {error!s:.200}"


def _content(text: str) -> AnswerPiece:
    piece = AnswerPiece()
    piece.add("content", text)
    return piece


def _without_end(piece: AnswerPiece, end: str) -> AnswerPiece:
    """The piece without the text of the token that ended the completion, if the piece ends with it."""
    if piece.parts and isinstance(piece.parts[-1][1], str):
        kind, text = piece.parts.pop()
        piece.add(kind, str(text).removesuffix(end))
    return piece
