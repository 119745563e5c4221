"""Grids of parameters: the values of a default run, and the values that a nightly run adds."""

from __future__ import annotations

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
