"""What either client waits for: generators that yield the seconds to wait at most, and look again after every wait.

for wait_s in until_done(core, call):      blocking:  poll(wait_s), absorb
                                           asyncio:   await an event that absorb sets, wait_s at most
"""

from __future__ import annotations

from collections.abc import Generator

from trainer_bridge.client.call import Call
from trainer_bridge.client.core import ClientCore
from trainer_bridge.client.results import Chunk
from trainer_bridge.wire.errors import NotFound


def until_done(core: ClientCore, call: Call) -> Generator[float | None, None, None]:
    """Yield the seconds to wait at most (None: no limit) until the call is done; then raise its error, if any."""
    while not call.done:
        yield core.patience(call)
    if call.error is not None:
        raise call.error


def next_chunk(core: ClientCore, call: Call) -> Generator[float | None, None, Chunk | None]:
    """Like `until_done`, until there is a chunk, which is returned, or None at the end of the stream."""
    while not call.chunks:
        if call.done:
            yield from until_done(core, call)
            return None
        yield core.patience(call)
    return call.chunks.popleft()


def until_cancelled(core: ClientCore, calls: list[Call]) -> Generator[float | None, None, None]:
    """Like `until_done` for a `cancel` at several endpoints: it is enough that one knows the request."""
    missing: list[NotFound] = []
    for call in calls:
        try:
            yield from until_done(core, call)
        except NotFound as error:
            missing.append(error)
    if missing and len(missing) == len(calls):
        raise missing[0]


def until_ended(core: ClientCore, call: Call, cancels: list[Call]) -> Generator[float | None, None, None]:
    """Like `until_cancelled` of this call, which may have ended before the `cancel` came."""
    try:
        yield from until_cancelled(core, cancels)
    except NotFound:
        if not call.done:  # its result comes before the answer to the cancel
            raise
