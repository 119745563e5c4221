"""Chooses the pages that a sequence gets or shares, and takes them back. The scheduler decides what runs.

A sequence gets its pages from these sources, in `try_admit` and afterwards in `try_grow`:

    shared prompt    the prompt that another completion of its group has prefilled: the full pages are shared; the page
                     of the last token is copied, because the sequence writes there; only that token is computed again
    session          the KV of the turn before, while its tokens are the same: the full pages are shared; the
                     page in which the tokens begin to differ is copied
    prefix cache     full pages that are found by their key; shared. If the whole prompt is there, or the end of a turn
                     in the next page, that page is copied
    own pages        new pages for the rest of its tokens, and one more; later one at a time
    a tier           the KV that a preempted sequence had, instead of all the above (`tier`)

`prefixes` finds the first three. What it finds in a tier is first copied to the pool (`fetch_for`). When a sequence is
settled, its pages go to its session (`keep_turn`), to the tier or back to the pool (`release`).
"""

from rollout.engine.kv.prefixes import Prefixes, Reusable
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.tier import Fetch
from rollout.engine.messages.requests import VERSION_END
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.sequence.sequence_kv import NO_KEYS, SessionKV


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PageAllocator:
    """Hands pages of one pool to sequences; `sessions` keep some of them between their turns."""

    def __init__(self, sessions: Sessions, prefixes: Prefixes) -> None:
        self.pool = prefixes.pool
        self.page_size = prefixes.page_size
        self.sessions = sessions
        self.prefixes = prefixes
        self.tier = prefixes.tier
        self.sharing: list[Group] = []  # groups with a shared prompt, oldest first
        self.given_way = 0  # sessions and snapshots that made room for others, since start

    @property
    def available(self) -> int:
        """The most pages that can be allocated: unused pages, and pages of idle sessions and cached snapshots."""
        return self.pool.available + self.prefixes.evictable

    @property
    def admissible(self) -> list[int]:
        """Pages of each rank that a sequence without a row can get now, without those being copied to a tier."""
        pool, prefixes, writing = self.pool, self.prefixes, self.tier.writing
        return [pool.available_of(rank) + prefixes.evictable_of(rank) - writing for rank in range(pool.ranks)]

    # --- admission ---------------------------------------------------------------------------------------------------

    def find_reusable(self, seq: Sequence, version: int, rows: list[int]) -> Reusable:
        """KV that `seq` need not compute, now or after another prefill; none if it has KV of its own to restore.

        Where rows are dealt to ranks, this also chooses the rank of `seq`. Ranks are compared by: room; for a new
        session, room without eviction; KV of more than half of the tokens; free pages. `rows`: running rows of each
        rank.
        """
        if seq.kv.is_offloaded:
            return Reusable()
        if self.pool.ranks == 1:
            return self.prefixes.find(seq, version)
        found = []
        for rank in range(self.pool.ranks):
            seq.kv.rank = rank
            found.append(self.prefixes.find(seq, version))
        half = (seq.prompt_len + len(seq.tokens)) // 2
        new_session = seq.group.session is not None and seq.group.session.kv is None

        def order(rank: int) -> tuple[bool, bool, bool, int]:
            pages, free, evictable = found[rank].pages, self.pool.available_of(rank), self.prefixes.evictable_of(rank)
            wanted = self.pages_for_new(seq, found[rank]) + rows[rank]
            cached = sum(not self.pool.refs[page] for page in pages)  # `free` counts them
            fits = free + evictable - self.sessions.count(pages) - cached >= wanted
            return fits, new_session and free - cached >= wanted, found[rank].tokens > half, free

        seq.kv.rank = max(range(self.pool.ranks), key=order)
        return found[seq.kv.rank]

    def pages_for_new(self, seq: Sequence, reusable: Reusable) -> int:
        """Pages that `seq` needs in addition to its shared pages; `reusable` was just found for it."""
        return self.pages_wanted(seq) - len(reusable.shared)

    def fetch_for(self, seq: Sequence, reusable: Reusable, version: int, spare: int) -> Fetch | Reusable:
        """The fetch that a sequence must wait for, if more of what was just found for it is in a tier.

        Otherwise the pages that it can use without a tier: `reusable`, or less where sessions gave way without making
        enough room.
        """
        if reusable.beyond is None:
            return reusable
        oldest, given_way = self.prefixes.oldest_for(seq.group, version), self.given_way
        fetch = self.tier.fetch_for(self, seq, reusable.beyond, oldest, spare)
        if fetch is None and self.given_way > given_way:  # the pages that were found may have given way
            return self.prefixes.find(seq, version)
        return fetch or reusable

    def try_admit(self, seq: Sequence, reusable: Reusable, version: int, spare: int) -> bool:
        """Give `seq` the pages of its tokens and one more, if `spare` pages stay available after that.

        `reusable` was just found for it. On success its `kv` has the pages, their keys, the page to copy, and the
        number of tokens with KV in the pages or on the way there.
        """
        if seq.kv.is_offloaded:
            return self.tier.restore(self, seq, version, spare)
        tokens, wanted = seq.history(), self.pages_wanted(seq)
        self.prefixes.retain(reusable)
        shared = reusable.shared
        for page in shared:  # a session that gives way, but not enough, would lose its pages without keys
            self.pool.retain(page)
        new = self.claim(reusable.pages, wanted - len(shared), spare, seq.kv.rank)
        if new is None:
            self.prefixes.release(reusable)
        if new is None and reusable.copied:
            reusable = reusable.without_copy(self.page_size)  # the page to copy may be the one that is short
            new = self.claim(reusable.pages, wanted - len(reusable.shared), spare, seq.kv.rank)
        for page in reversed(shared):
            self.pool.release(page, unchanged=new is None)
        if new is None:
            return False
        kv = seq.kv
        kv.snapshots.load_from = reusable.place
        kv.hit = reusable.hit if reusable.tokens else None
        kv.add_pages([*reusable.shared, *new], self.page_size)
        kv.prefill_tokens = tokens
        kv.copy_source = reusable.copied
        kv.keys = reusable.keys
        self.tier.in_pool(kv.keys)
        kv.length, kv.oldest, kv.edition = reusable.tokens, version, seq.group.variant.edition
        if self.prefixes.max_age:
            found = self.prefixes.versions(reusable)
            kv.oldest = min((oldest for oldest, _ in found), default=version)
            kv.note_found(len(seq.tokens), found)
        if seq.group.session is not None:
            self.sessions.hand_over(seq.group.session, reusable.session_tokens)
        self.prefixes.admitted(seq, version)
        return True

    def pages_wanted(self, seq: Sequence) -> int:
        """Pages for a sequence at its admission: one more than its tokens fill, but no page that it can never need."""
        tokens = seq.prompt_len + len(seq.tokens)
        most = pages_for(max(tokens, seq.prompt_len + seq.max_tokens - 1), self.page_size)
        return min(pages_for(tokens, self.page_size) + 1, most)

    def claim(self, retained: list[int], count: int, spare: int, rank: int = 0) -> list[int] | None:
        """Retain pages and allocate `count` new ones. None, without a change, if fewer than `spare` would be left."""
        for page in retained:
            self.pool.retain(page)
        if not self._make_room(count + spare, retained, rank):
            for page in retained:  # else pages that a tier has looked at would not be there at the next attempt
                self.pool.release(page, unchanged=True)
            return None
        new = [self.pool.allocate(rank) for _ in range(count)]
        assert all(new), "availability was checked"
        return new

    def _make_room(self, pages: int, retained: list[int], rank: int) -> bool:
        """Make `pages` pages of a rank available, if necessary from idle sessions. False if there are too few.

        Pages of sessions that are `retained` for the new sequence would not become available.
        """
        pool = self.pool
        most = pool.available_of(rank) + self.prefixes.evictable_of(rank) - self.tier.writing
        enough = most - self.sessions.count(retained) >= pages  # sessions give way only if that is enough
        while enough and pool.available_of(rank) - pool.being_copied < pages:
            enough = self.prefixes.evict_one(rank)
            self.given_way += enough
        if not enough:
            self.tier.send_unshared()  # pages that sessions gave up may have no other users left
        return pool.available_of(rank) - self.tier.writing >= pages

    # --- while the sequence runs -------------------------------------------------------------------------------------

    def try_grow(self, seq: Sequence) -> bool:
        """Allocate one more page for `seq`. False if no page is free and no session has one."""
        while not (page := self.pool.allocate(seq.kv.rank)):
            if not self.prefixes.evict_one(seq.kv.rank):
                return False
        seq.kv.add_pages([page], self.page_size)
        return True

    def chunk_launched(self, seq: Sequence, version: int) -> None:
        """Note that a step in flight computes more of the sequence's KV, up to its length."""
        self._release_copy_source(seq)
        if seq.kv.is_offloaded:
            self.tier.restored(seq)
            self.prefixes.restored(seq, version)
        self.prefixes.launched(seq, version)

    def _release_copy_source(self, seq: Sequence) -> None:
        """Release the sources of copies that are enqueued or no longer needed: later writes come after the copies."""
        if seq.kv.copy_source:
            self.pool.release(seq.kv.copy_source)
            seq.kv.copy_source = 0
        self.prefixes.loaded(seq)

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
        # Weights or variant may have changed while its last steps were in flight; what is offloaded is in no page yet.
        if not self.prefixes.of_use(seq, version) or seq.finish.reason == "error" or kv.is_offloaded:
            known = 0
        self.prefixes.remember_turn(seq, known, version)
        if session is None:
            if not seq.group.request.lease_s or kv.keys is NO_KEYS or self.prefixes.has_states:
                return
            session = self.sessions.unnamed(seq.group.request, seq.index)
        known, snapshots = self.prefixes.turn_end(seq, known)
        tokens = seq.identity(seq.history())[:known]
        left = SessionKV(tokens, kv.pages, kv.oldest, kv.keys, kv.edition, snapshots)
        self.sessions.keep(session, left, now_s)
        if session.last_until_s > now_s and kv.keys:
            ends = [snapshot.point.key for snapshot in snapshots if snapshot.point.key]
            half = [self.pool.key_of(page) for page in kv.pages[len(kv.keys) :]]
            keys = [*kv.keys, *filter(None, half), *ends]
            self.tier.lease(keys, session.last_until_s)
        self.prefixes.turn_kept(snapshots)

    def release(self, seq: Sequence) -> None:
        """Take all pages back, unless a tier takes them."""
        self._release_copy_source(seq)
        self.prefixes.left(seq)
        if not self.tier.take(seq):
            for page in reversed(seq.kv.pages):  # the end of a prefix is evicted before its beginning
                self.pool.release(page)
        seq.kv.give_up_pages()

    # --- shared prompts -----------------------------------------------------------------------------------------------

    def share_prompt(self, seq: Sequence, version: int) -> bool:
        """Retain the prompt pages of a prefilled first member for its group; False if `version` cannot use them."""
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
        """Drop cache, shared prompts and sessions, and their KV in a tier, because it is no longer valid."""
        self.empty_pool()
        self.tier.forget_all()

    def empty_pool(self) -> None:
        """Drop cache, shared prompts and sessions; KV in a tier stays."""
        self.end_sharing()
        self.prefixes.frontiers.clear()
        self.pool.forget_all()
        self.tier.pool_emptied()

    def check(self) -> None:
        """Assert that the books agree, and that only sessions use pages."""
        self.pool.check()
        self.sessions.check()
        self.tier.check()
        cached = self.prefixes.check()
        used, kept = self.pool.used, self.sessions.count_alone(cached)
        assert used == kept, f"{used} pages are in use, {kept} of them by sessions and cached snapshots"
