"""Grids of parameters: the values of a default run, and the values that a nightly run adds."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameters of nightly runs; a test is nightly if one of its parameters is. A tuple is one set of parameters."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*values, marks=pytest.mark.nightly) for values in sets]


def checkered(ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs, as on a chessboard: the white ones run by default, with each value of both; the black ones nightly."""
    pairs = [(one, other, (i + j) % 2) for i, one in enumerate(ones) for j, other in enumerate(others)]
    return [(one, other) for one, other, black in pairs if not black] + nightly(
        *((one, other) for one, other, black in pairs if black)
    )


def squared(ones: Sequence[Any], others: Sequence[Any], thirds: Sequence[Any]) -> list[Any]:
    """All triples: by default each pair of the first two with one of the thirds, a Latin square; the rest nightly."""
    chosen, left = [], []
    for (i, one), (j, other), (k, third) in itertools.product(*map(enumerate, (ones, others, thirds))):
        (chosen if (i + j) % len(thirds) == k else left).append((one, other, third))
    return chosen + nightly(*left)
