"""Grammars for places in a picture, as vision models write them: the skills `point`, `detect` and `segment` of Photon.

    client.generate(prompt, constraint={"grammar": spatial.detect(most=10)})
    places = spatial.vocabulary(f"<loc{i:04}>" for i in range(1024))
    client.generate(prompt, constraint={"grammar": spatial.outline(words=places)})

A line is a point (`x y`) or an object (`x y size`); an outline is a point a line. A coordinate is an integer from 0 to
999, in thousandths of the picture's width or height; or a word of a model's own vocabulary of places, and then nothing
stands between them. They show how a constraint walks in cycles.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

LARGEST = 999


@dataclass(frozen=True, slots=True)
class Words:
    """The notation of places: the EBNF of a coordinate, and the text between coordinates and between lines."""

    coordinate: str
    between: str
    lines: str

    def line(self, coordinates: int) -> str:
        """The EBNF of a line with this number of coordinates."""
        return f" {json.dumps(self.between)} ".join(["coordinate"] * coordinates)


NUMBERS = Words('"0" | [1-9] [0-9]{0,2}', " ", "\n")


def vocabulary(words: Iterable[str]) -> Words:
    """Coordinates that are words of the model's own vocabulary. Raises ValueError for an empty list.

    Tokens that the tokenizer calls special are no text, and no constraint allows them.
    """
    choices = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    if not choices:
        raise ValueError("a vocabulary of places needs at least one word")
    return Words(choices, "", "")


def point(words: Words = NUMBERS) -> str:
    """One point."""
    return _grammar("line", words, 2)


def detect(least: int = 0, most: int = 100, words: Words = NUMBERS) -> str:
    """From `least` to `most` objects, each x, y and size. Raises ValueError for bounds that make no sense."""
    _check(least, most)
    empty = '"" | ' if least == 0 else ""
    return _grammar(empty + _lines(least, most, words), words, 3)


def outline(least: int = 3, most: int = 200, words: Words = NUMBERS) -> str:
    """A closed outline of `least` to `most` points. Raises ValueError for bounds that make no sense."""
    _check(least, most)
    return _grammar(_lines(least, most, words), words, 2)


def _lines(least: int, most: int, words: Words) -> str:
    return f"line ({json.dumps(words.lines)} line){{{max(least, 1) - 1},{most - 1}}}"


def _grammar(root: str, words: Words, coordinates: int) -> str:
    return f"root ::= {root}\nline ::= {words.line(coordinates)}\ncoordinate ::= {words.coordinate}\n"


def _check(least: int, most: int) -> None:
    if not 0 <= least <= most or most < 1:
        raise ValueError(
            f"the range {least} to {most} is empty or negative: set 0 <= least <= most, and most to at least 1"
        )
