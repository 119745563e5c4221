"""The memory that the host has left."""

import threading
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
_lock = threading.Lock()
_promised = [0]


def available_bytes() -> float:
    """Memory that is available without swapping, and not promised, bytes; infinite where the system does not say it."""
    try:
        with MEMINFO.open(encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float("inf")  # not Linux: an allocation that is too large fails with the system's own error
    return max(0, free - _promised[0])


def promise(nbytes: int) -> None:
    """Count memory of this process whose pages are taken later; negative: they are taken, or not needed."""
    with _lock:
        _promised[0] += nbytes
