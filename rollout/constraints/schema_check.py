"""What a JSON schema may not ask for, because the compiler would pass over it in silence.

xgrammar (0.2.8) leaves out what it does not enforce, and the completion would then not be what was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

#: Wherever they are.
_NEVER = (
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
)
#: Keywords of one type of value; without a "type" beside them they are not looked at.
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems", "contains", "minContains", "maxContains"),
    "object": ("minProperties", "maxProperties", "propertyNames"),
}
_RULES = tuple(name for names in _OF_TYPE.values() for name in names)
#: Where one of these is, what else is said of the value is not looked at.
_ALONE = ("$ref", "anyOf", "oneOf", "enum", "const")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "contains", "propertyNames")


def refused(text: str) -> str | None:
    """What of this schema would not be kept to, and where; None if nothing is known, or the text is no JSON."""
    try:
        schema = json.loads(text)
        return next(_problems(schema, "#"), None)
    except (ValueError, RecursionError):
        return None  # the compiler says what is wrong with it


def _problems(schema: Any, place: str) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for name in _NEVER:
        if schema.get(name, False) is not False:
            yield f"{name!r} at {place} cannot be enforced; leave it out"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield f"'allOf' of several at {place} cannot be enforced; merge them"
    alone = next((name for name in _ALONE if name in schema), None)
    rules = [name for name in _RULES if name in schema]
    if alone is not None and rules:
        yield f"{rules[0]!r} beside {alone!r} at {place} cannot be enforced; put it inside"
    if alone is None and rules and "type" not in schema:
        yield f"{rules[0]!r} at {place} cannot be enforced without a 'type' beside it; add it"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield f"'multipleOf' at {place} can be enforced for integers only; leave it out"
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        yield f"'pattern' with a length at {place} cannot be enforced; put the length into the pattern"
    named, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list) and not schema.get("additionalProperties"):
        missing = [name for name in required if isinstance(name, str) and name not in named]
        if missing and "patternProperties" not in schema:
            yield f"{missing[0]!r:.80} is required at {place} but is no property; add it to 'properties'"
    for name in _MAPS:
        for key, part in schema[name].items() if isinstance(schema.get(name), dict) else ():
            yield from _problems(part, f"{place}/{name}/{key}")
    for name in _LISTS:
        for i, part in enumerate(schema[name]) if isinstance(schema.get(name), list) else ():
            yield from _problems(part, f"{place}/{name}/{i}")
    for name in _ONE:
        yield from _problems(schema.get(name), f"{place}/{name}")
