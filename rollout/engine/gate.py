"""Generation held while weights are overwritten in place, and after that went wrong or they were dropped.

    free --request--> wanted --grant--> granted --clear--> free          a whole update is in the parameters
      ^                  |                 |
      +----- clear ------+                 +-- fail --> stale            they are of no version; only an update cures it
    free --lost--> stale                                                 dropped in a sleep: the same

The weight receiver asks (`request`, `clear`, `fail`), from its thread; the engine's loop grants once no step is in
flight, and clears when it takes a whole update. Reading a field takes no lock: the loop looks at every tick.

The `door` keeps updates out while the memory that they would be written to is given back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Door:
    """Where updates come in, one at a time: the receiver's thread enters and leaves, the loop shuts and opens."""

    def __init__(self) -> None:
        self.closed = False
        self.on_shut: Callable[[], object] = _nothing  # called from the loop: it must not wait
        self._inside = False
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """An update begins; False if it must not."""
        with self._lock:
            self._inside |= not self.closed
            return not self.closed

    def leave(self) -> None:
        """No update is being received, waits to be applied or is being applied."""
        self._inside = False

    def shut(self) -> None:
        """Let no update begin."""
        with self._lock:
            self.closed = True
        self.on_shut()

    def open(self) -> None:
        """Let updates begin again."""
        self.closed = False

    @property
    def empty(self) -> bool:
        """True if no update is inside; where the door is shut it stays so."""
        return not self._inside


class Hold:
    """Whether the loop may launch. `stale` says why the weights are of no use, and is empty while they are."""

    def __init__(self) -> None:
        self.door = Door()
        self.dropped = False  # since a sleep dropped the weights no whole update came: none of their version is left
        self.failed = False  # stale because something went wrong, not because somebody wanted it
        self.wanted = False
        self.granted = False
        self.granted_s = 0.0  # since when it holds for an update, `time.perf_counter()`; 0 while there is none
        self.stale = ""
        self._on_grant: Callable[[], object] = _nothing
        self._lock = threading.Lock()

    def request(self, on_grant: Callable[[], object]) -> None:
        """Ask that nothing be launched; `on_grant` is called, from any thread, once nothing runs."""
        with self._lock:
            self._on_grant = on_grant
            self.wanted = True
            at_once = self.granted  # stale: nothing has run since
            self.granted_s = time.perf_counter()
        if at_once:
            on_grant()

    def grant(self) -> None:
        """The loop has launched nothing that is unfinished, and will not; unless nobody wants it any more."""
        with self._lock:
            if not self.wanted or self.granted:
                return
            self.granted_s, self.granted = time.perf_counter(), True
            on_grant = self._on_grant
        on_grant()

    def fail(self, why: str) -> None:
        """The parameters are a mixture; the hold stays."""
        with self._lock:
            self.stale, self._on_grant, self.failed = why, _nothing, True

    def lost(self, why: str) -> None:
        """The loop, which runs nothing, has weights that mean nothing: it holds until a whole update came."""
        with self._lock:
            self.granted_s = 0.0
            self.wanted = self.granted = self.dropped = True
            self.stale, self._on_grant, self.failed = why, _nothing, False

    def clear(self) -> None:
        """The parameters are whole: generation goes on."""
        with self._lock:
            self.granted = self.wanted = self.dropped = self.failed = False
            self.stale, self._on_grant = "", _nothing  # it holds the update that asked, and that its memory


def _nothing() -> None:
    """Nobody is to be told."""
