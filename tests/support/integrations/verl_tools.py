"""A tool for verl's agent loop: verl loads this file by its path."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: A number.
        b: Another one.
    """
    return str(a + b)
