"""With this folder on PYTHONPATH, the loop of a worker without work looks by itself every ten minutes only.

Python imports this file at its start. A test must not leave the worker idle for `stall_s`: it would count as hung.
"""

import sys

import tests.support.quick_transformers.sitecustomize  # noqa: F401 -- Python imports one file of this name

if "rollout.cli.main" in sys.orig_argv:
    from rollout import worker

    worker._IDLE_WAIT_S = 600.0
