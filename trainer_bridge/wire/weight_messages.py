"""The control messages of the weight bridge: which fields each action has.

    {op: weights, action: begin,  version, manifest, transport, options [, adapter] [, tied] [, content] [, delta]
                                                                        [, sections]}
                                                                          -> {op: ok, version, token, grant [, cuts]}
    {op: weights, action: commit, token, options}                         -> {op: ok, version, pause_s, bytes, phases}
    {op: weights, action: abort,  token [, newer]}                        -> {op: ok}
    {op: weights, action: status}                                         -> {op: ok, version, state, ...}

For the transport `torch_group`, before the `begin`:

    {op: weights, action: join,   group, meeting}                         -> {op: ok}
    {op: weights, action: gather, group, part, tensors, packed_bytes}     -> {op: ok, gathered, missing}
    {op: weights, action: leave,  group}                                  -> {op: ok, left}

With empty `sections` a worker of several ranks answers with the `cuts` of all ranks; with a digest the bytes come cut
for its ranks (`transports.sections`). `commit` is answered once the update is applied, `join` once all members have
met, `gather` once all its tensors have come; `missing` lists some of the tensors that the update still lacks. The
messages go to the worker's weight socket (`weights_endpoint` in its status); the request socket passes them on.
"""

from collections.abc import Mapping
from typing import Any

from trainer_bridge.wire.errors import BadRequest

_ENVELOPE = {"v", "op", "id", "client", "action"}
_FIELDS: dict[str, set[str]] = {
    "begin": {"version", "manifest", "transport", "options"},
    "commit": {"token", "options"},
    "abort": {"token"},
    "status": set(),
    "join": {"group", "meeting"},
    "gather": {"group", "part", "tensors", "packed_bytes"},
    "leave": {"group"},
}
_OPTIONAL: dict[str, set[str]] = {"begin": {"adapter", "tied", "content", "delta", "sections"}, "abort": {"newer"}}


def check_fields(header: Mapping[str, Any]) -> str:
    """The action of a `weights` message. Raises `BadRequest`, naming the field, when fields are unknown or missing."""
    action = header.get("action")
    if type(action) is not str or action not in _FIELDS:
        raise BadRequest(f"action must be one of {', '.join(_FIELDS)}", field="action")
    for name in sorted(header.keys() - _ENVELOPE - _FIELDS[action] - _OPTIONAL.get(action, set())):
        raise BadRequest(f"{action} takes no field {name!r:.80}", field=name[:80])
    for name in sorted(_FIELDS[action] - header.keys()):
        raise BadRequest(f"{action} needs the field {name}", field=name)
    if "options" in _FIELDS[action] and type(header["options"]) is not dict:
        raise BadRequest("options must be a map", field="options")
    return action


def read_tied(value: Any) -> dict[str, str]:
    """Names that the manifest leaves out, and the name in it of the same tensor. Raises `BadRequest`."""
    if type(value) is not dict or any(type(name) is not str for pair in value.items() for name in pair):
        raise BadRequest("tied must be a map from names that are left out to names of the manifest", field="tied")
    return value


def read_token(value: Any) -> bytes:
    """The bytes of a token. Raises `BadRequest`."""
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise BadRequest("token must be the one that begin was answered with", field="token") from None
