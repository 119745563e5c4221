"""Rules for the values of a config.json. Their bounds are several times the values of the largest models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Most layers of a model.
MOST_LAYERS = 2048
#: Most frequencies of a rotary embedding.
MOST_FACTORS = 4096
_MAX_NUMBER = 1e12


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that a key may have, other than null."""

    wanted: str  # ends the sentence "it must be ..."
    allows: Callable[[Any], bool]


def integer(least: int, most: int) -> Rule:
    """A whole number within bounds."""
    return Rule(f"an integer from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def layer_list(kind: type) -> Rule:
    """A list with an entry of this type for each layer, or with the numbers of some layers."""

    def allows(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= MOST_LAYERS and all(type(item) is kind for item in value)

    return Rule(f"a list of at most {MOST_LAYERS}, one entry a layer", allows)


TEXT = Rule("a string", lambda value: type(value) is str)
FLAG = Rule("true or false", lambda value: type(value) is bool)
#: False for NaN, too.
NUMBER = Rule(
    f"a number above 0 and up to {_MAX_NUMBER:g}",
    lambda value: type(value) in (int, float) and 0 < value <= _MAX_NUMBER,
)
#: 0 and null: none.
LIMITS = Rule(
    f"a list of at most {MOST_LAYERS} numbers of at least 0, one a layer",
    lambda value: (
        isinstance(value, list)
        and len(value) <= MOST_LAYERS
        and all(item is None or item == 0 or NUMBER.allows(item) for item in value)
    ),
)
BELOW_0 = Rule(
    f"a number below 0 and down to {-_MAX_NUMBER:g}",
    lambda value: type(value) in (int, float) and NUMBER.allows(-value),
)
#: Such as the factors of frequencies.
NUMBERS = Rule(
    f"a list of at most {MOST_FACTORS} numbers above 0",
    lambda value: isinstance(value, list) and len(value) <= MOST_FACTORS and all(map(NUMBER.allows, value)),
)
