"""A thread that stays awake when the loop does not: it hears signals, and ends a process that hangs.

    signal   -> wakeup pipe -> on_signal(how many so far)     also while the loop waits for a device that hangs
    no tick  -> on_stall(seconds)                             once: after `stall_s` without one, or where the loop was
                                                              to have ended by now
    deadline -> os._exit(status)                              where the process was to have ended by now

Python runs a signal's handler on the main thread between two bytecodes, which a main thread that hangs in a driver
call never reaches. The byte in the wakeup pipe comes from the C handler, so this thread hears of every signal at once.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_HEARD = (signal.SIGTERM, signal.SIGINT)


class Watchdog:
    """Watches one loop. Every callback is called on the watchdog's thread.

    Args:
        last_tick_s: when the loop turned last, `time.perf_counter()`.
        stall_s: seconds without a tick after which `on_stall` is called; None for never.
    """

    def __init__(
        self,
        *,
        last_tick_s: Callable[[], float],
        stall_s: float | None,
        on_signal: Callable[[int], None],
        on_stall: Callable[[float], None],
    ) -> None:
        self._last_tick_s = last_tick_s
        self._stall_s = stall_s
        self._on_signal = on_signal
        self._on_stall = on_stall
        self._signals = 0
        self._watching = True
        self._loop_ends_by_s: float | None = None
        self._deadline: tuple[float, int] | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Hear signals from now on, but those that this process ignores; to be called on the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)  # without a handler there is no byte
        self._thread.start()

    def stop_watching(self) -> None:
        """The loop is over: no tick will come."""
        self._watching = False

    def expect_end(self, seconds: float) -> None:
        """The loop ends within this time, or counts as one that hangs. The first call counts."""
        if self._loop_ends_by_s is None:
            self._loop_ends_by_s = time.perf_counter() + seconds

    def end_within(self, seconds: float, status: int) -> None:
        """End the process with `status`, should it still be there in `seconds`. The first call counts."""
        if self._deadline is None:
            self._deadline = (time.perf_counter() + seconds, status)

    def _run(self) -> None:
        silent_s, seen_s, looked_s = 0.0, self._last_tick_s(), time.perf_counter()
        while True:
            if select.select([self._reader], [], [], _LOOK_S)[0]:
                self._hear(self._reader.recv(64))
            tick_s, now_s = self._last_tick_s(), time.perf_counter()
            # A process that was stopped (SIGSTOP, a laptop asleep) did not hang: only time that we saw pass counts.
            silent_s = silent_s + min(now_s - looked_s, 2 * _LOOK_S) if tick_s == seen_s else 0.0
            seen_s, looked_s = tick_s, now_s
            if self._watching and self._is_over(silent_s, now_s):
                self._watching = False
                self._on_stall(silent_s)
            if self._deadline is not None and now_s >= self._deadline[0]:
                log.critical("this process was to have ended by now; it is ended", extra={"status": self._deadline[1]})
                os._exit(self._deadline[1])

    def _is_over(self, silent_s: float, now_s: float) -> bool:
        stalled = self._stall_s is not None and silent_s >= self._stall_s
        return stalled or (self._loop_ends_by_s is not None and now_s >= self._loop_ends_by_s)

    def _hear(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _HEARD:
                self._signals += 1
                self._on_signal(self._signals)
