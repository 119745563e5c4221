"""The reference page of the gateway's endpoints, made from the table `ENDPOINTS` and the classes of the bodies."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollout.gateway.dialects import process_group_bodies as group_bodies
from rollout.gateway.dialects import vllm_admin, vllm_generate
from rollout.gateway.dialects.sglang_generate import SglangParams
from rollout.gateway.endpoints import ENDPOINTS, Endpoint
from rollout.gateway.http.bodies import Body, EmptyBody, Query
from rollout.gateway.prompts import sampling

_INTRODUCTION = """\
# Endpoints of the gateway

Every endpoint of the [gateway](../gateway.md), and the fields that it takes. The dialect is the server or the trainer
whose clients use the endpoint. An endpoint without a link ignores its body and its URL's parameters.

A field that is not listed is an error (400), and the error names the field. A field that is `null` has its default."""

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
_SHARED: Mapping[type[Body], str] = {
    sampling.SamplingBody: "Sampling fields",
    sampling.OpenAiBody: "OpenAI's fields",
}


def endpoints_page() -> str:
    """The text of the page."""
    rows = [(_names(each), each.dialect, _sentence(each.handler), _link(each.takes)) for each in ENDPOINTS]
    lines = [_INTRODUCTION, "", *_table(("endpoint", "dialect", "what it does", "takes"), rows)]
    for body, title in _titles().items():
        lines += ["", f"## {title}", *_body(body)]
    return "\n".join(lines) + "\n"


def _titles() -> dict[type[Body], str]:
    """All classes of bodies that have fields, and their titles: those of endpoints, shared ones, inner ones."""
    taken: dict[type[Body], list[str]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.takes not in (None, EmptyBody):
            taken.setdefault(endpoint.takes, []).extend(f"`{path}`" for path in endpoint.paths)
    return {body: ", ".join(paths) for body, paths in taken.items()} | dict(_SHARED) | dict(_INNER)


def _names(endpoint: Endpoint) -> str:
    return f"{' and '.join(endpoint.methods)} {', '.join(f'`{path}`' for path in endpoint.paths)}"


def _sentence(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _link(takes: type[Body] | None) -> str:
    if takes is None:
        return ""
    if takes is EmptyBody:
        return "a body without fields"
    kind = "parameters" if issubclass(takes, Query) else "body, may be empty" if takes.may_be_empty else "body"
    return _to(takes, kind)


def _to(body: type[Body], text: str) -> str:
    title = _titles()[body]
    return f"[{text}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})"


def _body(body: type[Body]) -> Iterator[str]:
    """The fields that a class adds to those of its bases."""
    bases = [base for base in body.__mro__[1:] if issubclass(base, Body) and base in _titles()]
    schema = body.model_json_schema()["properties"] if body.model_fields else {}
    rows = []
    for name, field in body.model_fields.items():
        if not any(name in base.model_fields for base in bases):
            shown = field.alias or name
            default = "required" if field.is_required() else f"`{json.dumps(_plain(field.default))}`"
            rows.append((f"`{shown}`", _values(schema[shown]), default))
    if rows:
        yield from ("", *_table(("field", "values", "default"), rows))
    if bases:
        yield from ("", f"Also the fields of {_to(bases[0], _titles()[bases[0]])}.")
    ignored = _added(body.ignored, [base.ignored for base in bases])
    if ignored:
        yield from ("", f"Ignored: {'; '.join(f'`{name}` ({why})' for name, why in ignored.items())}.")
    off = _added(body.switched_off, [base.switched_off for base in bases])
    if off:
        names = (f"`{name}` ({_literals(values)})" for name, values in off.items())
        yield from ("", f"Accepted only with a value that switches the feature off: {', '.join(names)}.")


def _added(named: Mapping[str, Any], earlier: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if not any(name in each for each in earlier)}


def _plain(default: Any) -> Any:
    return default.model_dump() if isinstance(default, Body) else default


def _literals(values: Iterable[Any]) -> str:
    return " or ".join(f"`{json.dumps(value)}`" for value in values)


def _values(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_values(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return _literals(schema.get("enum", [schema.get("const")]))
    kind: str = schema.get("type", "object" if "$ref" in schema else "any value")
    if kind == "array":
        return f"list of {_values(schema['items'])}" if schema.get("items") else "list"
    least = schema.get("minimum", schema.get("minLength"))
    most = schema.get("maximum", schema.get("maxLength", schema.get("exclusiveMaximum", 0) - 1))
    unit = " characters" if kind == "string" else ""
    if most >= 0:
        return f"{kind} ({least or 0} to {most}{unit})"
    if least is not None:
        return f"{kind} (at least {least}{unit})"
    return f"{kind} (more than {schema['exclusiveMinimum']})" if "exclusiveMinimum" in schema else kind


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (list(heads), ["---"] * len(heads), *cells)]
