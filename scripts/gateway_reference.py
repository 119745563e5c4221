"""The reference page of the gateway's endpoints, made from the table `ENDPOINTS` and the classes of the bodies."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from pydantic.fields import FieldInfo

from rollout.gateway.dialects import process_group_bodies as group_bodies
from rollout.gateway.dialects import vllm_admin, vllm_generate
from rollout.gateway.dialects.sglang_generate import SglangParams
from rollout.gateway.endpoints import ENDPOINTS, Endpoint
from rollout.gateway.http.bodies import Body, EmptyBody
from rollout.gateway.prompts import sampling

_INTRODUCTION = """\
# Endpoints of the gateway

How to use them: [gateway](../gateway.md). In parentheses: the server or trainer whose clients use the endpoint. A link
leads to the fields of the body, or of the URL for a GET, a pause, sleep, wake or session. An endpoint without a link
ignores both.

Below, each field has its default after `=`, or "required"; any other field is `null` by default. `null` always means
the default. A token id or count is at most 2147483647. A field that is not listed is an error (400) that names it.
**Off only** lists fields of features that are not served: they may be `null`, or the value that is given."""

#: Bodies inside other bodies: the class, and the fields that hold it.
_INNER: Mapping[type[Body], str] = {
    sampling.StructuredOutputs: "`structured_outputs`",
    sampling.ResponseFormat: "`response_format`",
    sampling.JsonSchema: "`json_schema` of `response_format`",
    sampling.StreamOptions: "`stream_options`",
    vllm_generate.GenerateParams: "`sampling_params` of `/inference/v1/generate` and `/skyrl/v1/generate`",
    vllm_generate.MediaBody: "An item of `media`",
    SglangParams: "`sampling_params` of `/generate`",
    group_bodies.InitInfo: "`init_info`",
    group_bodies.UpdateInfo: "`update_info`",
    vllm_admin.UpdateInfoBody: "`kwargs` of `/collective_rpc` with `update_weights_nccl`",
}
#: The bound of token ids and counts, which the introduction states.
_MOST = sampling.MAX_TOKEN_ID
_SHARED: Mapping[type[Body], str] = {
    sampling.SamplingBody: "Sampling fields",
    sampling.OpenAiBody: "OpenAI's fields",
}


def endpoints_page() -> str:
    """The text of the page."""
    lines = [_INTRODUCTION, ""]
    for sentence, endpoints in groupby(ENDPOINTS, lambda each: _sentence(each.handler)):
        lines.append(f"- {', '.join(map(_shown, endpoints))}: {sentence}")
    for body, title in _titles().items():
        lines += ["", f"## {title}", "", *_body(body)]
    return "\n".join(lines) + "\n"


def _titles() -> dict[type[Body], str]:
    """All classes of bodies that have fields, and their titles: those of endpoints, shared ones, inner ones."""
    taken: dict[type[Body], list[str]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.takes not in (None, EmptyBody):
            taken.setdefault(endpoint.takes, []).extend(f"`{path}`" for path in endpoint.paths)
    return {body: ", ".join(paths) for body, paths in taken.items()} | dict(_SHARED) | dict(_INNER)


def _shown(endpoint: Endpoint) -> str:
    """An endpoint with its aliases, linked to the fields that it takes, and its dialect."""
    paths = ", ".join(f"`{path.replace(':path', '')}`" for path in endpoint.paths)
    known = paths if endpoint.takes in (None, EmptyBody) else _to(endpoint.takes, paths)
    return f"{'/'.join(endpoint.methods)} {known} ({endpoint.dialect})"


def _sentence(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _to(body: type[Body], text: str) -> str:
    title = _titles()[body]
    return f"[{text}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})"


def _body(body: type[Body]) -> Iterator[str]:
    """The fields that a class adds to those of its bases."""
    bases = [base for base in body.__mro__[1:] if issubclass(base, Body) and base in _titles()]
    schema = body.model_json_schema()["properties"] if body.model_fields else {}
    own = [
        (_defaulted(field.alias or name, field), _of_field(schema[field.alias or name], field))
        for name, field in body.model_fields.items()
        if not any(name in base.model_fields for base in bases)
    ]
    for values, alike in groupby(own, lambda each: each[1]):
        yield f"- {', '.join(shown for shown, _ in alike)}{values}"
    if bases:
        yield f"- also: {_to(bases[0], _titles()[bases[0]])}"
    ignored = _added(body.ignored, [base.ignored for base in bases])
    if ignored:
        why: dict[str, list[str]] = {}
        for name, reason in ignored.items():
            why.setdefault(reason, []).append(f"`{name}`")
        reasons = (f"{', '.join(names)} ({reason})" for reason, names in why.items())
        yield f"- **Ignored**: {'; '.join(reasons)}"
    off = _added(body.switched_off, [base.switched_off for base in bases])
    if off:
        yield f"- **Off only**: {', '.join(f'`{name}`{_off_values(values)}' for name, values in off.items())}"


def _defaulted(name: str, field: FieldInfo) -> str:
    if field.is_required() or field.default is None:
        return f"`{name}`"
    default = {} if isinstance(field.default, Body) else field.default
    return f"`{name}` = `{json.dumps(default)}`"


def _of_field(schema: Mapping[str, Any], field: FieldInfo) -> str:
    """The values of a field; none for a boolean, whose default says the same."""
    if isinstance(field.default, bool):
        return ""
    return f": {_values(schema)}{', required' if field.is_required() else ''}"


def _off_values(values: tuple[Any, ...]) -> str:
    """The values except null that switch a feature off, each number once."""
    others = dict.fromkeys(value for value in map(json.dumps, values) if value not in ("null", "1.0"))
    return f" ({', '.join(f'`{value}`' for value in others)})" if others else ""


def _added(named: Mapping[str, Any], earlier: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if not any(name in each for each in earlier)}


def _values(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_values(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind: str = schema.get("type", "object" if "$ref" in schema else "any value")
    if kind == "array":
        return f"list of {_values(schema['items'])}" if schema.get("items") else "list"
    least = schema.get("minimum", schema.get("minLength", schema.get("exclusiveMinimum")))
    most = schema.get("maximum", schema.get("maxLength", schema.get("exclusiveMaximum", _MOST + 1) - 1))
    unit = " characters" if kind == "string" else ""
    if most == _MOST:
        above = ">" if "exclusiveMinimum" in schema else ">="
        return kind if least in (None, -_MOST) else f"{kind} {above} {least}{unit}"
    return f"{kind}, {least} to {most}{unit}"
