"""Cuts the text of an answer into reasoning, content and tool calls, as it arrives.

    outside --mark--> reasoning, content --mark--> outside      text goes out as it comes
            --mark--> calls --their end--> outside              text waits, and goes out as calls

Invariants:

- What comes out depends on the text alone, not on the pieces in which it arrived. So text waits that may be the
  beginning of a mark, and white space that may stand before a call.
- No text fails. A region of calls without a call is content, as the model wrote it; `unparsed` says why.
- A mark inside a quoted string or an open value does not end a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_gateway.formats.regions import AnswerRegion, Kind
from rollout_gateway.formats.tool_calls import MOST_NESTED, NotACall, ToolCall, ValueScan, calls_in

_MOST_ENDS = 16  # marks inside of values at which a call does not end
_MOST_WITHDRAWN = 32  # marks after which there was no call; then the rest is content
_MOST_CHARS = 1 << 20  # characters of a region of calls
_NOT_WHOLE = "it is not a whole value"


@dataclass(slots=True)
class AnswerPiece:
    """The parts of an answer that text adds, in the order in which the model wrote them.

    Texts of one kind that follow each other are one part.
    """

    parts: list[tuple[Kind, str | ToolCall]] = field(default_factory=list)

    def add(self, kind: Kind, text: str) -> None:
        if not text:
            return
        last = self.parts[-1][1] if self.parts and self.parts[-1][0] == kind else None
        if isinstance(last, str):
            self.parts[-1] = kind, last + text
        else:
            self.parts.append((kind, text))

    def call(self, calls: Sequence[ToolCall]) -> None:
        self.parts += [("calls", call) for call in calls]

    def extend(self, other: AnswerPiece) -> None:
        """Add the parts of another piece."""
        for kind, value in other.parts:
            if isinstance(value, str):
                self.add(kind, value)
            else:
                self.call([value])

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def calls(self) -> list[ToolCall]:
        return [value for _, value in self.parts if isinstance(value, ToolCall)]

    def _text(self, kind: Kind) -> str:
        return "".join(value for each, value in self.parts if each == kind and isinstance(value, str))


class Segments:
    """The cut of one answer. `begun`: the part that the prompt has already, such as an open `<think>`."""

    def __init__(
        self, regions: Sequence[AnswerRegion], tools: Sequence[Mapping[str, Any]] = (), begun: str = ""
    ) -> None:
        self.unparsed: dict[str, str] = {}  # why a view is not whole, by its name
        self.regions = regions
        self._calls = next((region for region in regions if region.kind == "calls"), None)
        self._tools = tools
        self._text = begun
        self._at = 0  # the text before this position is out
        self._foreign = 0  # the text before this position is the prompt's
        self._region: AnswerRegion | None = None
        self._opened_at = 0  # start of the mark that opened the region
        self._body_at = 0  # end of that mark
        self._searched = 0  # no mark that ends the region begins before this position
        self._scan: ValueScan | None = None
        self._ends = 0  # marks that did not end the region
        self._unclosed: AnswerRegion | None = None  # the reasoning in which the region of calls began
        self._withdrawn = 0
        self._space = ""  # white space that waits for the text after it
        self._said = False  # there is content
        self._reasoned = False
        self._after_call = False
        self._arrived = False  # text of the model, not of the prompt alone
        self._advance(AnswerPiece(), last=False)
        self._arrived = True
        self._foreign, self._space = len(self._text), ""

    @property
    def inside(self) -> bool:
        return self._region is not None

    @property
    def waiting(self) -> str:
        """The text of the answer that is not out: what follows decides where it goes."""
        return self._space + self._text[max(self._at, self._foreign) :]

    @property
    def may_reason(self) -> bool:
        """True if reasoning is open, or may still open."""
        if self._region is not None and self._region.kind == "reasoning":
            return True
        over = self._reasoned or self._said
        return any(region.kind == "reasoning" and not (region.once and over) for region in self.regions)

    def feed(self, text: str, last: bool) -> AnswerPiece:
        """The parts that new text adds. With `last` no text waits for more text."""
        self._text += text
        piece = AnswerPiece()
        self._advance(piece, last)
        if last and not self._after_call:
            piece.add("content", self._space)
        if self._region is None or self._region.kind != "calls":
            self._forget()
        return piece

    def _advance(self, piece: AnswerPiece, last: bool) -> None:
        goes_on = True
        while goes_on:
            match self._region:
                case None:
                    goes_on = self._outside(piece, last)
                case AnswerRegion(kind="calls") as region:
                    goes_on = self._inside_calls(region, piece, last)
                case region:
                    goes_on = self._inside_text(region, piece, last)

    # Each of these goes on with the text at `self._at`, and returns False once further text has to come first.

    def _outside(self, piece: AnswerPiece, last: bool) -> bool:
        """Content, up to the next region."""
        found: tuple[AnswerRegion, Any] | None = None
        pending = len(self._text)
        for region in self.regions:
            # Templates write empty reasoning before a message that begins with open reasoning.
            if region.once and (self._said or (self._reasoned and self._arrived)):
                continue
            match, position = region.open.find(self._text, self._at, last)
            pending = min(pending, position)
            if match is not None and (found is None or _key(match) < _key(found[1])):
                found = region, match
        if found is not None and not last and found[1].start() >= pending:  # another mark may begin before it
            found = None
        self._say(piece, self._take(pending if found is None else found[1].start()))
        if found is None:
            return False
        region, match = found
        if not (region.once and self._said):  # else it is not at the beginning
            self._open(region, match)
        return True

    def _open(self, region: AnswerRegion, match: Any) -> None:
        self._region = region
        self._opened_at, self._body_at = match.span()
        self._searched = self._body_at
        if region.kind == "calls":
            self._scan, self._ends = ValueScan.of(region.content, region.arguments, self._body_at), 0
            return
        self._take(self._body_at)
        self._after_call = False
        if region.kind == "reasoning":
            self._space, self._reasoned = "", True

    def _inside_text(self, region: AnswerRegion, piece: AnswerPiece, last: bool) -> bool:
        """Reasoning or content in a region of its own, up to its end."""
        close, pending = None, len(self._text)
        if region.close is not None:
            close, pending = region.close.find(self._text, self._searched, last)
        if close is not None:
            self._tell(region, piece, self._take(close.start()))
            self._take(close.end())
            self._region = None
            if region.kind == "reasoning":  # the answer begins here, for marks that ask for its beginning
                self._drop(self._at)
            return True
        self._searched = pending
        calls, call = self._calls, None
        if region.kind == "reasoning" and calls is not None:
            # A call ends reasoning that is never closed. Whether it is closed, only further text can tell.
            call, position = calls.open.find(self._text, self._at, last)
            pending = min(pending, position if call is None else call.start())
        self._tell(region, piece, self._take(pending))
        if calls is None or call is None or not last:
            return False
        self._open(calls, call)
        self._unclosed = region
        return True

    def _inside_calls(self, region: AnswerRegion, piece: AnswerPiece, last: bool) -> bool:
        """Calls, once their region has ended."""
        try:
            end = self._end_of_calls(region, last)
            if (len(self._text) if end is None else end[1]) - self._opened_at > _MOST_CHARS:
                raise NotACall(f"it has more than {_MOST_CHARS} characters")
            if end is None:
                return False
            found = calls_in(region, self._values(*end), self._tools)
        except NotACall as error:
            self._withdraw(piece, str(error))
            return True
        piece.call(found)
        self._space, self._after_call = "", True
        self._take(end[1])
        self._region = self._unclosed = None
        return True

    def _withdraw(self, piece: AnswerPiece, reason: str) -> None:
        """The mark did not begin a call. The text after it may contain another region."""
        if self._unclosed is None:  # thoughts may have the mark without a call
            self.unparsed.setdefault("tool_calls", reason)
        self._withdrawn += 1
        if self._withdrawn == _MOST_WITHDRAWN or self._body_at == self._opened_at:  # a mark without text comes once
            self._calls = None
            self.regions = [region for region in self.regions if region.kind != "calls"]
        self._region, self._unclosed = self._unclosed, None
        self._searched = self._body_at
        text = self._take(self._body_at)
        if self._region is None:
            self._say(piece, text)
        else:
            self._tell(self._region, piece, text)

    def _end_of_calls(self, region: AnswerRegion, last: bool) -> tuple[int, int] | None:
        """The positions at which the values of the region and the region itself end; None if the end has not arrived.

        Raises `NotACall` if a value cannot be whole.
        """
        if region.close is None and self._scan is not None:
            self._run(len(self._text), last, values=1)
            if self._scan.spans:
                end = self._scan.spans[0][1]
                return end, end
        start = self._body_at
        while region.close is not None:
            start = self._searched
            match, self._searched = region.close.find(self._text, start, last)
            self._run(self._searched if match is None else match.start(), match is not None)
            if match is None:
                break
            if self._is_whole(region, match.start()):
                return match.span()
            self._ends += 1
            if self._ends == _MOST_ENDS or (self._scan is not None and not self._scan.in_string):
                raise NotACall(_NOT_WHOLE)
            self._searched = match.end()
        if not last:
            return None
        end = len(self._text) if region.close is None else region.close.begin_at_end(self._text, start)
        self._run(end, True)
        if not self._is_whole(region, end):
            raise NotACall("it is not complete")
        return end, len(self._text)

    def _run(self, end: int, final: bool, values: int | None = None) -> None:
        """Go on with the scan of values. Raises `NotACall` if there is something else."""
        if self._scan is None:
            return
        self._scan.run(self._text, end, final, values)
        if self._scan.junk:
            raise NotACall(_NOT_WHOLE)
        if self._scan.most_nested > MOST_NESTED:
            raise NotACall(f"it has more than {MOST_NESTED} levels")

    def _is_whole(self, region: AnswerRegion, end: int) -> bool:
        """True if no value of the region is open at this position."""
        if self._scan is not None:
            return self._scan.whole
        if region.value_begin is None:
            return True
        begin = region.value_begin.search(self._text, self._body_at, end)
        return begin is None or region.value_end.search(self._text, begin.end(), end) is not None

    def _values(self, end: int, close: int) -> list[str]:
        """The values of the region, each with its opening mark; tagged values also with the mark up to `close`."""
        mark = self._text[self._opened_at : self._body_at]
        if self._scan is None:
            return [self._text[self._opened_at : close]]  # marks may look ahead at it
        return [mark + self._text[start:stop] for start, stop in self._scan.spans if stop <= end]

    # --- text on its way out -----------------------------------------------------------------------------------------

    def _take(self, end: int) -> str:
        """The text up to a position, without the prompt's."""
        text = self._text[max(self._at, self._foreign) : end]
        self._at = max(self._at, end)
        return text

    def _tell(self, region: AnswerRegion, piece: AnswerPiece, text: str) -> None:
        if region.kind == "reasoning":
            piece.add("reasoning", text)
        else:
            self._say(piece, text)

    def _say(self, piece: AnswerPiece, text: str) -> None:
        """Add content. White space at its end waits: it is dropped before a call, and before the first reasoning."""
        told = text.rstrip()
        if told:
            piece.add("content", self._space + told)
            self._space, self._said, self._after_call = "", True, False
        self._space += text[len(told) :]
        if self._calls is None and (self._said or self._reasoned):
            piece.add("content", self._space)
            self._space = ""

    def _forget(self) -> None:
        """Drop text that was sent, except its last character: marks may look back at it."""
        if self._at > 1:
            self._drop(self._at - 1)

    def _drop(self, cut: int) -> None:
        """Drop the first `cut` characters, which are out."""
        self._text = self._text[cut:]
        self._at -= cut
        self._searched = max(self._searched - cut, self._at)
        self._foreign = max(self._foreign - cut, 0)


def _key(match: Any) -> tuple[int, int]:
    """The order of marks: the first, then the longest."""
    return match.start(), -match.end()
