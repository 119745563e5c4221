"""The pool of KV pages: reference counts, and the prefix cache of known pages.

Every page but page 0 is in exactly one of three states:

    free       no reference; its content is garbage
    cached     no reference; its content is a known prefix: reusable; the least recently used one is evicted first
    used       one reference or more; it may be a known prefix, too, so that other sequences can share it

Page 0 is the dump page: padding rows write there, and it fills a page table past the row's own pages. It is never
allocated: where a page is expected, 0 means that there is none.

If rows are dealt to ranks, the pages are numbered over all ranks, and the first page of each rank is its dump page. A
sequence has pages of one rank.

A prefix is known by a chain of digests, one for each full page: digest_i = H(digest_{i-1}, content of page i), and
digest_{-1} is the weights version and, of a variant, its edition. The content is what the items of
the prompt say about the page's positions (`messages.Prompt.content`), and for generated tokens their ids. So a key
states which content, at which positions, under which weights.

With an `engine.max_kv_age` over 0 keys lack the weights version. Then each known page has a version: the oldest version
in its KV, or in the KV before it. A page that is too old is not found. It is given up when its key gets newer KV, or
when the pool needs the page.

A tier (`kv/tier.py`) copies the oldest cached pages before they are evicted. It inspects each page once. Inspected
pages are evicted first, then the others, and last the pages that are being copied. A page is copied without a
reference: if it is evicted meanwhile, the copy is discarded.

The last page of a prompt is seldom full. Its first positions have a key of their own, the tail key, as long as the page
is used or cached. A sequence with an equal prompt copies the page, because the first sequence goes on writing there.
The half-full last page of a finished turn is known by such a key, too. It is cached as full pages are, and is copied by
each sequence that goes on from it.
"""

from collections import OrderedDict
from collections.abc import Callable, Set
from itertools import chain

DUMP_PAGE = 0


class Copies:
    """Copies under way, by what they read. A copy is void when its source is given up before the end."""

    def __init__(self) -> None:
        self._of: dict[int, object] = {}

    def __contains__(self, source: int) -> bool:
        return source in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def sources(self) -> Set[int]:
        """The pages or places that are copied."""
        return self._of.keys()

    def begin(self, source: int, copy: object) -> None:
        """Begin a copy of this page or place; an earlier one is void."""
        self._of[source] = copy

    def end(self, source: int, copy: object) -> bool:
        """End the copy; False if it is void."""
        if self._of.get(source) is not copy:
            return False
        del self._of[source]
        return True

    def give_up(self, source: int) -> None:
        """Note that the content of the page or place changes, which makes its copy void."""
        self._of.pop(source, None)

    def give_up_all(self) -> None:
        """Make all copies under way void."""
        self._of.clear()


