"""Which pages a sequence gets, which it shares, and who gets them afterwards. The scheduler decides who runs.

A sequence gets its pages from these sources, in `try_admit` and afterwards in `try_grow`:

    group share      the prompt that another completion of its group has prefilled: the full pages are shared; the page
                     of the last token is copied, because the sequence writes there; only that token is computed again
    session          what the turn before has left, as far as its tokens are the same: the full pages are shared; the
                     page in which the tokens begin to differ is copied
    prefix cache     full pages that are found by their key; shared. If the whole prompt is there, its last page is
                     copied, too
    own pages        new ones for the rest of its tokens, and one more; after that one at a time
    offloaded KV     what it had before it was preempted, instead of all the above (`offload`)

A model with states can use KV of a prefix only together with a snapshot of the state after it (`snapshots`). So a group
share has one, a session has those of its prompt and of its end, and the prefix cache is searched for prefixes that end
at one. Every prefill saves one before the last token of its prompt, if there is a place.

A page that another prefill computes next is not computed twice: that prefill's frontier is found by the page's key, and
the sequence waits without a page until the tokens that both have are launched (`Reusable.awaited`).

When it is settled, its pages go to its session (`keep_turn`), to the offload books or back to the pool (`release`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from rollout.engine.kv.offload import OffloadBooks
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.sequence.prefix_keys import PrefixKeys
from rollout.engine.sequence.sequence import Group, PromptShare, Sequence
from rollout.engine.sequence.sequence_kv import OffloadedKV, PlannedSnapshot, Point, PrefixHit, Snapshot
from rollout.engine.sequence.session import SessionKV


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


@dataclass(slots=True)
class Reusable:
    """KV of a sequence's first tokens that is in the pool already."""

    shared: list[int] = field(default_factory=list)  # full pages, to be shared
    copied: int | None = None  # the page after them, to be copied; None where the last shared page is full
    tokens: int = 0  # whose KV the sequence can use
    session_tokens: int = 0  # whose KV the session has
    keys: PrefixKeys | None = None  # of the shared pages
    awaited: tuple[Sequence, int] | None = None  # computes more of it: up to this number of tokens
    place: int | None = None  # of the snapshot of the state after these tokens, which is loaded
    hit: PrefixHit = "pages"  # where it was found

    @property
    def pages(self) -> list[int]:
        """The pages that have to stay as they are until the sequence has them, or a copy."""
        return self.shared if self.copied is None else [*self.shared, self.copied]

    def without_copy(self, page_size: int) -> Reusable:
        """The shared pages only; nothing where a state belongs to the page to copy."""
        if self.place is not None:
            return Reusable(keys=None if self.keys is None else self.keys.fork(0))
        tokens = len(self.shared) * page_size
        keys = None if self.keys is None else self.keys.fork(len(self.shared))
        hit: PrefixHit = "pages" if self.hit == "prompt_end" else self.hit
        return Reusable(self.shared, None, tokens, min(tokens, self.session_tokens), keys, hit=hit)


