"""A way to a server that is cut at a certain byte, in both directions and for good, while both ends live."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutCable:
    """Forwards one TCP connection to `port` until the `times`-th `mark` has passed, `more` bytes of it and behind it.

    Then both sides are closed, and `cut` is set.
    """

    def __init__(self, port: int, mark: bytes, times: int, more: int) -> None:
        self._to, self._mark, self._times, self._more = port, mark, times, more
        self.cut = threading.Event()
        self._ends = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._ends[0].getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> CutCable:
        return self

    def __exit__(self, *exc: object) -> None:
        self._hang_up()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._ends[0] as listener:
            near = listener.accept()[0]
            listener.close()  # no connection comes after it
            with near, socket.create_connection(("127.0.0.1", self._to)) as far:
                self._ends = [near, far]
                back = threading.Thread(target=self._back, args=(far, near), daemon=True)
                back.start()
                self._towards(near, far)
                self._hang_up()
                back.join(60)

    def _hang_up(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # also wakes who waits for it

    def _towards(self, source: socket.socket, sink: socket.socket) -> None:
        passed = b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                before, passed = len(passed), passed + data
                if (end := self._cut_at(passed)) <= len(passed):
                    sink.sendall(passed[before:end])
                    self.cut.set()
                    return
                sink.sendall(data)

    def _cut_at(self, passed: bytes) -> float:
        at = -1
        for _ in range(self._times):
            at = passed.find(self._mark, at + 1)
            if at < 0:
                return float("inf")
        return at + self._more

    @staticmethod
    def _back(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
