"""Prefix keys: a digest for each full page of a sequence, by which other sequences find it (`kv/pool`)."""

from __future__ import annotations

from hashlib import blake2b


class PrefixKeys:
    """The digests of one sequence's full pages, made page by page as its tokens become known."""

    def __init__(self, version: int, page_size: int, adapter_edition: int = 0) -> None:
        self.version, self._adapter_edition = version, adapter_edition
        self._page_size = page_size
        self._keys: list[bytes] = []
        adapter = adapter_edition.to_bytes(8, "little") if adapter_edition else b""
        self._last = blake2b(version.to_bytes(8, "little") + adapter, digest_size=16).digest()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> bytes:
        return self._keys[index]

    @property
    def last(self) -> bytes:
        """The digest of all present full pages."""
        return self._last

    def fork(self, pages: int) -> PrefixKeys:
        """A copy with the keys of the first `pages` pages, to go on with another content."""
        keys = PrefixKeys(self.version, self._page_size, self._adapter_edition)
        keys._keys = self._keys[:pages]
        keys._last = keys._keys[-1] if keys._keys else keys._last
        return keys

    def next_key(self, content: bytes) -> bytes:
        """The key of the next page if it has this content (of `page_size` positions)."""
        return blake2b(content, key=self._last, digest_size=16).digest()

    def tail_key(self, content: bytes) -> bytes:
        """The key of the first positions of the next page, which have this content."""
        return blake2b(content, key=self._last, digest_size=16, person=b"tail").digest()

    def append(self, key: bytes) -> None:
        """Add the key of the next page."""
        self._last = key
        self._keys.append(key)
