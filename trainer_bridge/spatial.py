"""Grammars for places in a picture, as vision models write them: the skills `point`, `detect` and `segment` of Photon.

    client.generate(prompt, constraint={"grammar": spatial.detect(most=10)})

A coordinate is an integer from 0 to 999, in thousandths of the picture's width or height. A line is a point (`x y`) or
an object (`x y size`); an outline is a point a line. They show how a constraint walks in cycles, and serve as a start
for a model's own vocabulary of places.
"""

from __future__ import annotations

LARGEST = 999
_NUMBER = 'number ::= "0" | [1-9] [0-9]{0,2}\n'
_POINT = 'point ::= number " " number\n' + _NUMBER


def point() -> str:
    """One point."""
    return "root ::= point\n" + _POINT


def detect(least: int = 0, most: int = 100) -> str:
    """From `least` to `most` objects, each x, y and size. Raises ValueError for bounds that make no sense."""
    _check(least, most)
    empty = '"" | ' if least == 0 else ""
    more = f'("\\n" object){{{max(least, 1) - 1},{most - 1}}}'
    return f'root ::= {empty}object {more}\nobject ::= number " " number " " number\n' + _NUMBER


def outline(least: int = 3, most: int = 200) -> str:
    """A closed outline of `least` to `most` points. Raises ValueError for bounds that make no sense."""
    _check(least, most)
    return f'root ::= point ("\\n" point){{{max(least, 1) - 1},{most - 1}}}\n' + _POINT


def _check(least: int, most: int) -> None:
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"from {least} to {most} makes no sense: set 0 <= least <= most, and most to at least 1")
