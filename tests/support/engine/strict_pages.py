"""Memory that detects writes while it is given back."""

import mmap

import numpy as np

from rollout.engine.device.releasable import HostPages, MemoryShortError


class StrictPages(HostPages):
    """While given back, every byte is 0xff, which is NaN in all float types; who has written to one is found out.

    `short` blocks can be had no more.
    """

    lazy = False
    short_after: int | None = None
    spans: list[mmap.mmap]
    backed: set[int]

    def __init__(self) -> None:
        self.spans, self.backed = [], set()

    def reserve(self, nbytes: int) -> mmap.mmap:
        span = super().reserve(nbytes)
        self._fill(span)
        self.spans.append(span)
        return span

    def back(self, span: mmap.mmap) -> None:
        assert id(span) not in self.backed
        assert (np.frombuffer(span, np.uint8) == 0xFF).all(), "memory was written to after it was released"
        if self.short_after is not None and len(self.backed) >= self.short_after:
            raise MemoryShortError("no more")
        self.backed.add(id(span))

    def give_back(self, span: mmap.mmap) -> None:
        self.backed.remove(id(span))
        self._fill(span)

    @staticmethod
    def _fill(span: mmap.mmap) -> None:
        np.frombuffer(span, np.uint8)[:] = 0xFF
