"""Finds JSON schemas that the compiler would not enforce completely.

xgrammar (0.2.8) silently ignores keywords that it does not enforce, and completions could then break the schema.
"""

import json
from collections.abc import Iterator
from typing import Any

from rollout.constraints import regex_check

#: Keywords that are never enforced.
_NEVER = (
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
#: Keywords of one type of value; they are ignored without a "type" in the same schema.
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties", "propertyNames", "patternProperties"),
}
_RULES = tuple(name for names in _OF_TYPE.values() for name in names)
_PARTS = ("properties", "required", "additionalProperties", "items", "prefixItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
#: Next to one of these keywords, all other keywords are ignored.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "propertyNames")
#: Their strings may contain quotes, or, for addresses, numbers with a leading zero.
_BROKEN_FORMATS = ("json-pointer", "relative-json-pointer", "ipv4", "ipv6")
#: Enforced formats; other formats are annotations and are ignored.
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname"),
    *("uri", "uri-reference", "uri-template", "uuid"),
)
_DECIMALS = 6  # decimals of numeric bounds
_MOST_STEP = 1024  # larger ones are ignored
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def schema_problem(text: str) -> str | None:
    """The first part of a schema that would not be enforced, and its path; None if all of it is enforced."""
    try:
        schema = json.loads(text)
        return next(_problems(schema, "#", schema), None)
    except RecursionError:
        return "it is nested too deep to be checked; make it flatter"
    except ValueError as error:  # the compiler may still accept it, for example with text after the end
        return f"it is not JSON: {error}"


def _problems(schema: Any, path: str, root: Any, seen: set[int] | None = None) -> Iterator[str]:
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    for name in _NEVER:
        if schema.get(name, False) is not False:
            yield f"{name!r} at {path} cannot be enforced; leave it out"
    yield from _beside_others(schema, path, root)
    yield from _of_numbers(schema, path)
    yield from _of_strings(schema, path)
    yield from _of_objects(schema, path)
    for name in _MAPS:
        for key, part in schema[name].items() if isinstance(schema.get(name), dict) else ():
            yield from _problems(part, f"{path}/{name}/{key}", root, seen)
    for name in _LISTS:
        for i, part in enumerate(schema[name]) if isinstance(schema.get(name), list) else ():
            yield from _problems(part, f"{path}/{name}/{i}", root, seen)
    for name in _ONE:
        yield from _problems(schema.get(name), f"{path}/{name}", root, seen)
    ref = schema.get("$ref")
    if isinstance(ref, str):  # a reference outside $defs, too: the compiler follows it
        yield from _problems(_followed(ref, root), ref, root, seen)


def _beside_others(schema: dict[str, Any], path: str, root: Any) -> Iterator[str]:
    """Keywords that exclude each other: only one is used."""
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield f"'allOf' of several at {path} cannot be enforced; merge them"
    for name in ("anyOf", "oneOf", "allOf", "type"):
        if schema.get(name) == []:
            yield f"{name!r} at {path} is empty; list what is allowed"
    ref = schema.get("$ref", "#")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        yield f"'$ref' at {path} cannot be followed; refer to a part of the schema, as '#/$defs/...'"
    alone = next((name for name in _ALONE if name in schema), None)
    rules = [name for name in _RULES if name in schema]
    if alone is None:
        if rules and "type" not in schema:
            yield f"{rules[0]!r} at {path} cannot be enforced without a 'type'; add it"
        return
    others = [name for name in (*rules, *_PARTS, *_ALONE) if name in schema and name != alone]
    if others:
        yield f"{others[0]!r} beside {alone!r} at {path} cannot be enforced; put it inside"
    if "type" in schema:
        types, found = _as_types(schema["type"]), _types_of({alone: schema[alone]}, root)
        if found is None or not found <= (types | {"integer"} if "number" in types else types):
            yield f"'type' beside {alone!r} at {path} cannot be enforced; put it inside"


def _as_types(value: Any) -> set[str]:
    names = value if isinstance(value, list) else [value]
    return {name for name in names if isinstance(name, str)}


