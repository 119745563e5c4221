"""The pool of KV pages: reference counts, and a cache of finished prefixes.

Every page but page 0 is in exactly one of three places:

    free       nobody refers to it, its content is garbage
    cached     nobody refers to it, its content is a known prefix: reusable, and evicted least recently used first
    used       refs > 0; it may be known as a prefix too, so that others can share it

Page 0 is the dump page: padding rows write there, and it fills the page table past a row's own pages. It is never
handed out.

A prefix is known by a chain of digests, one a full page: digest_i = H(digest_{i-1}, tokens of page i), and digest_{-1}
is the weights version and, with an adapter, the generation of its weights. So a key says which tokens, at which
positions, under which weights.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

DUMP_PAGE = 0


class PagePool:
    """Counts references to `total` pages and finds cached ones by prefix key."""

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ValueError(f"a KV pool needs at least 2 pages, one of them the dump page; got {total}")
        self.total = total - 1  # pages that can be handed out
        self.refs = [0] * total
        self._free = list(range(total - 1, 0, -1))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached pages nobody refers to, oldest use first

    @property
    def free(self) -> int:
        """Pages with no content worth keeping."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the cache keeps."""
        return len(self._evictable)

    @property
    def used(self) -> int:
        """Pages that some sequence refers to."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int | None:
        """A page with one reference, evicting the least recently used cached page if need be; None if all are used."""
        if self._free:
            page = self._free.pop()
        elif self._evictable:
            page, _ = self._evictable.popitem(last=False)
            self._forget(page)
        else:
            return None
        self.refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more reference to a page that is used or cached."""
        if self.refs[page] == 0:
            del self._evictable[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """One reference less; at none the page becomes cached if it holds a known prefix, else free."""
        assert self.refs[page] > 0, f"page {page} released more often than it was taken"
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if page in self._key_of:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def remember(self, key: bytes, page: int) -> None:
        """Make a used page findable as the prefix `key`; a key or page that is known already stays as it is."""
        assert self.refs[page] > 0, "only a page in use can be remembered"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """The page that holds prefix `key`; the caller retains it before anything else is allocated."""
        return self._page_of.get(key)

    def forget_all(self) -> None:
        """Drop the cache: cached pages become free, used pages are no longer findable."""
        for page in self._evictable:
            self._free.append(page)
        self._evictable.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        free, cached = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached and DUMP_PAGE not in free | cached, "a page is both free and cached"
        for page in range(1, self.total + 1):
            in_pool = page in free or page in cached
            assert (self.refs[page] == 0) == in_pool, f"page {page}: {self.refs[page]} refs, in pool: {in_pool}"
        assert all(self._page_of[key] == page for page, key in self._key_of.items()), "the prefix index disagrees"

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]


class PrefixKeys:
    """The digests of one sequence's full pages, made page by page as tokens become known."""

    def __init__(self, version: int, page_size: int, generation: int = 0) -> None:
        self.version, self._generation = version, generation
        self._page_size = page_size
        self._keys: list[bytes] = []
        adapter = generation.to_bytes(8, "little") if generation else b""
        self._last = blake2b(version.to_bytes(8, "little") + adapter, digest_size=16).digest()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> bytes:
        return self._keys[index]

    def fork(self, pages: int) -> PrefixKeys:
        """The keys of the first `pages` pages, to go on from with other tokens."""
        keys = PrefixKeys(self.version, self._page_size, self._generation)
        keys._keys = self._keys[:pages]
        keys._last = keys._keys[-1] if keys._keys else keys._last
        return keys

    def next_key(self, page_tokens: np.ndarray) -> bytes:
        """The key that the next page would have if it held `page_tokens` (int32 [page_size])."""
        assert len(page_tokens) == self._page_size
        return blake2b(page_tokens.astype("<i4", copy=False).tobytes(), key=self._last, digest_size=16).digest()

    def append(self, key: bytes) -> None:
        """The next page has this key."""
        self._last = key
        self._keys.append(key)
