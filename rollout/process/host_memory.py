"""How much memory the host has left."""

from __future__ import annotations


def available_bytes() -> float:
    """Memory that is available without swapping, bytes; infinite where the system does not say it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float("inf")  # not Linux: an allocation that is too large fails with the system's own error
