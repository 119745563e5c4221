"""With this folder on PYTHONPATH, every look at the wall clock is a day before or after the one before it.

Python imports this file at its start.
"""

import itertools
import time

import tests.support.quick_transformers.sitecustomize  # noqa: F401 -- Python imports one file of this name

_true, _days = time.time, itertools.cycle([0, 1, -1])
time.time = lambda: _true() + 86_400.0 * next(_days)
time.time_ns = lambda: int(time.time() * 1e9)
