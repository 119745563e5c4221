"""How long a thread waits for Python's lock while another one holds it."""

from __future__ import annotations

import sys

#: The longest time, roughly, that the loop waits for Python's lock while another thread holds it. A chat template holds
#: it for tens of milliseconds, and Python's default of 5 ms is longer than many a step.
SWITCH_INTERVAL_S = 0.2e-3


def hand_over_soon() -> None:
    """Have the threads of this process hand Python's lock over to each other in time for a step."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
