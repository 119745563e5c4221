"""A bound ROUTER socket, and what wakes the thread that polls it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

import zmq

from rollout.network.access import Access


def bind_router(
    context: zmq.Context, bind: str, setting: str, access: Access, options: Mapping[zmq.SocketOption, int]
) -> zmq.Socket:
    """A ROUTER socket with these options of ZeroMQ, bound. `setting` names the setting that `bind` comes from.

    Raises ValueError if the endpoint cannot be bound, or needs CURVE.
    """
    access.check_bind(bind, setting)
    router = context.socket(zmq.ROUTER)
    for option, value in options.items():
        router.setsockopt(option, value)
    if "[" in bind:
        router.setsockopt(zmq.IPV6, 1)
    access.secure(context, router)
    try:
        router.bind(bind)
    except zmq.ZMQError as error:
        router.close(linger=0)
        raise ValueError(f"cannot bind {bind}: {error}; choose another {setting!r}") from error
    return router


class PollWaker:
    """Lets any thread wake a polling one: `signal` makes the descriptor readable, `clear` makes the thread wait again.

    Work is added before `signal`, and looked for after `clear`; so work that is added meanwhile wakes the next poll.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._reader.fileno()

    def signal(self) -> None:
        """Wake the polling thread. Never blocks."""
        # A full pipe wakes the thread as well. A closed one belongs to a thread that has ended.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget the signals so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Close the pair. Later signals have no effect."""
        self._writer.close()
        self._reader.close()