class PrefixEnds:
    """Numbers of tokens after full pages, for at most `most` digests of full pages; the least recently used are lost.

    The KV that ended there may be gone: the caller looks for it by its key.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: OrderedDict[bytes, set[int]] = OrderedDict()

    def note(self, digest: bytes, after: int) -> None:
        """Note that a known prefix ends this many tokens after the full pages with this digest."""
        self._after.setdefault(digest, set()).add(after)
        self._after.move_to_end(digest)
        if len(self._after) > self._most:
            self._after.popitem(last=False)

    def after(self, digest: bytes) -> list[int]:
        """Numbers of tokens after these full pages, largest first."""
        if digest not in self._after:
            return []
        self._after.move_to_end(digest)
        return sorted(self._after[digest], reverse=True)


class _Unused:
    """The pages of one rank that no sequence uses."""

    def __init__(self, first: int, pages: int) -> None:
        self.free = list(range(first + pages - 1, first, -1))
        # Cached pages, oldest use first, in the order of their eviction: pages that `look` has returned, other
        # pages, and pages that are being copied to the host.
        self.seen: OrderedDict[int, None] = OrderedDict()
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.leaving: OrderedDict[int, None] = OrderedDict()

    @property
    def cached(self) -> int:
        return len(self.seen) + len(self.evictable) + len(self.leaving)

    def queue_of(self, page: int) -> OrderedDict[int, None]:
        """The eviction queue of a cached page."""
        return next(pages for pages in (self.seen, self.evictable, self.leaving) if page in pages)


class PagePool:
    """Counts references to `total` pages and finds known ones by prefix key; `evicted` is called with evicted keys.

    Each of `ranks` ranks has an equal part of them. A tier has room for `elsewhere` more known pages.
    """

    def __init__(
        self,
        total: int,
        evicted: Callable[[bytes], object] = lambda key: None,
        elsewhere: int = 0,
        ranks: int = 1,
    ) -> None:
        if total < 2 * ranks:
            raise ValueError(f"a KV pool needs at least 2 pages, one of them the dump page; got {total // ranks}")
        self.total = total - ranks  # pages that can be allocated
        self.ranks = ranks
        self.refs = [0] * total
        self._pages = total // ranks  # pages of each rank
        self._unused = [_Unused(rank * self._pages, self._pages) for rank in range(ranks)]
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tail_page_of: dict[bytes, int] = {}
        self._tail_key_of: dict[int, bytes] = {}
        self._oldest = [0] * total  # oldest weights version of a known page's KV
        self._evicted = evicted
        self.ends = PrefixEnds(self.total + elsewhere)
        self._seen_before = set[int]()  # used pages that `look` had returned when they were retained
        self._copies = Copies()  # copies of known pages to the host
        self.half_copies = Copies()  # copies of the first positions of used pages, which no step in flight writes to

    @property
    def free(self) -> int:
        return sum(len(unused.free) for unused in self._unused)

    @property
    def cached(self) -> int:
        return sum(unused.cached for unused in self._unused)

    @property
    def being_copied(self) -> int:
        """Cached pages that are being copied to the host."""
        return sum(len(unused.leaving) for unused in self._unused)

    @property
    def unseen(self) -> int:
        """Cached pages that `look` has not returned."""
        return sum(len(unused.evictable) for unused in self._unused)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now, of all ranks."""
        return self.free + self.cached

    def available_of(self, rank: int) -> int:
        """Pages that `allocate` can hand out now, of one rank."""
        unused = self._unused[rank]
        return len(unused.free) + unused.cached

    @property
    def total_of_rank(self) -> int:
        """Pages of each rank that can be allocated: a sequence can have as many."""
        return self._pages - 1

    def rank_of(self, page: int) -> int:
        """The rank that has a page."""
        return page // self._pages

    def allocate(self, rank: int = 0) -> int:
        """Allocate a page of a rank with one reference; 0 if all are used.

        If none is free, evict the oldest cached one.
        """
        unused = self._unused[rank]
        if unused.free:
            page = unused.free.pop()
        elif cached := unused.seen or unused.evictable or unused.leaving:
            page, _ = cached.popitem(last=False)
            self._evicted(self._key_of[page])
            self._forget(page)
        else:
            return 0
        self.refs[page] = 1
        return page

    def sort_free(self) -> None:
        """Have `allocate` hand out free pages in the order of their numbers."""
        for unused in self._unused:
            unused.free.sort(reverse=True)

    def retain(self, page: int) -> None:
        """Add a reference to a page that is used or cached."""
        if self.refs[page] == 0:
            unused = self._of(page)
            if page in unused.seen:
                self._seen_before.add(page)
            del unused.queue_of(page)[page]
        self.refs[page] += 1

    def release(self, page: int, unchanged: bool = False) -> None:
        """Take a reference away; without any the page becomes cached if it is a known prefix, else free.

        `unchanged`: no sequence got the page since it was retained, so `look` need not return it again.
        """
        assert self.refs[page] > 0, f"page {page} released more often than it was retained"
        self.refs[page] -= 1
        seen = unchanged and page in self._seen_before
        if not seen or self.refs[page] == 0:
            self._seen_before.discard(page)
        if self.refs[page] == 0:
            unused = self._of(page)
            if page in self._copies:
                unused.leaving[page] = None
            elif page in self._key_of:
                (unused.seen if seen else unused.evictable)[page] = None
            else:
                unused.free.append(page)
                self.half_copies.give_up(page)
                self._forget_tail(page)

    def remember(self, key: bytes, page: int, oldest: int) -> None:
        """Make a used page findable by `key`; no-op if the page is known, or the key by a page whose KV is no older."""
        assert self.refs[page] > 0, "only a page in use can be remembered"
        if page not in self._key_of and self._gives_way(self._page_of.get(key, 0), oldest):
            self._page_of[key], self._key_of[page], self._oldest[page] = page, key, oldest

    def find(self, key: bytes, oldest: int = 0) -> int:
        """The page with this key, if its KV has no version before `oldest`; else 0.

        The caller has to retain it before the next `allocate`.
        """
        page = self._page_of.get(key, 0)
        return page if self._oldest[page] >= oldest else 0

    def remember_tail(self, key: bytes, page: int, oldest: int) -> None:
        """Make the first positions of a used page findable by `key`; else as `remember`."""
        assert self.refs[page] > 0, "only a page in use can be remembered"
        if page not in self._tail_key_of and self._gives_way(self._tail_page_of.get(key, 0), oldest):
            self._tail_page_of[key], self._tail_key_of[page], self._oldest[page] = page, key, oldest

    def find_tail(self, key: bytes, oldest: int = 0) -> int:
        """The page whose first positions have this key, to be retained and copied; else as `find`."""
        page = self._tail_page_of.get(key, 0)
        return page if self._oldest[page] >= oldest else 0

    def key_of(self, page: int) -> bytes:
        """The key of a known page; empty for other pages."""
        return self._key_of.get(page, b"")

    def oldest_of(self, page: int, otherwise: int) -> int:
        """The oldest weights version of the KV of a known page; `otherwise` for other pages."""
        return self._oldest[page] if page in self._key_of or page in self._tail_key_of else otherwise

    # --- copies to the host -------------------------------------------------------------------------------------------

    def look(self) -> tuple[bytes, int]:
        """The key and number of the oldest cached page that `look` has not returned. Such a page must exist."""
        unused = next(unused for unused in self._unused if unused.evictable)
        page, _ = unused.evictable.popitem(last=False)
        unused.seen[page] = None
        return self._key_of[page], page

    def begin_copy(self, page: int, copy: object) -> None:
        """Begin to copy a known page to the host; no step in flight writes to it."""
        self._copies.begin(page, copy)
        if not self.refs[page]:
            del self._lru(page)[page]
            self._of(page).leaving[page] = None

    def end_copy(self, page: int, copy: object) -> bool:
        """End the copy; False if the page was evicted meanwhile, so that the copy has to be discarded."""
        valid = self._copies.end(page, copy)
        unused = self._of(page)
        if valid and page in unused.leaving:
            del unused.leaving[page]
            unused.seen[page] = None
        return valid

    def forget_all(self) -> None:
        """Forget all prefixes: cached pages become free, used pages can no longer be found."""
        for unused in self._unused:
            for cached in (unused.seen, unused.evictable, unused.leaving):
                unused.free += cached
                cached.clear()
        self._seen_before.clear()
        self._copies.give_up_all()
        self.half_copies.give_up_all()
        for index in (self._page_of, self._key_of, self._tail_page_of, self._tail_key_of):
            index.clear()

    def check(self) -> None:
        """Assert that every page is in exactly one state."""
        free, cached = set[int](), set[int]()
        for rank, unused in enumerate(self._unused):
            free.update(unused.free)
            cached.update(chain(unused.seen, unused.evictable, unused.leaving))
            pages = chain(unused.free, unused.seen, unused.evictable, unused.leaving)
            assert all(self.rank_of(page) == rank for page in pages), "a page is with another rank"
        dumps = {rank * self._pages for rank in range(self.ranks)}
        assert len(free) == self.free, "a page is free twice"
        assert len(cached) == self.cached, "a page is cached twice"
        assert not self._copies and not self.half_copies, "a page is being copied"
        assert not free & cached and not dumps & (free | cached), "a page is both free and cached"
        for page in set(range(len(self.refs))) - dumps:
            in_pool = page in free or page in cached
            assert (self.refs[page] == 0) == in_pool, f"page {page}: {self.refs[page]} refs, in pool: {in_pool}"
        assert all(self._page_of[key] == page for page, key in self._key_of.items()), "the prefix index disagrees"
        assert all(self._tail_page_of[key] == page for page, key in self._tail_key_of.items()), "the tails disagree"
        assert not free & self._tail_key_of.keys(), "a free page has a tail"

    def _gives_way(self, known: int, oldest: int) -> bool:
        """True if no page is known, or an older page was: the older page is forgotten, and free if it was cached."""
        if not known:
            return True
        if self._oldest[known] >= oldest:
            return False
        if not self.refs[known]:
            del self._lru(known)[known]
            self._of(known).free.append(known)
        if known in self._key_of:
            self._forget(known)
        else:
            self._forget_tail(known)
        return True

    def _lru(self, page: int) -> OrderedDict[int, None]:
        """The eviction queue of a cached page."""
        return self._of(page).queue_of(page)

    def _of(self, page: int) -> _Unused:
        return self._unused[page // self._pages]

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        self._copies.give_up(page)
        self.half_copies.give_up(page)
        self._forget_tail(page)

    def _forget_tail(self, page: int) -> None:
        if page in self._tail_key_of:
            del self._tail_page_of[self._tail_key_of.pop(page)]
