"""Reasoning in the text of a completion: which characters are reasoning, and which are the answer.

    <think> reasoning </think> answer

A parser cuts text as it comes. What may be the beginning of a tag waits for the next piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol


def held_back(text: str, *tags: str) -> int:
    """Length of the longest end of a text that may be the beginning of one of the tags."""
    most = min(len(text), max(map(len, tags)) - 1)
    for length in range(most, 0, -1):
        if any(len(tag) > length and tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


class ReasoningStream(Protocol):
    """The cut of one completion."""

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """New text as (reasoning, answer); with `last` nothing waits any more."""


class ReasoningParser(Protocol):
    """A format of reasoning."""

    def stream(self, prompt: str) -> ReasoningStream:
        """The cut of a completion of this rendered prompt, which may have opened the reasoning already."""


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """Reasoning between two tags at the beginning of the completion."""

    start: str = "<think>"
    end: str = "</think>"

    def stream(self, prompt: str) -> ReasoningStream:
        """The cut of one completion."""
        return _TaggedStream(self, inside=prompt.rstrip().endswith(self.start))


class _TaggedStream:
    """`before` the first tag, `inside` the reasoning, or `after` it."""

    def __init__(self, tags: TaggedReasoning, inside: bool) -> None:
        self._tags = tags
        self._place = "inside" if inside else "before"
        self._kept = ""

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """New text as (reasoning, answer)."""
        self._kept += text
        reasoning = ""
        if self._place == "before":
            begun = self._kept.lstrip()
            if begun.startswith(self._tags.start):
                self._place, self._kept = "inside", begun.removeprefix(self._tags.start)
            elif last or not self._tags.start.startswith(begun):
                self._place = "after"
            else:  # too short to tell
                return "", ""
        if self._place == "inside":
            reasoning, tag, rest = self._kept.partition(self._tags.end)
            if tag:
                self._place, self._kept = "after", rest
            else:
                wait = 0 if last else held_back(reasoning, self._tags.end)
                self._kept = reasoning[len(reasoning) - wait :]
                return reasoning[: len(reasoning) - wait], ""
        answer, self._kept = self._kept, ""
        return reasoning, answer


#: The formats by name; None: text is not cut.
REASONING_PARSERS: Mapping[str, ReasoningParser | None] = MappingProxyType({"none": None, "think": TaggedReasoning()})
