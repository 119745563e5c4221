"""The `tools` and the `tool_choice` of a chat request, and the constraint of a choice that demands a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from rollout.gateway.http.http_errors import bad_request


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI declares it. Raises ValueError for another value."""
    function = value.get("function")
    if value.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("the function of a tool has a 'name', a text")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError("the 'parameters' of a function are a JSON schema, an object")
    return value


Tool = Annotated[dict[str, Any], AfterValidator(_tool)]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any] | None


def demands_call(choice: ToolChoice) -> bool:
    """Whether the answer must be a call, or several."""
    return choice not in (None, "none", "auto")


def named_tool(choice: ToolChoice) -> str | None:
    """The function that must be called, if the choice names one. Raises `HttpError`."""
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request('send {"type": "function", "function": {"name": ...}}', "tool_choice")
    return name


def call_constraint(choice: ToolChoice, tools: Sequence[dict[str, Any]], several: bool) -> dict[str, Any] | None:
    """The worker's `constraint` of a choice that demands a call; None for another choice. Raises `HttpError`.

    The completion is the arguments of the named function, or a list of calls, with one call unless `several`.
    """
    if not demands_call(choice):
        return None
    if not tools:
        raise bad_request("'tool_choice' needs 'tools'; add them or remove it", "tool_choice")
    declared = [tool["function"] for tool in tools]
    functions = {each["name"]: each.get("parameters") or {"type": "object", "properties": {}} for each in declared}
    if choice != "required":
        name = named_tool(choice)
        if name not in functions:
            raise bad_request("'tool_choice' names a function of 'tools'", "tool_choice")
        return {"json_schema": json.dumps(functions[name])}
    # A reference in a function's schema starts at the root of that schema.
    schemas = {
        f"tool{place}": _moved(schema, f"#/$defs/tool{place}") for place, schema in enumerate(functions.values())
    }
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
        }
        for name, place in zip(functions, schemas, strict=True)
    ]
    most = {} if several else {"maxItems": 1}
    return {
        "json_schema": json.dumps({"type": "array", "minItems": 1, "items": {"anyOf": kinds}, **most, "$defs": schemas})
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself start at a new root."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for name, value in schema.items()
    }
