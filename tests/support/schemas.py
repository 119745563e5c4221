"""Random JSON schemas: values of every kind, nested, and small enough for a random model to complete."""

import random
from typing import Any

_NAMES = ["name", "x", "y", "size", "tags", "über", 'a "b"', "ok"]
_PATTERNS = ["^[a-c]{2,4}$", "^\\d{3}-[A-F]$", "^(yes|no)$", "^a$|^[^a-z]{2}$", "b{1,3}", "^[é-ü]$"]
_LIST = "list"  # of booleans
_FORMATS = ["date", "time", "uuid"]


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of this seed."""
    rng = random.Random(seed)
    schema = _object(rng, 2) if rng.random() < 0.7 else _value(rng, 2)
    return schema | {"$defs": {_LIST: {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_integer, _number, _boolean, _null, _string, _choice, _pattern, _range, _multiple, _format, _types]
    if depth > 0:
        kinds += [_object, _array, _any_of, _tuple, _map, _named]
    return rng.choice(kinds)(rng, depth - 1)


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "number"}


def _range(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-300, 300)
    return {"type": "number", "exclusiveMinimum": low / 100, "maximum": (low + rng.randint(1, 500)) / 100}


def _multiple(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": rng.choice([2, 5, 7])}


def _format(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(_FORMATS)}


def _types(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": rng.sample(["integer", "string", "null", "boolean"], 2), "minimum": 5, "maxLength": 3}


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


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [_value(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.randint(0, len(parts))}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "object", "patternProperties": {"^[xy]{1,2}$": _value(rng, depth)}, "maxProperties": 2}
    names = {"type": "string", "maxLength": 3}
    return {"type": "object", "propertyNames": names, "additionalProperties": _value(rng, depth), "maxProperties": 2}


def _named(rng: random.Random, depth: int) -> dict[str, Any]:
    more = {"next": {"$ref": f"#/$defs/{_LIST}"}}
    return {"anyOf": [{"$ref": f"#/$defs/{_LIST}"}, {"type": "object", "properties": more}]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
