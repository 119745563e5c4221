"""Chooses the pages that a sequence gets or shares, and takes them back. The scheduler decides what runs.

A sequence gets its pages from these sources, in `try_admit` and afterwards in `try_grow`:

    shared prompt    the prompt that another completion of its group has prefilled: the full pages are shared; the page
                     of the last token is copied, because the sequence writes there; only that token is computed again
    session          what the turn before has left, as far as its tokens are the same: the full pages are shared; the
                     page in which the tokens begin to differ is copied
    prefix cache     full pages that are found by their key; shared. If the whole prompt is there, or the end of a turn
                     in the next page, that page is copied
    own pages        new ones for the rest of its tokens, and one more; after that one at a time
    offloaded KV     what it had before it was preempted, instead of all the above (`offload`)

`prefixes` finds the first three. What it finds on the host is first copied to the pool (`fetch_for`). When a sequence
is settled, its pages go to its session (`keep_turn`), to the offload books or back to the pool (`release`).
"""

from collections.abc import Sequence as Seq

from rollout.engine.kv.fetches import Fetch
from rollout.engine.kv.offload import OffloadBooks
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.kv.prefixes import Prefixes, Reusable
from rollout.engine.kv.sessions import Sessions
from rollout.engine.messages.requests import VERSION_END
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.sequence.sequence_kv import NO_HOST_STATE, NO_KEYS, NO_POINT, OffloadedKV, PrefixEnd, SessionKV

