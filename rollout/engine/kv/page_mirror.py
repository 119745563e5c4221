"""What lies beside KV, page by page, on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from rollout.engine.sequence.sequence import Sequence


class PageMirror:
    """Something that is kept for the tokens of each page. A hook that is not overridden does nothing."""

    def stow(self, pages: Seq[int], host_pages: Seq[int]) -> None:
        """The KV of these pages was copied to the host; the pages may be given up next."""

    def fetched(self, host_pages: Seq[int], pages: Seq[int]) -> None:
        """KV was copied from the host to these pages; no step in flight names them."""

    def restored(self, seq: Sequence, host_pages: Seq[int], pages: Seq[int]) -> None:
        """A sequence goes on with KV that is in these pages again; its first step is in flight."""

    def bytes_beside(self, host_page: int) -> bytes:
        """What is kept for a page of the host, for disk; always of the same length."""
        return b""

    def take_bytes_beside(self, host_page: int, packed: bytes) -> None:
        """KV was read from disk to this page of the host."""
