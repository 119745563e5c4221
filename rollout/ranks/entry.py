"""The process of a follower begins here: `python -m rollout.ranks.entry`, with what it must know on stdin.

First of all it makes sure that it ends with rank 0, before the imports, which take seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run a follower that rank 0 has started."""
    told: dict[str, Any] = json.load(sys.stdin.buffer)
    _end_with(told["parent"])
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    from rollout.ranks.follower import follow

    follow(told)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's main thread ends, which started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
