"""With this folder on PYTHONPATH, followers stop at points that a test orders. Python imports this file at its start.

A file in the folder of the variable FAULTY_FOLLOWER, named after a point, makes the next follower that comes there
write `POINT.reached` and wait until the file is gone:

    load       while the model is loaded
    order      on the main thread, before an order is carried out
    prefill, decode      on the compute stream, at the beginning of such a step
    piece, prepare       in the thread of updates
    adapter    in the thread of adapters, before one is mapped
    memory     on the main thread, before what a sleep does with the memory
    swap       on the main thread, at the order to swap

`busy` makes a step compute for some seconds, on the compute stream.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BUSY_S = 9.0


def _install(folder: Path) -> None:
    from rollout.engine.step.execute import Executor
    from rollout.ranks import follower
    from rollout.ranks.adapters import AdapterCopies
    from rollout.ranks.copies import FollowerCopies
    from rollout.ranks.follower_updates import FollowerUpdates

    def stand_at(point: str) -> None:
        ordered = folder / point
        if ordered.exists():
            (folder / f"{point}.reached").touch()
            while ordered.exists():
                time.sleep(0.02)

    def before(owner: Any, name: str, act: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            act(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, both)

    def step(executor: Any, step: Any, slot: Any) -> None:
        stand_at("prefill" if step.header.layout else "decode")
        if (folder / "busy").exists():
            (folder / "busy").unlink()
            end_s = time.monotonic() + _BUSY_S
            while time.monotonic() < end_s:
                pass
            (folder / "busy.reached").touch()

    before(follower, "load_model", lambda *args: stand_at("load"))
    before(Executor, "run", step)
    before(follower.Follower, "_carry_out", lambda *args: stand_at("order"))
    before(follower.Follower, "_begin_swap", lambda *args: stand_at("swap"))
    before(FollowerUpdates, "_prepare", lambda *args: stand_at("prepare"))
    before(FollowerUpdates, "_keep", lambda *args: stand_at("piece"))
    before(AdapterCopies, "_prepare", lambda *args: stand_at("adapter"))
    before(FollowerCopies, "_change_memory", lambda *args: stand_at("memory"))


if "rollout.ranks.entry" in sys.orig_argv:
    _install(Path(os.environ["FAULTY_FOLLOWER"]))
