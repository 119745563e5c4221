"""The threads of a worker's process: how long one waits for Python's lock, and how many compute on a CPU."""

import os
import sys

import torch

#: The longest time, roughly, that the loop waits for Python's lock while another thread holds it. A chat template holds
#: it for tens of milliseconds, and Python's default of 5 ms is longer than many a step.
SWITCH_INTERVAL_S = 0.2e-3


def hand_over_soon() -> None:
    """Have the threads of this process hand Python's lock over to each other in time for a step."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def set_cpu_threads() -> None:
    """One thread for a tensor operation on a CPU, unless `OMP_NUM_THREADS`, which torch reads, says how many."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
