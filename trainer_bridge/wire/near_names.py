"""The name that was probably meant, for errors about unknown ones."""

import difflib
from collections.abc import Iterable

#: A name comes from a caller and may be long; comparing takes the product of the lengths.
_MOST_CHARS = 200


def near_name(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known name that is most like `name`; empty if none reaches the likeness, from 0 to 1."""
    near = difflib.get_close_matches(name[:_MOST_CHARS], known, n=1, cutoff=likeness)
    return near[0] if near else ""


def remedy(name: str, known: Iterable[str], within: str = "") -> str:
    """Advice on an unknown field: use the field that was meant, or remove it. `within`: the path to its map."""
    near = near_name(name, known, 0.75)
    return f"did you mean {within + near!r}?" if near else "remove it"