#: The most fetches for one admission of a sequence. Pages that wait for a row may be evicted meanwhile.
_MOST_FETCHES = 3


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PageAllocator:
    """Hands pages of one pool to sequences; `sessions` keep some of them between their turns."""

    def __init__(
        self, sessions: Sessions, prefixes: Prefixes, offload_books: OffloadBooks, mirrors: Seq[PageMirror] = ()
    ) -> None:
        self.pool = prefixes.pool
        self.page_size = prefixes.page_size
        self.sessions = sessions
        self.prefixes = prefixes
        self.tier = prefixes.tier
        self.offload_books = offload_books  # KV of preempted sequences
        self.sharing: list[Group] = []  # groups with a shared prompt, oldest first
        self._given_way = 0  # sessions and snapshots that made room for others, since start
        self._mirrors = mirrors

    @property
    def available(self) -> int:
        """The most pages that can be allocated: unused pages, and pages of idle sessions and cached snapshots."""
        return self.pool.available + self.prefixes.evictable

    @property
    def admissible(self) -> int:
        """Pages that a sequence without a row can get now. Pages that are being copied to the host do not count."""
        return self.available - self.tier.writing

    @property
    def making_room(self) -> bool:
        """True while pages are being copied to the host, to be given to other sequences."""
        return self.offload_books.outgoing > 0 or self.offload_books.send_unshared()

    # --- admission ---------------------------------------------------------------------------------------------------

    def find_reusable(self, seq: Sequence, version: int) -> Reusable:
        """KV that `seq` need not compute, now or after another prefill; none if it has KV of its own to restore."""
        return Reusable() if seq.kv.is_offloaded else self.prefixes.find(seq, version)

    def pages_for_new(self, seq: Sequence, reusable: Reusable) -> int:
        """Pages that `seq` needs in addition to its shared ones; `reusable` was just found for it."""
        return self._pages_wanted(seq, seq.prompt_len + len(seq.tokens)) - len(reusable.shared)

    def fetch_for(self, seq: Sequence, reusable: Reusable, version: int, spare: int) -> Fetch | Reusable:
        """The fetch that a sequence must wait for, if pages that were just found for it are on the host.

        Otherwise what it can use without one: if there are no such pages, if the sequence would not fit with `spare`
        pages left, or if it has already had `_MOST_FETCHES` fetches: its pages are evicted before it gets a row, so it
        is better computed. That is `reusable`, or less where sessions gave way without making enough room.
        """
        if reusable.beyond is None:
            return reusable
        first, keys, end, half = reusable.beyond
        more = self._pages_wanted(seq, seq.prompt_len + len(seq.tokens)) - len(first) - len(keys)
        oldest, begins = self.prefixes.oldest_for(seq.group, version), seq.kv.fetches < _MOST_FETCHES
        given_way = self._given_way
        fetch = self.fetch(keys, spare + more + half, first, oldest, begins, end)
        # There may be room without that page, which is copied. If sessions gave way, `first` may be of one of them.
        if fetch is None and half and self._given_way == given_way:
            fetch = self.fetch(keys[:-1], spare + more + half, first, oldest, begins, end)
        seq.kv.fetches += fetch is not None
        if fetch is None and self._given_way > given_way:  # the pages that were found may have given way
            return self.prefixes.find(seq, version)
        return fetch or reusable

    def fetch(
        self,
        keys: Seq[bytes],
        spare: int,
        first: Seq[int] = (),
        oldest: int = 0,
        begins: bool = True,
        end: PrefixEnd = NO_POINT,
    ) -> Fetch | None:
        """Start to copy pages of a prefix from the host, if `spare` pages stay available.

        `keys` are the keys of the pages after `first`; KV of a version before `oldest` is not used. With
        `end` the state after the prefix is copied, too, and the page in which it ends if that is half full. Returns the
        fetch to wait for, which may be another one that is under way; None if there is none. Not to be called while
        the pool's memory is given back.
        """
        fetches, tier = self.tier.fetches, self.tier
        for key in (*keys[:1], end.key):
            if (other := fetches.of(key)) is not None:
                return other
        known = [self.pool.find(key, oldest) for key in keys]
        missing = [
            key
            for key, page in zip(keys, known, strict=True)
            if not page and fetches.of(key) is None and tier.has(key, oldest)
        ]
        if not begins or not (missing or end.key) or (end.key and not self.prefixes.has_place):
            return None
        half = [end.key] if end.after else []
        retained = [*first, *(page for page in known if page)]
        new = self._retain_and_allocate(retained, len(missing) + len(half), spare)
        if new is None:
            return None
        # Last: it may cost the snapshot that was found for the sequence.
        place = self.prefixes.take_place() if end.key else 0
        targets = dict(zip([*missing, *half], new, strict=True))
        pages = [targets.get(key, page) for key, page in zip(keys, known, strict=True)]
        prefix = [*first, *(page for page in pages if page), *new[len(missing) :]]
        return fetches.begin(prefix, list(targets.items()), oldest, end, place)

    def try_admit(self, seq: Sequence, reusable: Reusable, version: int, spare: int) -> bool:
        """Give `seq` the pages of its tokens and one more, if `spare` pages stay available after that.

        `reusable` was just found for it. On success its `kv` has its pages, their keys, the page to copy, and the
        number of tokens whose KV is in its pages, or is being copied there.
        """
        if seq.kv.is_offloaded:
            return self._try_restore(seq, seq.kv.offloaded, version, spare)
        tokens = seq.history()
        wanted = self._pages_wanted(seq, len(tokens))
        self.prefixes.retain(reusable)
        shared = reusable.shared
        for page in shared:  # a session that gives way, but not enough, would lose its pages without keys
            self.pool.retain(page)
        new = self._retain_and_allocate(reusable.pages, wanted - len(shared), spare)
        if new is None:
            self.prefixes.release(reusable)
        if new is None and reusable.copied:
            reusable = reusable.without_copy(self.page_size)  # the page to copy may be the one that is short
            new = self._retain_and_allocate(reusable.pages, wanted - len(reusable.shared), spare)
        for page in reversed(shared):
            self.pool.release(page)
        if new is None:
            return False
        kv = seq.kv
        kv.fetches = 0
        kv.load_from = reusable.place
        kv.hit = reusable.hit if reusable.tokens else None
        kv.add_pages([*reusable.shared, *new], self.page_size)
        kv.prefill_tokens = tokens
        kv.copy_source = reusable.copied
        kv.keys = reusable.keys
        kv.length, kv.oldest, kv.adapter_edition = reusable.tokens, version, seq.adapter_use.edition
        if self.prefixes.max_age:
            found = self.prefixes.versions(reusable)
            kv.oldest = min((oldest for oldest, _ in found), default=version)
            kv.note_found(len(seq.tokens), found)
        if seq.group.session is not None:
            self.sessions.hand_over(seq.group.session, reusable.session_tokens)
        self.prefixes.admitted(seq, version)
        return True

    def _try_restore(self, seq: Sequence, offloaded: OffloadedKV, version: int, spare: int) -> bool:
        """Give a preempted sequence pages for its KV; KV that has left the pool is copied back."""
        if self.admissible <= spare and not self.offload_books.send_unshared():
            return False
        found = self.offload_books.pool_pages(offloaded, version)
        shared = [page for page in found if page]
        wanted = self._pages_wanted(seq, seq.prompt_len + len(seq.tokens))
        new = self._retain_and_allocate(shared, wanted - len(shared), spare)
        if new is None:
            return False
        missing = [i for i, page in enumerate(found) if not page]
        targets = list(zip(missing, new[: len(missing)], strict=True))
        pages = [*found, *new[len(missing) :]]
        for i, page in targets:
            pages[i] = page
        kv = seq.kv
        kv.hit = None
        kv.add_pages(pages, self.page_size)
        kv.prefill_tokens = seq.history()
        kv.length, kv.oldest, kv.keys = offloaded.length, offloaded.oldest, offloaded.keys
        kv.adapter_edition = offloaded.adapter_edition
        self.offload_books.restore(seq, targets)
        return True

    def _pages_wanted(self, seq: Sequence, tokens: int) -> int:
        """Number of pages for a sequence of `tokens` tokens: one more than they fill, at most what it can ever need."""
        most = pages_for(max(tokens, seq.prompt_len + seq.max_tokens - 1), self.page_size)
        return min(pages_for(tokens, self.page_size) + 1, most)

    def _retain_and_allocate(self, retained: list[int], count: int, spare: int) -> list[int] | None:
        """Retain pages and allocate `count` new ones. None, without a change, if fewer than `spare` would be left."""
        for page in retained:
            self.pool.retain(page)
        if not self._make_room(count + spare, retained):
            for page in retained:
                self.pool.release(page)
            return None
        new = [self.pool.allocate() for _ in range(count)]
        assert all(new), "availability was checked"
        return new

    def _make_room(self, pages: int, retained: list[int]) -> bool:
        """Make `pages` pages available, if necessary from idle sessions. False if there are too few.

        Pages of sessions that are `retained` for the new sequence would not become available.
        """
        pool = self.pool
        if pool.available - pool.being_copied >= pages:
            return True
        enough = self.admissible - self.sessions.count(retained) >= pages  # sessions give way only if that is enough
        while enough and pool.available - pool.being_copied < pages:
            enough = self.prefixes.evict_one()
            self._given_way += enough
        if not enough:
            self.offload_books.send_unshared()  # pages that sessions gave up may have no other users left
        return enough

    # --- while the sequence runs -------------------------------------------------------------------------------------

    def try_grow(self, seq: Sequence) -> bool:
        """Allocate one more page for `seq`. False if no page is free and no session has one."""
        while not (page := self.pool.allocate()):
            if not self.prefixes.evict_one():
                return False
        seq.kv.add_pages([page], self.page_size)
        return True

    def chunk_launched(self, seq: Sequence, version: int) -> None:
        """Note that a step in flight computes more of the sequence's KV, up to its length."""
        self._release_copy_source(seq)
        if seq.kv.is_offloaded:
            self._restored(seq, seq.kv.offloaded, version)
        self.prefixes.launched(seq, version)

    def _release_copy_source(self, seq: Sequence) -> None:
        """Release the sources of copies that are enqueued or no longer needed: later writes come after the copies."""
        if seq.kv.copy_source:
            self.pool.release(seq.kv.copy_source)
            seq.kv.copy_source = 0
        self.prefixes.loaded(seq)

    def _restored(self, seq: Sequence, offloaded: OffloadedKV, version: int) -> None:
        """Note that the sequence continues with its restored KV."""
        kv = seq.kv
        for mirror in self._mirrors:
            host_pages, pages = [host for host, _ in offloaded.restored], [page for _, page in offloaded.restored]
            mirror.fetched(host_pages, pages)
        if self.prefixes.findable(seq, version):
            for i in range(len(kv.keys)):
                self.pool.remember(kv.keys[i], kv.pages[i], kv.oldest)
        self.offload_books.counts.restored += 1
        self.offload_books.drop(seq)

    # --- when the sequence leaves its row ----------------------------------------------------------------------------

    def keep_turn(self, seq: Sequence, version: int, now_s: float) -> None:
        """Settle a finalized turn: its full pages can be found, and its session gets the KV, if `version` can use it.

        A request with a lease but without a session keeps its KV in the same way, if it can be found.
        """
        kv, session = seq.kv, seq.group.session
        assert seq.finish is not None
        known = min(kv.length, seq.prompt_len + len(seq.tokens))
        if kv.copy_source:  # the sequence ended before its first chunk: the page was not copied
            known -= known % self.page_size
        # Weights or adapter may have changed while its last steps were in flight; what is offloaded is in no page yet.
        if not self.prefixes.of_use(seq, version) or seq.finish.reason == "error" or kv.is_offloaded:
            known = 0
        self.prefixes.remember_turn(seq, known, version)
        if session is None:
            if not seq.group.request.lease_s or kv.keys is NO_KEYS or self.prefixes.has_states:
                return
            session = self.sessions.unnamed(seq.group.request, seq.index)
        known, snapshots = self.prefixes.turn_end(seq, known)
        tokens = seq.identity(seq.history())[:known]
        left = SessionKV(tokens, kv.pages, kv.oldest, kv.keys, kv.adapter_edition, snapshots)
        self.sessions.keep(session, left, now_s)
        if session.last_until_s > now_s and kv.keys:
            ends = [snapshot.point.key for snapshot in snapshots if snapshot.point.key]
            half = [self.pool.key_of(page) for page in kv.pages[len(kv.keys) :]]
            keys = [*map(kv.keys.__getitem__, range(len(kv.keys))), *filter(None, half), *ends]
            self.tier.lease(keys, session.last_until_s)
        self.prefixes.turn_kept(snapshots)

    def release(self, seq: Sequence) -> None:
        """Take all pages back unless they are offloaded."""
        self._release_copy_source(seq)
        self.prefixes.left(seq)
        if not self.offload_books.take(seq):
            for page in reversed(seq.kv.pages):  # the end of a prefix is evicted before its beginning
                self.pool.release(page)
        seq.kv.give_up_pages()

    def cancel_restores(self, seq: Sequence) -> bool:
        """Stop copying KV back for a sequence that leaves its row. True while running copies write to its pages."""
        return seq.kv.is_offloaded and self.offload_books.cancel_restores(seq)

    def copies_state(self, seq: Sequence) -> bool:
        """True while the state of a sequence that leaves its row is being copied to the host; begins that copy."""
        return self.prefixes.has_states and self.offload_books.copies_state(seq)

    def restore_state(self, seq: Sequence) -> None:
        """Copy the state of a sequence to its new row, if the state is on the host."""
        if seq.kv.offloaded.state is not NO_HOST_STATE:
            self.prefixes.row_overwritten(seq.row)
            self.offload_books.restore_state(seq)

    def drop_offloaded(self, seq: Sequence) -> None:
        """Discard the KV that a preempted sequence has offloaded, or would offload now."""
        seq.kv.wants_offload = False
        if seq.kv.is_offloaded and not seq.kv.pages:
            self.offload_books.drop(seq)

    # --- shared prompts -----------------------------------------------------------------------------------------------

    def share_prompt(self, seq: Sequence, version: int) -> bool:
        """Retain the prompt pages of a prefilled leader for its group; False if `version` cannot use them."""
        if seq.kv.oldest < self.prefixes.oldest_for(seq.group, version) or not self.prefixes.of_use(seq, version):
            return False
        shared = self.prefixes.share(seq, seq.kv.pages[: pages_for(seq.prompt_len, self.page_size)])
        if shared is None:
            return False
        for page in shared.pages:
            self.pool.retain(page)
        seq.group.shared_prompt = shared
        self.sharing.append(seq.group)
        return True

    def close_shared_prompt(self, group: Group) -> None:
        """Release a group's prompt pages."""
        if group.shared_prompt is not None:
            for page in group.shared_prompt.pages:
                self.pool.release(page)
            self.prefixes.unshare(group.shared_prompt)
            group.shared_prompt = None
            self.sharing.remove(group)

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        self.sessions.expire(now_s)
        self.tier.expire(now_s)

    # --- all sequences -----------------------------------------------------------------------------------------------

    def end_sharing(self) -> None:
        """Close all shared prompts and empty all sessions. After that only rows and offloaded sequences use pages."""
        for group in list(self.sharing):
            self.close_shared_prompt(group)
        self._empty_older(VERSION_END)

    def forget_older(self, oldest: int) -> None:
        """Drop KV of weights before the version `oldest`. Such pages stay in the pool, but are no longer found."""
        self._empty_older(oldest)
        self.tier.forget_older(oldest)

    def _empty_older(self, oldest: int) -> None:
        self.sessions.drop_older(oldest)
        self.prefixes.forget_older(oldest)

    def forget_all(self) -> None:
        """Drop cache, shared prompts and sessions, and their KV on the host, because it is no longer valid."""
        self.empty_pool()
        self.tier.forget_all()

    def empty_pool(self) -> None:
        """Drop cache, shared prompts and sessions; KV on the host stays."""
        self.end_sharing()
        self.prefixes.frontiers.clear()
        self.pool.forget_all()

    def check(self) -> None:
        """Assert that the books agree, and that only sessions use pages."""
        self.pool.check()
        self.sessions.check()
        self.offload_books.check()
        self.tier.check()
        cached = self.prefixes.check()
        used, kept = self.pool.used, self.sessions.count_alone(cached)
        assert used == kept, f"{used} pages are in use, {kept} of them by sessions and cached snapshots"
