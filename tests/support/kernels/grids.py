"""Grids of parameters: the values of a default run, and the values that a nightly run adds."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameters of nightly runs; a test is nightly if one of its parameters is. A tuple is one set of parameters."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*values, marks=pytest.mark.nightly) for values in sets]
