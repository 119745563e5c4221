"""Limits under which hostile input is read: little memory, and little time of a core."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

SPARE_BYTES = 256 << 20  # that hostile input may allocate
SOON_S = 5.0  # of a core, on a slow machine; most inputs take a small part of it


@contextlib.contextmanager
def little_memory_and_time(spare_bytes: int = SPARE_BYTES, soon_s: float = SOON_S) -> Iterator[None]:
    """Let this process allocate at most `spare_bytes` more: a larger allocation fails with a MemoryError."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    started = time.process_time()  # not wall time: other processes may be running
    resource.setrlimit(resource.RLIMIT_AS, (taken + spare_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - started < soon_s, "took too long"


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
