"""The experts of tokens on the host: by page of KV, and the entries that one sequence has not sent yet.

An entry lies where the KV of its token lies: same page, same place in the page. Steps are committed in the order of
launch, so `ExpertPages` mirrors the KV pages, one commit late: if a page is shared, copied, cached or evicted, so are
the entries of its tokens. `record` says how a step records them and how they are packed.

Entries of KV on the host (`offload`, `tier`) are kept by the number of the host page. `feature` says when they go back
to the pool's pages.

A preempted sequence takes its entries along (`SequenceExperts.keep`): they belong to the forwards that made its tokens.
Its pages will hold the entries of the forwards that compute its KV again.

Legend: N tokens, H pages on the host, L sparse layers, K experts a token, E their product, P pages, S places in a page,
W words of an entry.
"""

import numpy as np

from rollout.engine.messages.requests import RoutingShape


def entry_words(shape: RoutingShape) -> int:
    """int32 words of an entry."""
    return -(-shape.bytes_per_token // 4)


class ExpertPages:
    """The entries of all tokens with KV in the pool, by page. The host maps memory when a page is first used."""

    def __init__(self, shape: RoutingShape, pages: int, page_size: int, host_pages: int = 0) -> None:
        self.shape = shape
        self._stowed_HSW = np.zeros((host_pages, page_size, entry_words(shape)), np.int32)
        self._page_size = page_size
        self._words_PSW = np.zeros((pages, page_size, entry_words(shape)), np.int32)
        self._by_slot = self._words_PSW.reshape(pages * page_size, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._words_PSW.nbytes + self._stowed_HSW.nbytes

    def take(self, record_NW: np.ndarray) -> None:
        """Store the entries of a step that is being committed. Padding goes to the dump page."""
        self._by_slot[record_NW[:, 0]] = record_NW[:, 1:]

    def copy(self, source: int, target: int) -> None:
        """A page's KV was copied to another one."""
        self._words_PSW[target] = self._words_PSW[source]

    def stow(self, pages: list[int], hosts: list[int]) -> None:
        """Copy the entries of pages with KV on the host, before the pages are given up."""
        self._stowed_HSW[hosts] = self._words_PSW[pages]

    def stowed(self, hosts: list[int]) -> np.ndarray:
        """A copy of the entries for KV on the host, by page."""
        return self._stowed_HSW[hosts]

    def stowed_bytes(self, host: int) -> memoryview:
        """The memory of the entries of a page of the host."""
        return memoryview(self._stowed_HSW[host]).cast("B")

    def put(self, pages: list[int], entries_NSW: np.ndarray) -> None:
        """Store the entries of pages whose KV came back from the host."""
        self._words_PSW[pages] = entries_NSW

    def read(self, pages: list[int], start: int, end: int) -> np.ndarray:
        """Entries of positions start..end-1 of a sequence with these pages: uint8 or uint16 [end - start, L, K]."""
        first = start // self._page_size
        block = self._words_PSW[pages[first : -(-end // self._page_size)]].reshape(-1, self._words_PSW.shape[2])
        offset = first * self._page_size
        words_NW = block[start - offset : end - offset]
        assert len(words_NW) == end - start, "a sequence has the pages of all its tokens"
        return self._unpacked(words_NW)

    def nothing(self) -> np.ndarray:
        """No entries."""
        return self._unpacked(self._by_slot[:0])

    def _unpacked(self, words_NW: np.ndarray) -> np.ndarray:
        shape = self.shape
        entries_NE = words_NW.view(shape.dtype)[:, : shape.layers * shape.top_k]
        return np.ascontiguousarray(entries_NE).reshape(-1, shape.layers, shape.top_k)


class SequenceExperts:
    """The entries of one sequence that were not sent yet. Positions count from the first of the prompt."""

    __slots__ = ("_kept", "_told")

    def __init__(self, first: int, nothing: np.ndarray) -> None:
        """Positions before `first` are not wanted; `nothing` are no entries."""
        self._told = first  # entries of earlier positions were sent, or are not wanted
        self._kept = nothing  # entries from `_told` on, of KV that was given up

    def keep(self, experts: ExpertPages, pages: list[int], end: int) -> None:
        """Keep the unsent entries of positions before `end`; the pages are about to be given up."""
        self._kept = self.unsent(experts, pages, end)

    def sent(self, end: int) -> None:
        """The entries of positions before `end` are sent."""
        count = max(0, end - self._told)
        self._kept = self._kept[count:]
        self._told += count

    def unsent(self, experts: ExpertPages, pages: list[int], end: int) -> np.ndarray:
        """The unsent entries of positions before `end`."""
        count = max(0, end - self._told)
        kept = self._kept[:count]
        if len(kept) == count:
            return kept
        return np.concatenate([kept, experts.read(pages, self._told + len(kept), end)])
