"""The watchdog: a thread that handles signals, and ends a process whose loop hangs.

    signal   -> wakeup pipe -> on_signal(signals so far)      also while the loop waits for a device that hangs
    no tick  -> on_stall(seconds)                             once: after `stall_s` without a tick, or when the loop
                                                              misses the deadline of `expect_end`
    deadline -> os._exit(status)                              when the process misses the deadline of `end_within`

Python runs a signal's handler on the main thread between two bytecodes. A main thread that hangs in a driver call never
gets there. The C handler writes a byte into the wakeup pipe, so this thread learns of every signal at once.
"""

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


class ObservedTime:
    """Time of `clock` that a thread has seen pass, from look to look; `period_s` is the usual time between two.

    A process that was stopped itself (SIGSTOP, a laptop asleep) has seen nothing meanwhile, so a look counts two
    periods at the most: what it looks at may not have hung.
    """

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = 2 * period_s, clock
        self._looked_s = clock()

    def passed_s(self) -> float:
        """The seconds since the last look; of a longer gap, only two periods."""
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, self._most_s), now_s
        return passed_s


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
                log.critical("this process did not end in time and is killed now", extra={"status": self._deadline[1]})
                os._exit(self._deadline[1])

    def _is_hung(self, silent_s: float, now_s: float) -> bool:
        stalled = self._stall_s is not None and silent_s >= self._stall_s
        return stalled or (self._loop_ends_by_s is not None and now_s >= self._loop_ends_by_s)

    def _hear(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _HEARD:
                self._signals += 1
                self._on_signal(self._signals)


class End:
    """The end of this process, which several threads may begin: the first one says why, and with which status.

        the loop               an error that it cannot mend      `begin`, then it cleans up and returns the status
        a watching thread      a peer is lost                    `begin`, then it exits
        the watchdog's thread  the loop hangs                    `begin`, then it exits

    A thread whose `begin` is False does nothing more: the process ends with the reason and status of the first.

    Args:
        end_within: ends the process with a status after some seconds, if it still runs (`Watchdog.end_within`).
    """

    def __init__(self, end_within: Callable[[float, int], None]) -> None:
        self._end_within = end_within
        self._lock = threading.Lock()
        self.reason, self.status = "", 0  # set once it has begun

    def begin(self, reason: str, status: int, within_s: float) -> bool:
        """Begin the end, which must not take longer than `within_s`; False if another thread has begun it."""
        if not self._lock.acquire(blocking=False):
            return False
        self._end_within(within_s, status)
        self.reason, self.status = reason, status
        log.critical("the process ends", extra={"reason": reason, "status": status})
        return True

    def wait(self) -> None:
        """Wait for the exit that another thread has begun; does not return."""
        threading.Event().wait()
