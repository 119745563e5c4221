"""JSON text of answers. A `Json` inside a value is JSON text already, and goes into the answer as it is.

Streams have thousands of small events a second, which consist mostly of such text. Half of a surrogate pair becomes
U+FFFD: UTF-8 has no bytes for it.
"""

from functools import lru_cache
from typing import Any

from pydantic_core import PydanticSerializationError, to_json


class Json(str):
    """JSON text."""

    __slots__ = ()


def json_text(value: Any) -> str:
    """The JSON text of dicts, lists, plain values and `Json`. NaN and infinities are null."""
    if value is None:
        return "null"
    kind = type(value)
    if kind is Json:
        return str(value)
    if kind is int:
        return str(value)
    if kind is dict:
        return "{" + ",".join([f"{_name(name)}:{json_text(item)}" for name, item in value.items()]) + "}"
    if kind is list and value and type(value[0]) in (dict, Json):
        return "[" + ",".join(map(json_text, value)) + "]"
    return _encoded(value)


@lru_cache(4096)
def _name(text: str) -> str:
    return _encoded(text)


def _encoded(value: Any) -> str:
    try:
        return to_json(value, inf_nan_mode="null").decode()
    except (PydanticSerializationError, UnicodeEncodeError):
        return to_json(encodable(value), inf_nan_mode="null").decode()


def encodable(value: Any) -> Any:
    """The value with texts that UTF-8 can encode. Raises RecursionError for a value that is nested too deeply."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {encodable(name): encodable(item) for name, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, (list, tuple)) else value
