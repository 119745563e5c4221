"""How Python runs a worker: how threads hand its lock over, how many compute on a CPU, and what is no garbage.

Nothing is collected while large libraries such as torch load, and later not the objects that they leave.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: The longest time, roughly, that the loop waits for Python's lock while another thread holds it. A chat template holds
#: it for tens of milliseconds, and Python's default of 5 ms is longer than many a step.
SWITCH_INTERVAL_S = 0.2e-3


def hand_over_soon() -> None:
    """Have the threads of this process hand Python's lock over to each other in time for a step."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def set_cpu_threads() -> None:
    """One thread for a tensor operation on a CPU, unless `OMP_NUM_THREADS`, which torch reads, says how many."""
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


def freeze_heap() -> None:
    """Exclude all objects that exist now from later garbage collections."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries report leaks at exit if their objects are still frozen


def collect_and_freeze() -> None:
    """Exclude the objects that exist after start-up from later garbage collections.

    The libraries create half a million objects that live as long as the process. Each full collection would visit all
    of them while the loop waits.
    """
    gc.collect()
    freeze_heap()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Collect no garbage while libraries load, and exclude their objects from later collections.

    Almost nothing that an import creates is garbage. The collector's repeated scans take a fifth of the import's time.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze_heap()  # otherwise the next collection would scan all of it
        gc.enable()
