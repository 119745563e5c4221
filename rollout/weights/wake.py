"""A way for any thread to wake one that waits in a ZeroMQ poll."""

from __future__ import annotations

import contextlib
import socket


class Wake:
    """`signal` makes `socket` readable; `clear` makes it wait again."""

    def __init__(self) -> None:
        self._in, self.socket = socket.socketpair()
        self._in.setblocking(False)
        self.socket.setblocking(False)

    def signal(self) -> None:
        """Wake the waiting thread."""
        with contextlib.suppress(BlockingIOError):  # full: the thread is about to look anyway
            self._in.send(b"\0")

    def clear(self) -> None:
        """The thread is about to look."""
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def close(self) -> None:
        """Free the sockets."""
        self._in.close()
        self.socket.close()
