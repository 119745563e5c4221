"""Coming back for a request that was sent before, on this connection or an earlier one of the same `client`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypedDict

from trainer_bridge.client.assembly import Assembler
from trainer_bridge.client.call import Call
from trainer_bridge.client.core import ClientCore
from trainer_bridge.client.results import Completion


class AttachFields(TypedDict, total=False):
    """What `attach` takes beside the target and `stream`; the first three go with `stream`."""

    stream_every: int | None  # tokens of a chunk, at the least
    n: int  # completions that the request has; 1
    partials: Iterable[Completion]  # what an earlier stream of it brought: this one goes on after them
    endpoint: str | None  # where it was sent; absent: the only one
    timeout_s: float | None  # seconds until `RolloutTimeout`; absent: the client's


def attach(core: ClientCore, target: str, stream: Literal[False, "tokens", "completions"], given: AttachFields) -> Call:
    """Send `attach`."""
    if unknown := sorted(given.keys() - AttachFields.__annotations__.keys()):
        raise TypeError(f"attach takes no {unknown[0]!r}; it takes {', '.join(AttachFields.__annotations__)}")
    fields: dict[str, Any] = {"target": target}
    held = list(given.get("partials", ()))
    if held and not stream:
        raise ValueError("partials say where a stream goes on; leave them out, or set stream")
    if stream:
        fields |= {"stream": stream, "offsets": _offsets(held), "text_chars": _text_chars(held)}
        if given.get("stream_every") is not None:
            fields["stream_every"] = given["stream_every"]
    (call,) = core.control("attach", core.only_endpoint(given.get("endpoint")), given.get("timeout_s"), **fields)
    call.target = target
    if stream:
        call.assembler = Assembler(given.get("n", 1), whole=stream == "completions")
        call.assembler.hold(held)
    return call


def _offsets(held: list[Completion]) -> dict[str, int | None]:
    return {str(part.index): None if part.finish_reason is not None else len(part) for part in held}


def _text_chars(held: list[Completion]) -> dict[str, int]:
    return {str(part.index): len(part.text) for part in held if part.text is not None and part.finish_reason is None}
