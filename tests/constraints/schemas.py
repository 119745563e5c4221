"""JSON schemas made at random: values of every kind, nested, and so small that a model without sense gets through."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ["name", "x", "y", "size", "tags", "über", 'a "b"', "ok"]
_PATTERNS = ["^[a-c]{2,4}$", "^\\d{3}-[A-F]$", "^(yes|no)$"]


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of this seed."""
    rng = random.Random(seed)
    return _object(rng, 2) if rng.random() < 0.7 else _value(rng, 2)


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_integer, _number, _boolean, _null, _string, _choice, _pattern]
    if depth > 0:
        kinds += [_object, _array, _any_of]
    return rng.choice(kinds)(rng, depth - 1)


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "number"}


def _boolean(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "null"}


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}


def _choice(rng: random.Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice([7, "seven", None, True])}
    return {"enum": rng.sample(["red", "green", 1, 2.5, None, False, "é👍", 'q"'], rng.randint(1, 4))}


def _pattern(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(1, 3))]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
