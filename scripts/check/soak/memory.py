"""Samples the resident memory of a soak's processes."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVERY_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


def rss_mib(pid: int) -> float | None:
    """Resident MiB of a process; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / _MIB
    except (OSError, IndexError, ValueError):
        return None


class MemoryLog:
    """Samples of every process. `pids` returns process ids by name; a new process under a name starts a new series."""

    def __init__(self, pids: Callable[[], dict[str, int]], began_s: float) -> None:
        self._pids, self._began_s = pids, began_s
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def sample(self) -> None:
        """Take a sample of each process."""
        for name, pid in self._pids().items():
            rss = rss_mib(pid)
            if rss is not None:
                self._samples.setdefault((name, pid), []).append((time.monotonic() - self._began_s, rss))

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_EVERY_S)

    def rows(self, at_s: float) -> list[dict[str, Any]]:
        """For every running process: MiB at `at_s` (or at its start, if later), now, and at most."""
        rows = []
        for name, pid in self._pids().items():
            samples = self._samples.get((name, pid), [])
            if samples:
                early = next((sample for sample in samples if sample[0] >= at_s), samples[-1])
                most = max(rss for _, rss in samples)
                rows.append(
                    {"process": name, "from_s": early[0], "mib": early[1], "at_end": samples[-1][1], "most": most}
                )
        return rows
