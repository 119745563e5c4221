"""Request bodies and URL parameters, read strictly: an unknown field is an error that names the field.

A body class declares its fields. Two tables list further fields of other servers:

    ignored       accepted with any value: a known client always sends the field, and it means nothing here
    switched_off  accepted only with a value that switches the feature off: this gateway does not offer it

A declared field with a default may also be null, which means its default.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from rollout_gateway.http.http_errors import HttpError, bad_request
from trainer_bridge.wire.near_names import remedy

_SURROGATE = re.compile("[\ud800-\udfff]")


class Body(BaseModel):
    """The base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    #: Field -> why it means nothing here.
    ignored: ClassVar[Mapping[str, str]] = {}
    #: Field -> the values that switch it off.
    switched_off: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    #: An empty HTTP body is taken for {}.
    may_be_empty: ClassVar[bool] = False

    @classmethod
    def take(cls, fields: Any, within: str = "") -> Self:
        """The body in decoded JSON. `within` goes in front of the names of fields in errors. Raises `HttpError`."""
        if not isinstance(fields, dict):
            raise bad_request(f"send a JSON object{f' as {within[:-1]!r}' if within else ''}", within[:-1] or None)
        kept = {}
        for name, value in fields.items():
            if name in cls.ignored:
                continue
            if name in cls.switched_off:
                if not any(
                    value is off or (type(value) is type(off) and value == off) for off in cls.switched_off[name]
                ):
                    raise bad_request(f"this gateway does not offer {name!r}; remove it", within + name)
            elif value is not None or name not in cls.model_fields:
                kept[name] = value
        try:
            return cls.model_validate(kept)
        except ValidationError as error:
            raise _first_error(error, kept, within, [*cls.model_fields, *cls.ignored]) from None


class Query(Body):
    """The base of all parameters of URLs: of a parameter that comes several times the last value, or a list of all."""

    @classmethod
    def of(cls, request: Request) -> Self:
        """The parameters of a request. Raises `HttpError`."""
        given = request.query_params
        for name in given:
            if name not in cls.model_fields and name not in cls.ignored:
                cure = remedy(name, [*cls.model_fields, *cls.ignored])
                raise bad_request(f"the parameter {name!r:.80} is unknown here; {cure}", name)
        lists = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is list}
        return cls.take({name: given.getlist(name) if name in lists else given[name] for name in given})


def _truth(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError("use true or false")
    return known[text.lower()]


#: A parameter of a URL that is true or false.
Truth = Annotated[bool, BeforeValidator(_truth)]


class EmptyBody(Body):
    """A body without fields."""

    may_be_empty: ClassVar = True


def _first_error(error: ValidationError, fields: dict[str, Any], within: str, known: list[str]) -> HttpError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = first["loc"] if first["type"] == "missing" else _within(fields, first["loc"])
    field = within + ".".join(f"{part!s:.80}" for part in path)
    match first["type"]:
        case "missing":
            return bad_request(f"the field {field!r} is missing; add it", field)
        case "extra_forbidden":
            cure = remedy(str(path[0]), known if len(path) == 1 else (), within)
            return bad_request(f"the field {field!r} is unknown to this gateway; {cure}", field)
        case "value_error":
            return bad_request(f"change {field!r}: {first['msg'].removeprefix('Value error, ')}", field)
    return bad_request(f"change {field!r}: {first['msg']}", field)


def _within(value: Any, path: tuple[int | str, ...]) -> list[int | str]:
    """The parts of a path that are in the value. The other parts name the types that pydantic has tried."""
    found = []
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        found.append(part)
    return found


async def read_bytes(request: Request, most: int, within_s: float) -> bytes:
    """The body of a request. Raises `HttpError` for one that is compressed, too large or too slow."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise HttpError(
            415, f"a body with the encoding {encoding!r:.80} is not read here; send it as it is", "Content-Encoding"
        )
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {within_s:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the client left before its body was complete") from None
    return b"".join(parts)


def decode(data: bytes) -> Any:
    """The JSON value in a body. Raises `HttpError`."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        field = _half_pair(data)
        if field is not None:
            message = "a text has half of a surrogate pair, which is not a character; leave it out, or send U+FFFD"
            raise bad_request(message, field or None) from None
        raise bad_request(f"the body is not JSON: {error!s:.200}") from None


def _half_pair(data: bytes) -> str | None:
    """The field whose text, or name, has half of a surrogate pair, "" for the body itself; None if there is none."""
    try:
        values: list[tuple[str, Any]] = [("", json.loads(data))]
    except (ValueError, RecursionError):
        return None
    while values:
        field, value = values.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            return field.removeprefix(".")
        if isinstance(value, dict):
            values += [(f"{field}.{name}", item) for name, item in value.items()]
            values += [(field, name) for name in value]  # names first: no error quotes one with half a pair
        elif isinstance(value, list):
            values += [(f"{field}.{index}", item) for index, item in enumerate(value)]
    return None


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the body has more than {most} bytes; send less, or raise --max-body-bytes")
