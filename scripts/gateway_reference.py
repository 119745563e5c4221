"""The reference page of the gateway's endpoints, made from the table `ENDPOINTS` and the classes of the bodies."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from rollout_gateway.dialects import sglang, trainers, vllm
from rollout_gateway.dialects.tinker import request_bodies as tinker_bodies
from rollout_gateway.dialects.weights import from_folder, through_group, vllm_engine, worker_extension
from rollout_gateway.endpoints import ENDPOINTS
from rollout_gateway.http.bodies import Body, EmptyBody
from rollout_gateway.prompts import sampling
from rollout_gateway.requests.http_request import Endpoint
from scripts.tables import table

_INTRODUCTION = """\
# Endpoints of the gateway

For users of the [gateway](../gateway.md): the paths (POST, unless a method stands there) of each server or trainer, and
their fields. A GET, a pause, a sleep, a wake and a session take their fields from the URL, all others from the body.

Fields mean what they mean there, with their defaults and narrower ranges here. **Ignored** fields change nothing. Any
other field is an error (400) that names it, unless its value switches a feature off. Fields that only packages send are
not listed."""

#: Modules of bodies that packages write, never users: the page lists the fields of a folder alone.
_OF_PACKAGES = {
    module.__name__ for module in (tinker_bodies, trainers, from_folder, through_group, vllm_engine, worker_extension)
}

#: Bodies with more lines than this have a section of their own.
_MOST_LINES = 3

#: Bodies inside other bodies: the class, and the fields that hold it.
_INNER: Mapping[type[Body], str] = {
    sampling.StructuredOutputs: "`structured_outputs`",
    sampling.ResponseFormat: "`response_format`",
    sampling.JsonSchema: "`json_schema` of `response_format`",
    sampling.StreamOptions: "`stream_options`",
    vllm.GenerateParams: "`sampling_params` of `/inference/v1/generate` and `/skyrl/v1/generate`",
    vllm.MediaBody: "An item of `media`",
    sglang.SglangParams: "`sampling_params` of `/generate`",
}
#: The bound of token ids and counts, which the introduction states; no line states it, or a larger one.
_MOST = sampling.MAX_TOKEN_ID
_SHARED: Mapping[type[Body], str] = {
    sampling.SamplerFields: "Common sampling fields",
    sampling.SamplingBody: "Sampling fields",
    sampling.RequestFields: "Common request fields",
    sampling.OpenAiBody: "OpenAI's fields",
}


def endpoints_page() -> str:
    """The text of the page."""
    lines = [_INTRODUCTION, ""]
    of_tinker = [each for each in ENDPOINTS if each.clients == "Tinker"]
    others = (each for each in ENDPOINTS if each.clients != "Tinker")
    alike: dict[tuple[str, type[Body] | None], list[Endpoint]] = {}
    for each in others:
        alike.setdefault((_sentence(each.handler), _beside(each.takes)), []).append(each)
    rows = []
    for (sentence, body), endpoints in alike.items():
        fields = "" if body is None else f" {'; '.join(_body(body))}."
        clients = dict.fromkeys(each.clients for each in endpoints)
        rows.append((", ".join(map(_path, endpoints)), ", ".join(clients), f"{sentence}{fields}"))
    rows.append(("`/api/v1`", "Tinker", f"{len(of_tinker)} paths: [Tinker](../integrations/http.md#tinker)."))
    lines += table(("path", "server or trainer", "what it does; fields"), rows)
    for body, title in _titles().items():
        if _beside(body) is None:
            lines += ["", f"## {title}", "", *(f"- {line}" for line in _body(body))]
    return "\n".join(lines) + "\n"


def _beside(body: type[Body] | None) -> type[Body] | None:
    """The body whose few fields stand beside its endpoints; None: it has none, or a section."""
    if body not in _titles() or body in _SHARED or body in _INNER:
        return None
    return None if len([*_body(body)]) > _MOST_LINES else body


def _titles() -> dict[type[Body], str]:
    """The titles of all classes of bodies with fields: bodies of endpoints, shared bodies, inner bodies."""
    taken: dict[type[Body], list[str]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.takes in (None, EmptyBody):
            continue
        if issubclass(endpoint.takes, from_folder.FolderBody) or endpoint.takes.__module__ not in _OF_PACKAGES:
            taken.setdefault(endpoint.takes, []).extend(f"`{path}`" for path in endpoint.paths)
    return {body: ", ".join(paths) for body, paths in taken.items()} | dict(_SHARED) | dict(_INNER)


def _path(endpoint: Endpoint) -> str:
    """The method of an endpoint, and its paths, linked to the section with its fields, if any."""
    paths = ", ".join(f"`{path.replace(':path', '')}`" for path in endpoint.paths)
    body = endpoint.takes
    linked = body is not None and body in _titles() and _beside(body) is None
    known = _to(body, paths) if body is not None and linked else paths
    methods = "/".join(endpoint.methods)
    return f"{'' if methods == 'POST' else f'{methods} '}{known}"


def _sentence(thing: Any) -> str:
    """The first paragraph of a handler's docstring, without the verb that most have."""
    text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()).removeprefix("Return ")
    return text[:1].upper() + text[1:]


