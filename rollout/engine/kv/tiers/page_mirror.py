"""Data of features that accompanies KV, page by page, on the host."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq


class PageMirror(ABC):
    """Data that is kept for the tokens of each page. A `StepFeature` of this class follows all moves of KV."""

    @abstractmethod
    def stow(self, pages: Seq[int], host_pages: Seq[int]) -> None:
        """Called when the KV of these pages was copied to the host; the pages may be given up next."""

    @abstractmethod
    def fetched(self, host_pages: Seq[int], pages: Seq[int]) -> None:
        """Called when KV was copied from the host to these pages, which only steps launched from now on name."""

    @abstractmethod
    def bytes_beside(self, host_page: int) -> bytes:
        """Called before KV is written to disk: return the data of a host page; its length is always the same."""

    @abstractmethod
    def take_bytes_beside(self, host_page: int, packed: bytes) -> None:
        """Called when KV was read from disk to this page of the host."""
