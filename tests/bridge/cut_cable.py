"""A way to a server that is cut after so many bytes, in both directions and for good, while both ends live."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutCable:
    """Forwards one TCP connection to `port`; `cut` is set once `most` bytes went towards it and all is closed."""

    def __init__(self, port: int, most: int) -> None:
        self._to, self._left = port, most
        self.cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, cut or not."""
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            near = self._listener.accept()[0]
            with near, socket.create_connection(("127.0.0.1", self._to)) as far:
                self._listener.close()  # nobody comes back
                back = threading.Thread(target=self._forward, args=(far, near, False), daemon=True)
                back.start()
                self._forward(near, far, True)
                for end in (near, far):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                back.join(10)

    def _forward(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted and len(data) >= self._left:
                    sink.sendall(data[: self._left])
                    self.cut.set()
                    return
                self._left -= len(data) if counted else 0
                sink.sendall(data)
