"""A repr that fits on a line: arrays by their type and shape, long texts by their beginning."""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import numpy as np

_CHARACTERS = 60


def short_fields(value: Any, apart: Collection[str] = (), **first: Any) -> str:
    """`first`, then the fields of a dataclass as `name=value`, except the ones in `apart` and empty ones."""
    given = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in apart}
    shown = first | {name: field for name, field in given.items() if not _is_empty(field)}
    return ", ".join(f"{name}={_short(field)}" for name, field in shown.items())


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict) and all(isinstance(each, float) for each in value.values()):
        return "{" + ", ".join(f"{key!r}: {each:.3g}" for key, each in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
