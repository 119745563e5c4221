"""What the tests of the clients share."""

from collections.abc import Callable
from typing import Any

from tests.support.bridge.scripted_worker import ScriptedWorker, counting

TIMEOUT_S = 60.0

Connect = Callable[..., Any]
Serve = Callable[..., ScriptedWorker]
SetClock = Callable[[float], None]


def only_generate(handler: Any) -> Any:
    """A handler for `generate`; everything else is answered as usual."""
    return lambda worker, peer, header: (handler if header["op"] == "generate" else counting)(worker, peer, header)


def silent(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    """A handler that never answers."""


def in_reverse(count: int) -> Any:
    """Answer `count` requests in the reverse of their order, once all of them are there."""
    waiting: list[Any] = []

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        waiting.append((peer, header))
        if len(waiting) == count:
            for known in reversed(waiting):
                counting(worker, *known)

    return handle
