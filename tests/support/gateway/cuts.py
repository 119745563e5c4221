"""Answers cut by a format, in one piece and in many."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollout_gateway.formats.answer_segments import AnswerPiece, Segments
from rollout_gateway.formats.known_formats import REASONING, TOOL_CALLS
from rollout_gateway.formats.regions import AnswerRegion, compile_regions


class Answer(NamedTuple):
    """An answer that was cut. Ids that the gateway makes are left out."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str, str], ...]  # name, arguments, id
    unparsed: tuple[str, ...]

    def named(self) -> list[tuple[str, str]]:
        """The names and arguments of the calls."""
        return [call[:2] for call in self.calls]


def format_of(tools: str | None = None, reasoning: str | None = None) -> tuple[AnswerRegion, ...]:
    """The regions of formats by name."""
    fields: dict[str, Any] = dict(REASONING["gpt_oss"]) if "gpt_oss" in (tools, reasoning) else {}
    if reasoning is not None:
        fields |= REASONING[reasoning]
    if tools is not None:
        fields["tool_calls"] = TOOL_CALLS[tools]
    return compile_regions(fields)


def in_pieces(
    regions: Sequence[AnswerRegion], pieces: Sequence[str], begun: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> Answer:
    """An answer that arrives in these pieces."""
    return ordered(regions, pieces, begun, tools)[0]


def ordered(
    regions: Sequence[AnswerRegion], pieces: Sequence[str], begun: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[Answer, list[tuple[str, str]]]:
    """The same, and its parts in their order: the kind of each, and its text or its name."""
    segments, whole = Segments(regions, tools, begun), AnswerPiece()
    for place, text in enumerate(pieces):
        whole.extend(segments.feed(text, place == len(pieces) - 1))
    assert all(call.id for call in whole.calls)
    calls = tuple((call.name, call.arguments, "" if call.id.startswith("call_") else call.id) for call in whole.calls)
    order = [(kind, part if isinstance(part, str) else part.name) for kind, part in whole.parts]
    return Answer(whole.reasoning, whole.content, calls, tuple(segments.unparsed)), order


def pieces_of(text: str, seed: int, count: int) -> Iterator[list[str]]:
    """The text by character, in two, and cut at random places."""
    yield list(text) or [""]
    chance = random.Random(seed)
    for _ in range(count):
        places = sorted(chance.choices(range(len(text) + 1), k=chance.choice((1, 1, 3, 8))))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def cut(
    regions: Sequence[AnswerRegion], text: str, begun: str = "", tools: Sequence[Mapping[str, Any]] = (), ways: int = 20
) -> Answer:
    """An answer, which must be the same in whatever pieces it arrives."""
    whole, order = ordered(regions, [text], begun, tools)
    for pieces in pieces_of(text, len(text), ways):
        assert ordered(regions, pieces, begun, tools) == (whole, order), pieces
    return whole
