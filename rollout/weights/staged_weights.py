"""A whole, checked update that the engine's loop copies into the model, and how far the copies of a swap are."""

import threading
from collections import deque
from collections.abc import Sequence

import torch

from trainer_bridge.wire.manifest import Manifest

#: (view of a parameter, staged tensor that is copied there)
Copy = tuple[torch.Tensor, torch.Tensor]
_PART_BYTES = 1 << 30


class SwapCopies:
    """The copies of a process's swaps. It counts the parts that are done: a swap that goes on does not hang.

    A part is `part_bytes`, or one larger tensor. There is one swap at a time.
    """

    def __init__(self, part_bytes: int = _PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._under_way: deque[torch.cuda.Event] = deque()
        self._done = 0

    @torch.no_grad()
    def enqueue(self, copies: Sequence[Copy]) -> None:
        """Enqueue copies on the current stream; on a CPU they are done at the return."""
        nbytes = 0
        for target, source in copies:
            target.copy_(source, non_blocking=True)
            nbytes += target.nbytes
            if nbytes >= self._part_bytes:
                nbytes = 0
                self._mark(target)

    def parts_done(self) -> int:
        """The number of parts of all swaps that are copied. Any thread may ask."""
        with self._lock:
            while self._under_way and self._under_way[0].query():
                self._under_way.popleft()
                self._done += 1
            return self._done

    def _mark(self, copied: torch.Tensor) -> None:
        self.parts_done()  # drops the events that are over, also on a worker whose parts no rank watches
        if not copied.is_cuda:
            self._done += 1
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(copied.device))
        self._under_way.append(event)


class StagedWeights:
    """A whole, checked update. `version` and `nbytes` are for reports.

    An update in place has no `copies`: it is in the parameters already, and the engine only notes its version.
    """

    def __init__(self, manifest: Manifest, copies: Sequence[Copy], swap_copies: SwapCopies) -> None:
        self.version = manifest.version
        self.nbytes = manifest.tensor_bytes
        self.names = tuple(entry.name for entry in manifest.tensors)
        self._copies, self._swap_copies = copies, swap_copies
        self._cuda = [view.device for view, _ in self._copies if view.is_cuda][:1]
        self._lock = threading.Lock()
        self._copying = False
        self._copied = False
        self._closed = False
        self._done: torch.cuda.Event | None = None

    def copy_into(self) -> None:
        """Copy every staged tensor into the model, converting dtypes; call it on the engine's compute stream.

        On CUDA the copies are enqueued on the current stream and the call returns before they have run. What could
        be refused was refused before: this raises only for a broken device.
        """
        with self._lock:
            self._copying = True
        try:
            self._swap_copies.enqueue(self._copies)
            if self._cuda:
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(self._cuda[0]))
                self._done = done
        finally:
            with self._lock:
                self._copying, self._copied = False, True

    def close(self, applied: bool) -> None:
        """The engine is done with this update. Its memory may be used again once no copy reads it.

        With `applied` a copy that is queued counts, too.
        """
        with self._lock:
            self._closed = True
            self._copied |= not applied

    @property
    def released(self) -> bool:
        """Whether the staged bytes may be overwritten."""
        with self._lock:
            if not self._closed or self._copying or not self._copied:
                return False
        return self._done is None or self._done.query()
