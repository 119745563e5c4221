"""The process of a follower begins here: `python -m rollout.ranks.entry PARENT`, the process of rank 0.

It first makes sure that it ends with rank 0: the imports take seconds. Then it reads its facts from stdin. An empty
stdin means that rank 0 has ended.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run a follower that rank 0 has started."""
    _end_with(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    from rollout.process.interpreter import loading_libraries

    with loading_libraries():
        from rollout.ranks.follower import run_follower

    if told := sys.stdin.buffer.read():
        run_follower(json.loads(told))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's main thread ends, which started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
