"""Fields of requests that are declared once: fields of a dataclass, with their meanings and bounds as metadata."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The declaration of one field. The bounds are of a number, a text's characters, or the token ids in a row."""

    name: str
    default: Any  # where a request does not have the field
    meaning: str  # description in help texts and on the protocol's page
    least: float | None = None
    most: float | None = None
    above_least: bool = False  # `least` itself is out of range
    check: Callable[[Any], None] | None = None  # checks beyond the range; raises ValueError that says what to send


D = TypeVar("D", bound=Declared)


def declared(default: Any, meaning: str, **more: Any) -> Any:
    """A field of a table. The arguments are fields of its kind of `Declared`."""
    return field(default=default, metadata={"meaning": meaning, **more})


def entries_of(table: type, kind: type[D]) -> tuple[D, ...]:
    """The declarations of a class, in their order."""
    found = (entry for entry in fields(table) if "meaning" in entry.metadata)
    return tuple(kind(name=entry.name, default=entry.default, **entry.metadata) for entry in found)
