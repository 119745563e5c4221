"""With this folder on PYTHONPATH, followers stop at points that a test orders. Python imports this file at its start.

A file in the folder of the variable FAULTY_FOLLOWER, named after a point, makes the next follower that comes there
write `POINT.reached` and wait until the file is gone; others go on:

    import     before the group connects
    load       before the model is loaded
    tensor     after half of the weights are loaded
    steps      while steps are prepared
    served     when all is prepared, before the rank is ready
    order      on the main thread, before an order is carried out
    prefill, decode      on the compute stream, at the beginning of such a step
    open, piece, prepare       in the thread of updates
    adapter, forget            in the thread of adapters, before one is mapped or unmapped
    write      on the stream of adapters, before one is copied to its slot
    out, back  on the streams that move KV to the host and back
    memory     on the main thread, before what a sleep does with the memory
    swap       on the main thread, at the order to swap
    copy       on the compute stream, in a swap

While there is a file `drift`, followers draw other tokens than rank 0.
`busy` makes a step compute for some seconds, on the compute stream. While there is a file `slow`, each part of
loading, an update, a swap and a sleep takes a while. The parts are small.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.support.quick_transformers.sitecustomize  # noqa: F401 -- Python imports one file of this name

_BUSY_S = 9.0
_SLOW_S = float(os.environ.get("SLOW_S", "0.15"))


def _install(folder: Path) -> None:
    from rollout.engine.device import releasable
    from rollout.engine.kv.tiers.page_mover import PageMover
    from rollout.engine.step import execute
    from rollout.models.lora_slots import AdapterSlots
    from rollout.ranks import follower
    from rollout.ranks.adapters import AdapterCopies
    from rollout.ranks.copies import FollowerCopies
    from rollout.ranks.follower_updates import FollowerUpdates
    from rollout.ranks.start_watch import LOADING, StartProgress
    from rollout.weights import staged_weights

    def stand_at(point: str) -> None:
        ordered = folder / point
        if ordered.exists():
            try:
                (folder / f"{point}.reached").touch(exist_ok=False)
            except FileExistsError:
                return
            while ordered.exists():
                time.sleep(0.02)

    def be_slow(*args: Any, **kwargs: Any) -> None:
        if (folder / "slow").exists():
            time.sleep(_SLOW_S)

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

    def part(start: StartProgress, done: int, total: int) -> None:
        be_slow()
        if start.stage == LOADING and 2 * done >= total:
            stand_at("tensor")

    def drift(group: Any, tokens_S: Any) -> None:
        if (folder / "drift").exists():
            tokens_S += 1

    before(execute, "compare_tokens", drift)
    before(follower, "connect", lambda *args, **kwargs: stand_at("import"))
    before(StartProgress, "advance", part)
    before(follower, "build_follower", lambda *args, **kwargs: stand_at("steps"))
    before(follower, "collect_and_freeze", lambda *args, **kwargs: stand_at("served"))
    before(follower, "load_model", lambda *args, **kwargs: stand_at("load"))
    before(execute.Executor, "run", step)
    before(follower.Follower, "_carry_out", lambda *args, **kwargs: stand_at("order"))
    before(follower.Follower, "_begin_swap", lambda *args, **kwargs: stand_at("swap"))
    before(staged_weights.SwapCopies, "enqueue", lambda *args, **kwargs: stand_at("copy"))
    before(FollowerUpdates, "_begin", lambda *args, **kwargs: stand_at("open"))
    before(FollowerUpdates, "_prepare", lambda *args, **kwargs: stand_at("prepare"))
    for takes in ("_keep", "_read"):
        before(FollowerUpdates, takes, lambda *args, **kwargs: stand_at("piece"))
        before(FollowerUpdates, takes, be_slow)
    before(AdapterCopies, "_prepare", lambda *args, **kwargs: stand_at("adapter"))
    before(AdapterCopies, "_forget", lambda *args, **kwargs: stand_at("forget"))
    before(AdapterSlots, "write", lambda *args, **kwargs: stand_at("write"))
    before(PageMover, "_copy_out", lambda *args, **kwargs: stand_at("out"))
    before(PageMover, "_copy_in", lambda *args, **kwargs: stand_at("back"))
    before(FollowerCopies, "_change_memory", lambda *args, **kwargs: stand_at("memory"))
    staged_weights.SwapCopies.__init__.__defaults__ = (1,)
    releasable.ReleasableMemory.__init__.__defaults__ = (1 << 14, 1 << 14)  # bytes of a block, and of a piece
    before(staged_weights.SwapCopies, "_mark", be_slow)
    before(releasable.ReleasableMemory, "_copy", be_slow)
    before(releasable.HostPages, "give_back", be_slow)


if "rollout.ranks.entry" in sys.orig_argv:
    try:
        _install(Path(os.environ["FAULTY_FOLLOWER"]))
    except Exception:  # Python would go on without the faults, which the tests would wait for
        traceback.print_exc()
        os._exit(1)
