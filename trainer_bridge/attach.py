"""Coming back for a request that was sent before, on this connection or an earlier one of the same `client`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from trainer_bridge.assembly import Assembler
from trainer_bridge.call import Call
from trainer_bridge.client_core import ClientCore
from trainer_bridge.results import Completion


def attach(
    core: ClientCore,
    target: str,
    endpoint: str | None,
    stream: Literal[False, "tokens", "completions"],
    *,
    stream_every: int | None,
    n: int,
    partials: Iterable[Completion],
    timeout_s: float | None,
) -> Call:
    """Send `attach`. `partials` are what an earlier stream of the request brought: this one goes on after them."""
    fields: dict[str, Any] = {"target": target}
    held = list(partials)
    if held and not stream:
        raise ValueError("partials say where a stream goes on; leave them out, or set stream")
    if stream:
        fields |= {"stream": stream, "offsets": _offsets(held), "text_chars": _text_chars(held)}
        if stream_every is not None:
            fields["stream_every"] = stream_every
    (call,) = core.control("attach", core.only_endpoint(endpoint), timeout_s, **fields)
    call.target = target
    if stream:
        call.assembler = Assembler(n, whole=stream == "completions")
        call.assembler.hold(held)
    return call


def _offsets(held: list[Completion]) -> dict[str, int | None]:
    return {str(part.index): None if part.finish_reason is not None else len(part) for part in held}


def _text_chars(held: list[Completion]) -> dict[str, int]:
    return {str(part.index): len(part.text) for part in held if part.text is not None and part.finish_reason is None}