def _types_of(schema: Any, root: Any, known: dict[int, set[str] | None] | None = None) -> set[str] | None:
    """The types of this schema's values; None if they are not stated, or if it refers to itself."""
    known = {} if known is None else known
    if not isinstance(schema, dict) or id(schema) in known:
        return known.get(id(schema))
    known[id(schema)] = None  # None during the check
    known[id(schema)] = found = _types_named(schema, root, known)
    return found


def _types_named(schema: dict[str, Any], root: Any, known: dict[int, set[str] | None]) -> set[str] | None:
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {"null" if value is None else _TYPES[type(value)] for value in values}
    if isinstance(schema.get("$ref"), str):
        return _types_of(_followed(schema["$ref"], root), root, known)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            parts = [_types_of(part, root, known) for part in schema[name]]
            return None if None in parts else set().union(*(part for part in parts if part is not None))
    return _as_types(schema["type"]) if schema.get("type") else None


def _followed(ref: str, root: Any) -> Any:
    part = root
    for name in ref.split("/")[1:]:  # "~1" is not decoded: the compiler does not know it
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _of_numbers(schema: dict[str, Any], path: str) -> Iterator[str]:
    bounds = {name: schema[name] for name in _BOUNDS if isinstance(schema.get(name), (int, float))}
    step = schema.get("multipleOf", 1)
    whole = isinstance(step, (int, float)) and step % 1 == 0  # false for infinity and NaN
    if "multipleOf" in schema and (schema.get("type") != "integer" or not whole):
        yield f"'multipleOf' at {path} can be enforced for integers only; leave it out"
    elif step > _MOST_STEP:
        yield f"'multipleOf' at {path} can be enforced up to {_MOST_STEP} only; leave it out"
    if "multipleOf" in schema and bounds:
        yield f"'multipleOf' at {path} cannot be enforced with bounds; leave one out"
    for name, bound in bounds.items():
        if round(bound, _DECIMALS) != bound:
            yield f"{name!r} at {path} can be enforced to {_DECIMALS} decimals only; round it"


def _of_strings(schema: dict[str, Any], path: str) -> Iterator[str]:
    lengths, form = "minLength" in schema or "maxLength" in schema, schema.get("format")
    if "pattern" in schema and lengths:
        yield f"'pattern' with a length at {path} cannot be enforced; put the length into the pattern"
    if form in _BROKEN_FORMATS:
        yield f"the format {form!r} at {path} cannot be enforced; leave it out, or write it as a 'pattern'"
    if form in _FORMATS and (lengths or "pattern" in schema):
        yield f"the format {form!r} with a pattern or a length at {path} cannot be enforced; leave one of them out"
    patterns = schema["patternProperties"] if isinstance(schema.get("patternProperties"), dict) else ()
    for pattern in (schema.get("pattern"), *patterns):
        if not isinstance(pattern, str):
            if pattern is not None:
                yield f"the pattern at {path} is not a string; write a string"
            continue
        problem = regex_check.regex_problem(pattern, in_json=True)
        if problem is not None:
            yield f"the pattern {pattern!r:.80} at {path} cannot be enforced: {problem}"


def _of_objects(schema: dict[str, Any], path: str) -> Iterator[str]:
    named, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return
    missing = [name for name in required if isinstance(name, str) and name not in named]
    if missing:
        yield f"{missing[0]!r:.80} is required at {path} but not defined; add it to 'properties'"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and (named or len(patterns) > 1):
        yield f"'patternProperties' at {path} cannot be enforced with other properties; leave one of them out"
    if "propertyNames" in schema and (named or patterns):
        yield f"'propertyNames' at {path} cannot be enforced with properties; leave one of them out"
    # Names that the schema does not state may come twice.
    free = bool(schema.get("additionalProperties") not in (None, False) or patterns or "propertyNames" in schema)
    least = schema.get("minProperties", 0)
    for name in ("minProperties", "maxProperties"):
        if isinstance(schema.get(name), (int, float)) and schema[name] > regex_check.MOST_REPETITIONS:
            yield f"{name!r} at {path} can be enforced up to {regex_check.MOST_REPETITIONS} only; leave it out"
    if free and isinstance(least, int) and least > max(1, len(required)):
        yield f"'minProperties' at {path} cannot be enforced for unstated names; list the names in 'properties'"
