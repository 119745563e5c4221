"""What n-grams of a text expect, by a loop."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_kernels.step.ngrams import MOST_EQUAL


def followed(text: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after the newest of the places that most equal tokens are before; else the last token."""
    best, found = 0, None
    for place in range(1, len(text)):
        equal = 0
        while equal < min(MOST_EQUAL, place) and text[place - 1 - equal] == text[-1 - equal]:
            equal += 1
        if equal and equal >= best:
            best, found = equal, place
    if found is None:
        return [text[-1]] * count
    path = list(text[found:])
    return (path * count)[:count]
