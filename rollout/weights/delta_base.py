"""The bytes of the last update on one rank: the base for the next delta (`rollout.weights.delta_staging`)."""

import contextlib
from collections.abc import Callable

import torch

from rollout.weights.kept_layout import Kept
from rollout.weights.kept_memory import KeptMemory
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.wire.manifest import Manifest

#: Bytes of host memory that the device reads at a time for a fingerprint.
_CHECK_BYTES = 64 << 20


class DeltaBase:
    """Knows which update's bytes the memory holds: after `verified`, until `forget`.

    `on_stream` makes the stream current on which the memory is written.
    """

    def __init__(self, memory: KeptMemory, on_stream: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._memory, self._on_stream = memory, on_stream
        self._content = ""  # names the bytes that the memory holds; empty: not known
        self._whole_only = ""  # a tensor of the last update that changes cannot be made to
        self._prints: list[int] = []  # fingerprints of the held bytes, where the result of changes can't be compared

    def verified(self, content: str) -> None:
        """Note that all bytes of this update are verified, and named by `content`; empty: they have no name."""
        kept = self._memory.layout.kept
        self._whole_only = next((name for name in kept if not self._memory.takes_changes(kept[name])), "")
        self._content = "" if self._whole_only else content
        self._prints = self._fingerprints() if self._content else []

    def forget(self) -> None:
        """The memory may be written: it holds no bytes that are known."""
        self._content = ""

    def lacks(self, manifest: Manifest, content: str) -> str:
        """Why the memory does not hold the bytes that `content` names; empty: it does."""
        layout = self._memory.layout
        if self._whole_only:
            return f"{self._whole_only} is not kept in words of 16 bits, as it is sent, so it takes no changes"
        if self._content != content:
            return "this worker does not hold the update that it changes"
        if layout.digest != manifest.layout_digest:
            return "its tensors or buckets differ from those in the update that it changes"
        halved = (name for name, kept in layout.kept.items() if not layout.is_stream and kept.halves_words)
        if name := next(halved, ""):
            return f"a rank's part of {name}, whose rows have an odd number of bytes, is not whole words"
        if self._prints != self._fingerprints():
            self.forget()
            return "the bytes that it changes are no longer the verified bytes"
        return ""

    @property
    def stream(self) -> torch.Tensor | None:
        """The memory, if it holds the whole stream in its order; None: it holds kept parts of tensors."""
        return self._memory.blocks[0] if self._memory.layout.is_stream else None

    @property
    def device(self) -> torch.device:
        return next((self._memory.base(kept).device for kept in self._memory.layout.kept.values()), self._memory.device)

    def parts(self, start: int, end: int) -> list[tuple[Kept, torch.Tensor]]:
        """The kept tensors that have bytes from `start` to `end` of the stream, in its order, and their memory."""
        return [(kept, self._memory.base(kept)) for kept in self._memory.layout.within(start, end)]

    def _fingerprints(self) -> list[int]:
        """Fingerprints of the kept parts; none where the result of the changes is compared."""
        layout = self._memory.layout
        if layout.is_stream or not layout.kept:
            return []
        with self._on_stream():
            return torch.stack([self._fingerprint(kept) for kept in layout.kept.values()]).tolist()

    def _fingerprint(self, kept: Kept) -> torch.Tensor:
        """Computed by the device: it reads memory of the host faster than the host does."""
        base, total = self._memory.base(kept), torch.zeros((), dtype=torch.int64, device=self._memory.device)
        for at in range(0, base.numel(), _CHECK_BYTES):
            piece = base[at : at + _CHECK_BYTES].to(total.device, non_blocking=True)
            aligned = piece if piece.storage_offset() % 4 == 0 else piece.clone()  # words of 32 bits may begin there
            total += fingerprint(aligned, at // 4)
        return total
