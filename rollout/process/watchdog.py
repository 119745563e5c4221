"""The watchdog: a thread that handles signals, and ends a process whose loop hangs.

    signal   -> wakeup pipe -> on_signal(signals so far)      also while the loop waits for a device that hangs
    no tick  -> on_stall(seconds)                             once: after `stall_s` without a tick, or when the loop
                                                              misses the deadline of `expect_end`
    deadline -> os._exit(status)                              when the process misses the deadline of `end_within`

Python runs a signal's handler on the main thread between two bytecodes. A main thread that hangs in a driver call never
gets there. The C handler writes a byte into the wakeup pipe, so this thread learns of every signal at once.
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

from rollout.process.observed_time import ObservedTime

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_HEARD = (signal.SIGTERM, signal.SIGINT)


class Watchdog:
    """Watches one loop. Every callback is called on the watchdog's thread.

    Args:
        last_tick_s: returns the time of the loop's last tick, `time.perf_counter()`.
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
        """Handle SIGTERM and SIGINT from now on, unless this process ignores them. Call it on the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)  # without a handler no byte is written
        self._thread.start()

    def stop_watching(self) -> None:
        """The loop has ended: expect no more ticks."""
        self._watching = False

    def expect_end(self, seconds: float) -> None:
        """The loop must end within this time; otherwise it counts as hung. Only the first call has an effect."""
        if self._loop_ends_by_s is None:
            self._loop_ends_by_s = time.perf_counter() + seconds

    def end_within(self, seconds: float, status: int) -> None:
        """End the process with `status` if it still runs after `seconds`. Only the first call has an effect."""
        if self._deadline is None:
            self._deadline = (time.perf_counter() + seconds, status)

    def _run(self) -> None:
        silent_s, seen_s, observed = 0.0, self._last_tick_s(), ObservedTime(_LOOK_S)
        while True:
            if select.select([self._reader], [], [], _LOOK_S)[0]:
                self._hear(self._reader.recv(64))
            tick_s, now_s, passed_s = self._last_tick_s(), time.perf_counter(), observed.passed_s()
            silent_s = silent_s + passed_s if tick_s == seen_s else 0.0
            seen_s = tick_s
            if self._watching and self._is_hung(silent_s, now_s):
                self._watching = False
                self._on_stall(silent_s)
            if self._deadline is not None and now_s >= self._deadline[0]:
                log.critical("this process did not end in time; it is ended now", extra={"status": self._deadline[1]})
                os._exit(self._deadline[1])

    def _is_hung(self, silent_s: float, now_s: float) -> bool:
        stalled = self._stall_s is not None and silent_s >= self._stall_s
        return stalled or (self._loop_ends_by_s is not None and now_s >= self._loop_ends_by_s)

    def _hear(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _HEARD:
                self._signals += 1
                self._on_signal(self._signals)