def _to(body: type[Body], text: str) -> str:
    """The text, as a link if the body has a section."""
    if _beside(body) is not None:
        return text
    title = _titles()[body]
    return f"[{text}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})"


def _body(body: type[Body]) -> Iterator[str]:
    """The fields that a class adds to its bases."""
    bases: list[type[Body]] = []
    for base in body.__mro__[1:]:
        if base in _titles() and issubclass(base, Body) and not any(issubclass(each, base) for each in bases):
            bases.append(base)
    schema = body.model_json_schema()["properties"] if body.model_fields else {}
    own = {
        field.alias or name: (_defaulted(field.alias or name, field), _of_field(schema[field.alias or name], field))
        for name, field in body.model_fields.items()
        if not any(name in base.model_fields for base in bases)
    }
    kinds: dict[str, list[str]] = {}
    for shown, values in own.values():
        kinds.setdefault(values, []).append(shown)
    yield from (f"{', '.join(names)}{values}" for values, names in kinds.items())
    if bases:
        yield f"also: {', '.join(_to(base, _titles()[base]) for base in bases)}"
    ignored = _added(body.ignored, [base.ignored for base in bases])
    if ignored:
        yield f"**Ignored**: {', '.join(f'`{name}`' for name in ignored)}"


def _defaulted(name: str, field: FieldInfo) -> str:
    if field.is_required() or field.default is None:
        return f"`{name}`"
    default = {} if isinstance(field.default, Body) else field.default
    return f"`{name}={json.dumps(default)}`"


def _of_field(schema: Mapping[str, Any], field: FieldInfo) -> str:
    """The values of a field, if they are less than all of its type."""
    values = allowed_values(schema)
    narrow = [values] if re.search(r"\d|`", values) else []
    told = [*narrow, *(["required"] if field.is_required() else [])]
    return f" ({', '.join(told)})" if told else ""


def _added(named: Mapping[str, Any], earlier: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if not any(name in each for each in earlier)}


def _several(schema: Mapping[str, Any]) -> str:
    """The values of a list's items, in words."""
    if schema.get("type") == "array":
        return f"lists of {_several(schema['items'])}"
    if "anyOf" in schema:
        return " or ".join(map(_several, schema["anyOf"]))
    word, one = schema.get("type", "object"), allowed_values(schema)
    return one.replace(word, f"{word}s", 1) if word in one else f"{one}s" if one.isalpha() else f"{word}s of {one}"


def allowed_values(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(allowed_values(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind: str = schema.get("type", "object" if "$ref" in schema else "any value")
    if kind == "array":
        return _several(schema["items"]) if schema.get("items") else "list"
    if kind not in ("integer", "number"):
        return kind
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum", _MOST + 1) - 1)
    if most < _MOST:
        return f"{least} to {most}"
    if least is None or least <= -_MOST:
        return kind
    above = ">" if "exclusiveMinimum" in schema else ">="
    return "count" if (kind, least, above) == ("integer", 0, ">=") else f"{kind} {above} {least}"