class PageAllocator:
    """Hands pages of one pool to sequences; `sessions` keep some of them between their turns."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: bool,
        sessions: Sessions,
        offload_books: OffloadBooks | None = None,
        snapshots: Snapshots | None = None,
        mirrors: Seq[PageMirror] = (),
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.sessions = sessions
        self.offload_books = offload_books  # KV of preempted sequences, where it is kept
        self.snapshots = snapshots  # for models with states
        self.sharing: list[Group] = []  # groups that hold a share, oldest first
        #: Prefills under way, by the key of the page that comes next, or of the snapshot.
        self._frontiers: dict[bytes, Sequence] = {}
        self._mirrors = mirrors

    @property
    def available(self) -> int:
        """The most pages that can be allocated: pages that are not used, of idle sessions and of cached snapshots."""
        if self.snapshots is None:
            return self.pool.available + self.sessions.pages
        return self.pool.available + self.sessions.count_alone(self.snapshots.pages)

    @property
    def making_room(self) -> bool:
        """True while pages are being copied to the host, to be given to other sequences."""
        return self.offload_books is not None and (
            self.offload_books.outgoing > 0 or self.offload_books.send_unshared()
        )

    # --- admission ---------------------------------------------------------------------------------------------------

    def find_reusable(self, seq: Sequence, version: int) -> Reusable | None:
        """KV that `seq` need not compute, now or once another prefill has; None if it has KV of its own to restore."""
        return None if seq.kv.offloaded is not None else self._find_reusable(seq, seq.identity(seq.history()), version)

    def try_admit(self, seq: Sequence, reusable: Reusable | None, version: int, spare: int) -> bool:
        """Give `seq` the pages of its tokens and one more, if `spare` pages stay available after that.

        `reusable` was just found for it. On success its `kv` has its pages, their keys, the page to copy, and the
        number of tokens whose KV is in its pages, or is being copied there.
        """
        if reusable is None:
            assert seq.kv.offloaded is not None
            return self._try_restore(seq, seq.kv.offloaded, spare)
        tokens = seq.history()
        wanted = self._pages_wanted(seq, len(tokens))
        if reusable.place is not None and self.snapshots is not None:
            self.snapshots.retain(reusable.place)  # making room may evict the session that has it
        new = self._retain_and_allocate(reusable.pages, wanted - len(reusable.shared), spare)
        if new is None and reusable.place is not None and self.snapshots is not None:
            self.snapshots.release(reusable.place)
        if new is None and reusable.copied is not None:
            reusable = reusable.without_copy(self.page_size)  # the page to copy may be the one that is short
            new = self._retain_and_allocate(reusable.pages, wanted - len(reusable.shared), spare)
        if new is None:
            return False
        kv = seq.kv
        kv.load_from = reusable.place
        kv.hit = reusable.hit if reusable.tokens else None
        kv.add_pages([*reusable.shared, *new], self.page_size)
        kv.prefill_tokens = tokens
        kv.copy_source = reusable.copied
        kv.keys = reusable.keys
        kv.length = kv.uniform = reusable.tokens
        kv.version, kv.adapter_edition = version, seq.adapter_use.edition
        if seq.group.session is not None:
            self.sessions.hand_over(seq.group.session, reusable.session_tokens)
        if self.snapshots is not None:
            self._plan_snapshot(seq)
        self._move_frontier(seq, version)
        return True

    def _try_restore(self, seq: Sequence, offloaded: OffloadedKV, spare: int) -> bool:
        """Give a preempted sequence pages for its KV; what has left the pool is copied back."""
        assert self.offload_books is not None
        if self.available <= spare and not self.offload_books.send_unshared():
            return False
        found = self.offload_books.pool_pages(offloaded)
        shared = [page for page in found if page is not None]
        wanted = self._pages_wanted(seq, seq.prompt_len + len(seq.tokens))
        new = self._retain_and_allocate(shared, wanted - len(shared), spare)
        if new is None:
            return False
        missing = [i for i, page in enumerate(found) if page is None]
        targets = list(zip(missing, new[: len(missing)], strict=True))
        pages = [*found, *new[len(missing) :]]
        for i, page in targets:
            pages[i] = page
        kv = seq.kv
        kv.hit = None
        kv.add_pages((page for page in pages if page is not None), self.page_size)
        kv.prefill_tokens = seq.history()
        kv.length, kv.uniform, kv.keys = offloaded.length, offloaded.uniform, offloaded.keys
        kv.version = offloaded.version if offloaded.adapter_edition == seq.adapter_use.edition else -1
        kv.adapter_edition = offloaded.adapter_edition
        self.offload_books.restore(seq, targets)
        return True

    def _pages_wanted(self, seq: Sequence, tokens: int) -> int:
        """Pages for a sequence that has `tokens` tokens: one more than they fill, within what it can ever need."""
        most = pages_for(max(tokens, seq.prompt_len + seq.max_tokens - 1), self.page_size)
        return min(pages_for(tokens, self.page_size) + 1, most)

    def _retain_and_allocate(self, retained: list[int], count: int, spare: int) -> list[int] | None:
        """Retain pages and allocate `count` new ones; None and no change if `spare` more would not be left."""
        for page in retained:
            self.pool.retain(page)
        if not self._make_room(count + spare, retained):
            for page in retained:
                self.pool.release(page)
            return None
        new = [page for page in (self.pool.allocate() for _ in range(count)) if page is not None]
        assert len(new) == count, "availability was checked"
        return new

    def _make_room(self, pages: int, retained: list[int]) -> bool:
        """Make `pages` pages available, at the cost of idle sessions if need be; False if that is not enough.

        Pages of sessions that are `retained` for the new sequence would not become available.
        """
        if self.pool.available >= pages:
            return True
        enough = self.available - self.sessions.count(retained) >= pages  # else sessions would lose theirs in vain
        while enough and self.pool.available < pages:
            enough = self._evict_one()
        if not enough and self.offload_books is not None:
            self.offload_books.send_unshared()  # pages that sessions gave up may have no other users left
        return enough

    def _evict_one(self) -> bool:
        """Have an idle session, or a cached snapshot that keeps a page, give up its pages; False if there is none."""
        return self.sessions.evict_one() or (self.snapshots is not None and self.snapshots.evict_page())

    def _find_reusable(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        """KV that `seq` need not compute: the prompt of its group, else KV of its session or, if more, of the cache."""
        share = seq.group.share
        full = (len(tokens) - 1) // self.page_size  # the page of the last token is never shared: it is written again
        if share is not None and share.version == version and not seq.tokens:
            keys = share.keys.fork(full) if share.keys else None
            copied = share.pages[full]
            return Reusable(share.pages[:full], copied, len(tokens) - 1, keys=keys, place=share.place, hit="group")
        if seq.scores_prompt:  # log-probs of the prompt need a forward of the whole prompt
            return Reusable(keys=self._no_keys(seq, version) if self.prefix_cache else None)
        if self.snapshots is not None:
            return self._find_snapshot(seq, tokens, version, self.snapshots)
        found = self._find_in_session(seq, tokens, version)
        if not self.prefix_cache:
            return found
        found.keys = keys = found.keys or self._no_keys(seq, version)
        for index in range(len(found.shared), full):
            key = keys.next_key(seq.content_between(index * self.page_size, (index + 1) * self.page_size))
            page = self.pool.find(key)
            if page is None:
                break
            found.shared.append(page)
            keys.append(key)
            found.copied, found.tokens, found.hit = None, len(found.shared) * self.page_size, "pages"
        else:
            key, page = self._find_last(keys, seq.content_between(full * self.page_size, len(tokens)), len(tokens))
            if page is not None and found.tokens < len(tokens) - 1:
                found.copied, found.tokens, found.hit = page, len(tokens) - 1, "prompt_end"
        if found.tokens < len(tokens) - 1 and (other := self._frontiers.get(key)) is not None:
            found.awaited = self._awaited(seq, tokens, other, found.tokens)
        return found

    def _find_last(self, keys: PrefixKeys, content: bytes, tokens: int) -> tuple[bytes, int | None]:
        """The key of the page that holds the last token, and the page with it; a full one has the key of a full one."""
        if tokens % self.page_size == 0:
            key = keys.next_key(content)
            return key, self.pool.find(key)
        key = keys.tail_key(content)
        return key, self.pool.find_tail(key)

    def _awaited(self, seq: Sequence, tokens: np.ndarray, other: Sequence, found: int) -> tuple[Sequence, int] | None:
        """The prefill of `other` and the tokens of it that `seq` can use, if these are more than it has `found`.

        A sequence does not wait for one of lower priority, which may itself wait for long.
        """
        if other.kv.prefill_tokens is None or other.priority < seq.priority:
            return None
        theirs = other.identity(other.kv.prefill_tokens)
        most = min(len(theirs), len(tokens))
        differ = np.flatnonzero(theirs[:most] != tokens[:most])
        same = int(differ[0]) if len(differ) else most
        if same == len(tokens) and (same == len(theirs) or same % self.page_size == 0):
            return other, same  # its last page will be copied
        usable = min(same, len(tokens) - 1) // self.page_size * self.page_size
        return (other, usable) if usable > max(found, other.kv.length) else None

    def _no_keys(self, seq: Sequence, version: int) -> PrefixKeys:
        return PrefixKeys(version, self.page_size, seq.adapter_use.edition)

    def _find_in_session(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        if seq.group.session is None:
            return Reusable()
        kv, same = self.sessions.match(seq.group.session, tokens, version, seq.adapter_use.edition)
        if kv is None:
            return Reusable()
        full = same // self.page_size
        copied = kv.pages[full] if same % self.page_size else None
        keys = kv.keys.fork(full) if kv.keys is not None else None
        return Reusable(kv.pages[:full], copied, same, same, keys, hit="turn_end")

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _find_snapshot(self, seq: Sequence, tokens: np.ndarray, version: int, snapshots: Snapshots) -> Reusable:
        """The longest known prefix of `tokens` that ends at a snapshot, in the session or in the cache."""
        most, page_size = len(tokens) - 1, self.page_size
        found = self._find_snapshot_in_session(seq, tokens, version)
        if not self.prefix_cache:
            return found
        keys, pages, known = self._no_keys(seq, version), list[int](), True
        found.keys = found.keys or keys.fork(0)
        expected = found.tokens
        for start in range(0, most + 1, page_size):
            for after in snapshots.tokens_after(keys.last):
                end = start + after
                if end > most:
                    continue
                key = keys.tail_key(seq.content_between(start, end))
                cached, other = snapshots.find(key), self._frontiers.get(key)
                if cached is not None and known and end > found.tokens:
                    reused = Reusable(list(pages), cached.page, end, found.session_tokens, keys.fork(len(pages)))
                    reused.place, reused.awaited, reused.hit = cached.place, found.awaited, "prompt_end"
                    found = reused
                elif other is not None and other.priority >= seq.priority and end > expected:
                    found.awaited, expected = (other, end + 1), end
            if start + page_size > most or not (known or self._frontiers):
                break
            key = keys.next_key(seq.content_between(start, start + page_size))
            page = self.pool.find(key)
            known = known and page is not None
            if known and page is not None:
                pages.append(page)
            keys.append(key)
        if expected <= found.tokens:
            found.awaited = None
        return found

    def _find_snapshot_in_session(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        if seq.group.session is None:
            return Reusable()
        kv, same = self.sessions.match(seq.group.session, tokens, version, seq.adapter_use.edition)
        assert self.snapshots is not None
        void = self.snapshots.is_void
        known = () if kv is None else kv.snapshots
        snapshot = next((s for s in known if s.tokens <= same and not void(s.place)), None)
        if kv is None or snapshot is None:
            return Reusable()
        full, after = divmod(snapshot.tokens, self.page_size)
        keys = None if kv.keys is None else kv.keys.fork(full)
        copied = kv.pages[full] if after else None
        hit: PrefixHit = "turn_end" if snapshot.tokens == len(kv.tokens) else "prompt_end"
        return Reusable(kv.pages[:full], copied, snapshot.tokens, snapshot.tokens, keys, place=snapshot.place, hit=hit)

    def _plan_snapshot(self, seq: Sequence) -> None:
        """Take a place for the snapshot before the last token of the prompt, if its prefill goes past that."""
        kv, tokens = seq.kv, seq.prompt_len - 1
        if kv.length >= tokens or not (self.prefix_cache or seq.group.followers or seq.group.session):
            return
        place = self._take_place(bool(seq.group.followers))
        if place is None:
            return
        point = None
        if kv.keys is not None:
            keys, (full, after) = kv.keys.fork(len(kv.keys)), divmod(tokens, self.page_size)
            for index in range(len(keys), full):
                start = index * self.page_size
                keys.append(keys.next_key(seq.content_between(start, start + self.page_size)))
            point = Point(keys.last, after, keys.tail_key(seq.content_between(tokens - after, tokens)))
        kv.planned_snapshot = PlannedSnapshot(place, tokens, point)

    def _take_place(self, evict_sessions: bool) -> int | None:
        assert self.snapshots is not None
        place = self.snapshots.take()
        while place is None and evict_sessions and self.sessions.evict_one():
            place = self.snapshots.take()
        return place

    def _snapshot_launched(self, seq: Sequence, version: int, snapshots: Snapshots) -> None:
        """If the chunk in flight began with the save of a snapshot: others may use it, if it is all of `version`."""
        kv, planned = seq.kv, seq.kv.planned_snapshot
        if planned is None or kv.length <= planned.tokens:
            return
        self.drop_frontier(seq)
        kv.planned_snapshot = None
        if kv.version != version or kv.uniform < kv.length:
            snapshots.release(planned.place)
            return
        kv.snapshot = Snapshot(planned.place, planned.tokens)
        if planned.point is not None:
            page = kv.pages[planned.tokens // self.page_size] if planned.point.after else None
            snapshots.keep(planned.point, planned.place, page)

    def _turn_snapshots(self, seq: Sequence, known: int, snapshots: Snapshots) -> tuple[Snapshot, ...]:
        """What the session of a settled turn can go on from, longest first; the caller has a reference to each place.

        The state of the row has seen `kv.length` tokens. If the last of them are none of the completion's, because it
        ended while they were in flight, only the snapshot of the prompt is left.
        """
        kv, kept = seq.kv, list[Snapshot]()
        if known == kv.length > 0 and seq.row_ready and (place := self._take_place(True)) is not None:
            snapshots.save_soon(seq.row, place)
            kept.append(Snapshot(place, known))
        if kv.snapshot is not None and kv.snapshot.tokens <= known:
            snapshots.retain(kv.snapshot.place)
            kept.append(kv.snapshot)
        return tuple(kept)

    # --- while the sequence runs -------------------------------------------------------------------------------------

    def try_grow(self, seq: Sequence) -> bool:
        """One page more for `seq`; False if no page is free and no session has one."""
        while (page := self.pool.allocate()) is None:
            if not self._evict_one():
                return False
        seq.kv.add_pages([page], self.page_size)
        return True

    def chunk_launched(self, seq: Sequence, version: int) -> None:
        """A step in flight computes more of the sequence's KV, up to its length."""
        self._release_copy_source(seq)
        if seq.kv.offloaded is not None:
            self._restored(seq, seq.kv.offloaded, version)
        self.remember(seq, seq.kv.length, version)
        if self.snapshots is not None:
            self._snapshot_launched(seq, version, self.snapshots)
        self._move_frontier(seq, version)

    def _move_frontier(self, seq: Sequence, version: int) -> None:
        """Its prefill computes another page next, or is all launched: then the tail of the prompt can be found."""
        self.drop_frontier(seq)
        kv, page_size = seq.kv, self.page_size
        if kv.keys is None or kv.prefill_tokens is None or kv.version != version or kv.uniform < kv.length:
            return
        if self.snapshots is not None:
            planned = kv.planned_snapshot
            if planned is not None and planned.point is not None:
                self.snapshots.expect(planned.point)
                self._set_frontier(seq, planned.point.key)
            return
        start, end = len(kv.keys) * page_size, len(kv.prefill_tokens)
        if start == end:
            return
        key = kv.keys.next_key if start + page_size <= end else kv.keys.tail_key
        page_key = key(seq.content_between(start, min(start + page_size, end)))
        if kv.length == end:
            self.pool.remember_tail(page_key, kv.pages[start // page_size])
        else:
            self._set_frontier(seq, page_key)

    def _set_frontier(self, seq: Sequence, key: bytes) -> None:
        seq.kv.frontier = key
        other = self._frontiers.get(key)
        if other is None or other.priority < seq.priority:  # a sequence does not wait for one of lower priority
            self._frontiers[key] = seq

    def drop_frontier(self, seq: Sequence) -> None:
        """Nobody waits for this prefill any more: it has gone on, or it stops."""
        key, seq.kv.frontier = seq.kv.frontier, None
        if key is not None and self.snapshots is not None:
            planned = seq.kv.planned_snapshot
            assert planned is not None and planned.point is not None
            self.snapshots.expect_no_more(planned.point)
        if key is not None and self._frontiers.get(key) is seq:
            del self._frontiers[key]

    def _release_copy_source(self, seq: Sequence) -> None:
        """The copies are enqueued, or not needed any more: later writes to the sources come after them."""
        if seq.kv.copy_source is not None:
            self.pool.release(seq.kv.copy_source)
            seq.kv.copy_source = None
        if seq.kv.load_from is not None and self.snapshots is not None:
            self.snapshots.release(seq.kv.load_from)
            seq.kv.load_from = None

    def _restored(self, seq: Sequence, offloaded: OffloadedKV, version: int) -> None:
        """The sequence goes on with its restored KV."""
        assert self.offload_books is not None
        kv = seq.kv
        for mirror in self._mirrors:
            host_pages, pages = [host for host, _ in offloaded.restored], [page for _, page in offloaded.restored]
            mirror.restored(seq, host_pages, pages)
        if kv.keys is not None and kv.version == version:
            for i in range(len(kv.keys)):
                self.pool.remember(kv.keys[i], kv.pages[i])
        self.offload_books.counts.restored += 1
        self.offload_books.drop(seq)

    def remember(self, seq: Sequence, known: int, version: int) -> None:
        """Make full pages of the first `known` tokens findable, up to the first KV that is not of `version`."""
        kv = seq.kv
        if kv.keys is None or kv.version != version:
            return
        for index in range(len(kv.keys), min(known, kv.uniform) // self.page_size):
            start = index * self.page_size
            key = kv.keys.next_key(seq.content_between(start, start + self.page_size))
            kv.keys.append(key)
            self.pool.remember(key, kv.pages[index])

    # --- when the sequence leaves its row ----------------------------------------------------------------------------

    def keep_turn(self, seq: Sequence, version: int, now_s: float) -> None:
        """A finalized turn is settled: its session gets its KV, up to the first KV that is not of `version`."""
        assert seq.group.session is not None and seq.finish is not None
        kv = seq.kv
        known = min(kv.uniform, seq.prompt_len + len(seq.tokens))
        if kv.copy_source is not None:  # it ended before its first chunk: the page was not copied
            known -= known % self.page_size
        # Its adapter may have changed while its last steps, of the weights before, were in flight.
        current = kv.version == version and kv.adapter_edition == seq.adapter_use.edition
        if not current or seq.finish.reason == "error" or kv.offloaded is not None:  # offloaded: not in its pages yet
            known = 0
        self.remember(seq, known, version)
        if self.snapshots is not None:
            snapshots = self._turn_snapshots(seq, known, self.snapshots)
            known = snapshots[0].tokens if snapshots else 0
        else:
            snapshots = ()
        left = SessionKV(seq.identity(seq.history())[:known], kv.pages, version, kv.keys, kv.adapter_edition, snapshots)
        self.sessions.keep(seq.group.session, left, now_s)
        if self.snapshots is not None:
            for snapshot in snapshots:
                self.snapshots.release(snapshot.place)

    def release(self, seq: Sequence) -> None:
        """Take all pages back unless they are offloaded."""
        self._release_copy_source(seq)
        if self.snapshots is not None:
            for snapshot in (seq.kv.planned_snapshot, seq.kv.snapshot):
                if snapshot is not None:
                    self.snapshots.release(snapshot.place)
            seq.kv.planned_snapshot = seq.kv.snapshot = None
        if self.offload_books is None or not self.offload_books.take(seq):
            for page in seq.kv.pages:
                self.pool.release(page)
        seq.kv.give_up_pages()

    def cancel_restores(self, seq: Sequence) -> bool:
        """Copy no more KV back for a sequence that leaves its row; True while copies under way write to its pages."""
        books = self.offload_books
        return books is not None and seq.kv.offloaded is not None and books.cancel_restores(seq)

    def copies_state(self, seq: Sequence) -> bool:
        """True while the state of a sequence that leaves its row is being copied to the host; begins that copy."""
        return self.snapshots is not None and self.offload_books is not None and self.offload_books.copies_state(seq)

    def restore_state(self, seq: Sequence) -> None:
        """A sequence has got a row: copy its state there, if that is on the host."""
        if seq.kv.offloaded is not None and seq.kv.offloaded.host_place is not None:
            assert self.offload_books is not None and self.snapshots is not None
            self.snapshots.give_up_saves(seq.row)
            self.offload_books.restore_state(seq)

    def drop_offloaded(self, seq: Sequence) -> None:
        """The KV that a preempted sequence has offloaded, or would offload now, is of no use."""
        seq.kv.wants_offload = False
        if self.offload_books is not None and seq.kv.offloaded is not None and not seq.kv.pages:
            self.offload_books.drop(seq)

    # --- group shares ------------------------------------------------------------------------------------------------

    def open_share(self, seq: Sequence, version: int) -> bool:
        """Retain the prompt pages of a prefilled leader for its group; False if its KV is not all of `version`."""
        kv, place = seq.kv, None
        if kv.version != version or kv.uniform < seq.prompt_len:
            return False
        if self.snapshots is not None and seq.prompt_len > 1:  # before its only token a prompt has no state
            if kv.snapshot is None or kv.snapshot.tokens != seq.prompt_len - 1:
                return False
            place = kv.snapshot.place
            self.snapshots.retain(place)
        pages = seq.kv.pages[: pages_for(seq.prompt_len, self.page_size)]
        for page in pages:
            self.pool.retain(page)
        seq.group.share = PromptShare(pages, version, seq.kv.keys, place)
        self.sharing.append(seq.group)
        return True

    def close_share(self, group: Group) -> None:
        """Release a group's prompt pages."""
        if group.share is not None:
            for page in group.share.pages:
                self.pool.release(page)
            if group.share.place is not None and self.snapshots is not None:
                self.snapshots.release(group.share.place)
            group.share = None
            self.sharing.remove(group)

    # --- all sequences -----------------------------------------------------------------------------------------------

    def end_sharing(self) -> None:
        """Close all shares and empty all sessions: only rows and offloaded sequences use pages after that."""
        for group in list(self.sharing):
            self.close_share(group)
        self.sessions.drop_all()
        if self.snapshots is not None:
            self.snapshots.forget_all()

    def forget_all(self) -> None:
        """Drop cache, shares and sessions: their KV is of no use any more."""
        self.end_sharing()
        self._frontiers.clear()
        self.pool.forget_all()

    def check(self) -> None:
        """Assert that the books agree, and that only sessions use pages."""
        self.pool.check()
        self.sessions.check()
        assert not self._frontiers, "a prefill is waited for"
        if self.offload_books is not None:
            self.offload_books.check()
        cached: set[int] = set()
        if self.snapshots is not None:
            self.snapshots.check(self.sessions.places)
            cached = self.snapshots.pages
        used, kept = self.pool.used, self.sessions.count_alone(cached)
        assert used == kept, f"{used} pages are in use, {kept} of them by sessions and cached snapshots"
