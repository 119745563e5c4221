"""The tests' end of `fault_server`: children that come to grief, forks of a process that has imported everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


class FaultServer:
    """The process, and its children."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bridge.fault_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    @contextlib.contextmanager
    def child(self, **order: Any) -> Iterator[int]:
        """A child that does as `order` says; its pid. Killed at the end if it lives."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End it; what it forked ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
