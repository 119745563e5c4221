"""The parts of the protocol's reference page that follow from the code: messages, their fields, the fields of replies.

The page has a mark for each part, `<!-- NAME -->`, and `<!-- end -->` after it; the text between is made here. The
meaning of a field is the comment beside it, or the `#:` comment above it, in the class that declares it.
"""

import ast
import inspect
import io
import json
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, get_args

from pydantic.fields import FieldInfo

from rollout.engine.messages.statuses import AdapterStatus, EngineStatus, RankStatus, SequenceStatus, SleepStatus
from rollout.service.capabilities import ServedModel
from rollout.service.delivery.replies import sequence_fields, status_reply
from rollout.service.requests.schema import OPS, GenerateMessage, RequestHeader
from scripts.gateway_reference import allowed_values
from scripts.tables import table
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.request_fields import ENGINE_FIELDS
from trainer_bridge.wire.sampling_rules import RULES, SamplingRule

_SEQUENCE = SequenceStatus(("", "#"), 0, "decode", 0, 0, 0, 0, 0.0, None, 0)


def with_generated_parts(page: str) -> str:
    """The text of the page with its parts made anew. Raises ValueError if a mark is missing."""
    for name, part in _PARTS.items():
        mark, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        before, _, rest = page.partition(mark)
        if end not in rest:
            raise ValueError(f"protocol.md needs a part '{mark.strip()}' with its '{end.strip()}'")
        page = before + mark + "".join(f"{line}\n" for line in part()) + end + rest.partition(end)[2]
    return page


def _ops() -> Iterator[str]:
    """A row for each op: its fields with their defaults, and what its message does."""
    yield from table(("op", "meaning; reply"), _op_rows())


def _op_rows() -> Iterator[tuple[str, str]]:
    for op, message in OPS.items():
        taken = ", ".join(_argument(*each) for each in _own_fields(message)) if op != "generate" else "..."
        yield f"`{op}({taken})`", _sentence(message)


def _own_fields(message: type[RequestHeader]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields that not every request has."""
    return (each for each in message.model_fields.items() if each[0] not in RequestHeader.model_fields)


def _argument(name: str, field: FieldInfo) -> str:
    """A field as a parameter: its default, or its choices with the default first."""
    if field.is_required():
        return name
    default = field.get_default(call_default_factory=True)
    if (choices := get_args(field.annotation)) and isinstance(default, str):
        return f"{name}={'|'.join(choices)}"
    return f"{name}={'nil' if default is None else json.dumps(default)}"


def _generate() -> Iterator[str]:
    """A row for each field of `generate`; neighbours with one meaning share a row."""
    yield from table(("field", "meaning"), _generate_rows())


def _generate_rows() -> Iterator[tuple[str, str]]:
    meanings = _comments(GenerateMessage) | {entry.name: entry.meaning for entry in ENGINE_FIELDS}
    fields, schema = dict(_own_fields(GenerateMessage)), GenerateMessage.model_json_schema()["properties"]
    ordered = ((name, fields[name]) for name in meanings if name in fields)
    for meaning, same in groupby(ordered, lambda each: meanings[each[0]]):
        shown = ", ".join(_with_default(name, field, schema[name]) for name, field in same)
        if not meaning:
            raise ValueError(f"{shown} of GenerateMessage needs a comment with its meaning")
        yield shown, meaning


def _with_default(name: str, field: FieldInfo, schema: Mapping[str, Any]) -> str:
    default = field.get_default(call_default_factory=True)
    shown = f"={json.dumps(default)}" if isinstance(default, (bool, int, float, str)) else ""
    values = allowed_values(schema)
    bounds = f" ({values})" if " to " in values else ""
    return f"`{name}{shown}`{bounds}"


def _rules() -> Iterator[str]:
    return iter(table(("rule", "meaning"), map(_rule, RULES)))


def _rule(rule: SamplingRule) -> tuple[str, str]:
    kind = "integer, " if rule.kind is int else ""
    least = f"above {rule.least}" if rule.above_least else rule.least
    return f"`{rule.name}={rule.default}` ({kind}{least} to {rule.most})", rule.meaning


def _completion() -> Iterator[str]:
    """A row for each field of a completion."""
    return iter(
        table(("field", "meaning"), ((f"`{name}`", meaning) for name, meaning in _comments(Completion).items()))
    )


def _status() -> Iterator[str]:
    """The fields of a reply to `status`; those without a comment share the first line."""
    reply = status_reply(
        "",
        EngineStatus(),
        ServedModel(name="", dtype="", vocab_size=0, eos_ids=(), max_context_tokens=0),
        results={"stored": 0, "bytes": 0},
        max_message_bytes=0,
        worker="",
        metrics_url=None,
        capabilities=[],
        weights_endpoint=None,
        weights=None,
    )
    parts = {field.name: type(field.default) for field in fields(EngineStatus) if is_dataclass(field.default)}
    parts |= {"sleep": SleepStatus, "adapters": AdapterStatus, "ranks": RankStatus}
    meanings = _comments(EngineStatus)
    lines = {name: meanings.get(name, "") for name in reply if name not in ("v", "op", "id", "weights")}
    lines |= {name: f"{_sentence(part)[:-1]}: {_joined(_comments(part))}" for name, part in parts.items()}
    lines |= {name: _joined(dict.fromkeys(reply[name], "")) for name in ("rows", "queue", "pages", "slots", "results")}
    sequence = _comments(SequenceStatus)
    key = dict.fromkeys(name for name in sequence_fields(_SEQUENCE) if name not in sequence)  # what replaces `key`
    lines["sequences"] = _joined(key | {name: meaning for name, meaning in sequence.items() if name != "key"})
    yield f"Also: {', '.join(f'`{name}`' for name, line in lines.items() if not line)}."
    yield ""
    yield from table(("field", "parts, meaning"), ((f"`{name}`", line) for name, line in lines.items() if line))


def _joined(meanings: Mapping[str, str | None]) -> str:
    """Fields on a line, with their meanings in brackets."""
    return ", ".join(f"`{name}` ({meaning})" if meaning else f"`{name}`" for name, meaning in meanings.items())


def _sentence(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _comments(declared: type) -> dict[str, str]:
    """The fields that a class declares, with their comments."""
    source = inspect.getsource(declared)
    written: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            written[token.start[0]] = token.string
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            line = node.lineno - 1
            while written.get(line, "").startswith("#:"):
                above.insert(0, written[line].removeprefix("#:").strip())
                line -= 1
            beside = written.get(node.end_lineno or node.lineno, "").removeprefix("#").strip()
            found[node.target.id] = " ".join(above) or beside
    return found


_PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "ops": _ops,
    "fields of generate": _generate,
    "sampling rules": _rules,
    "fields of a completion": _completion,
    "fields of status": _status,
}
