"""The state of a thread and its CPU time, as the system reports them."""

import os
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ThreadStat(NamedTuple):
    """A state is a letter of `proc(5)`: T for a stopped thread, D for one that waits for a disk; "" if it has ended."""

    state: str = ""
    user_s: float = 0.0  # CPU time in its own code
    kernel_s: float = 0.0  # CPU time in the kernel

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.kernel_s


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, as by SIGSTOP."""
    return thread_stat(pid, pid).state == "T"


def thread_stat(pid: int, thread: int) -> ThreadStat:
    """The state of a thread; the main thread has the number of its process."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return ThreadStat()
    return ThreadStat(fields[0], int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S)
