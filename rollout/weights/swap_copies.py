"""Enqueues the copies of a swap, and knows how many parts of them are done: a swap that goes on is not one that hangs.

There is one swap at a time in a process. `copy_tensors` runs on its compute stream; any thread may ask.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

_lock = threading.Lock()
#: A part is so many bytes, or one larger tensor.
PART_BYTES = 1 << 30
_under_way: deque[torch.cuda.Event] = deque()
_done = 0


@torch.no_grad()
def copy_tensors(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Enqueue the copies, each a target and its source, on the current stream; on a CPU they are done at the return."""
    nbytes = 0
    for target, source in copies:
        target.copy_(source, non_blocking=True)
        nbytes += target.nbytes
        if nbytes >= PART_BYTES:
            nbytes = 0
            _mark(target)


def parts_done() -> int:
    """How many parts of all swaps are copied."""
    global _done
    with _lock:
        while _under_way and _under_way[0].query():
            _under_way.popleft()
            _done += 1
        return _done


def _mark(copied: torch.Tensor) -> None:
    global _done
    parts_done()  # drops the events that are over, also on a worker whose parts no rank watches
    if not copied.is_cuda:
        _done += 1
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(copied.device))
    _under_way.append(event)
