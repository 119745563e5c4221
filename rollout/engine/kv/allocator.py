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

A page that another prefill computes next is not computed twice: that prefill's frontier is found by the page's key, and
the sequence waits without a page until the tokens that both have are launched (`Reusable.awaited`).

When it is settled, its pages go to its session (`keep_turn`), to the offload books or back to the pool (`release`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollout.engine.adapter_table import AdapterTable
from rollout.engine.kv.offload import OffloadBooks
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.sequence.experts import ExpertPages
from rollout.engine.sequence.prefix_keys import PrefixKeys
from rollout.engine.sequence.sequence import Group, PromptShare, Sequence
from rollout.engine.sequence.sequence_kv import OffloadedKV
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

    @property
    def pages(self) -> list[int]:
        """The pages that have to stay as they are until the sequence has them, or a copy."""
        return self.shared if self.copied is None else [*self.shared, self.copied]

    def without_copy(self, page_size: int) -> Reusable:
        """The shared pages only."""
        tokens = len(self.shared) * page_size
        keys = None if self.keys is None else self.keys.fork(len(self.shared))
        return Reusable(self.shared, None, tokens, min(tokens, self.session_tokens), keys)


class PageAllocator:
    """Hands pages of one pool to sequences; `sessions` keep some of them between their turns."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: bool,
        sessions: Sessions,
        experts: ExpertPages | None = None,
        adapters: AdapterTable | None = None,
        offload_books: OffloadBooks | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.sessions = sessions
        self.experts = experts  # experts of tokens, where they are kept
        self.adapters = adapters
        self.offload_books = offload_books  # KV of preempted sequences, where it is kept
        self.sharing: list[Group] = []  # groups that hold a share, oldest first
        self._frontiers: dict[bytes, Sequence] = {}  # prefills under way, by the key of the page that comes next
        # Restored pages and the experts of their tokens, until the first step of the sequence is committed.
        self._restored_experts: dict[Sequence, tuple[list[int], np.ndarray]] = {}

    @property
    def available(self) -> int:
        """The most pages that can be allocated: pages that are not used, and pages of idle sessions."""
        return self.pool.available + self.sessions.pages

    @property
    def making_room(self) -> bool:
        """True while pages are being copied to the host, to be given to other sequences."""
        return self.offload_books is not None and (
            self.offload_books.outgoing > 0 or self.offload_books.send_unshared()
        )

    # --- admission ---------------------------------------------------------------------------------------------------

    def adapter_ready(self, seq: Sequence) -> bool:
        """True if the sequence has no adapter, or the adapter is in a slot. If not, the adapter is loaded or waits."""
        adapter = seq.group.adapter
        return adapter is None or (self.adapters is not None and self.adapters.ready(adapter))

    def find_reusable(self, seq: Sequence, version: int) -> Reusable | None:
        """KV that `seq` need not compute, now or once another prefill has; None if it has KV of its own to restore."""
        return None if seq.kv.offloaded is not None else self._find_reusable(seq, seq.history(), version)

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
        new = self._retain_and_allocate(reusable.pages, wanted - len(reusable.shared), spare)
        if new is None and reusable.copied is not None:
            reusable = reusable.without_copy(self.page_size)  # the page to copy may be the one that is short
            new = self._retain_and_allocate(reusable.pages, wanted - len(reusable.shared), spare)
        if new is None:
            return False
        kv = seq.kv
        kv.add_pages([*reusable.shared, *new], self.page_size)
        kv.prefill_tokens = tokens
        kv.copy_source = reusable.copied
        kv.keys = reusable.keys
        kv.length = kv.uniform = reusable.tokens
        kv.version, kv.adapter_edition = version, seq.adapter_use.edition
        self._take_adapter_slot(seq)
        if seq.group.session is not None:
            self.sessions.hand_over(seq.group.session, reusable.session_tokens)
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
        kv.add_pages((page for page in pages if page is not None), self.page_size)
        kv.prefill_tokens = seq.history()
        kv.length, kv.uniform, kv.keys = offloaded.length, offloaded.uniform, offloaded.keys
        kv.version = offloaded.version if offloaded.adapter_edition == seq.adapter_use.edition else -1
        kv.adapter_edition = offloaded.adapter_edition
        self._take_adapter_slot(seq)
        self.offload_books.restore(seq, targets)
        return True

    def _take_adapter_slot(self, seq: Sequence) -> None:
        if seq.group.adapter is not None:
            assert self.adapters is not None
            seq.adapter_use.slot = self.adapters.take(seq.group.adapter)

    def _pages_wanted(self, seq: Sequence, tokens: int) -> int:
        """Pages for a sequence that has `tokens` tokens: one more than they fill, within what it can ever need."""
        most = pages_for(seq.prompt_len + seq.max_tokens - 1, self.page_size)
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
            enough = self.sessions.evict_one()
        if not enough and self.offload_books is not None:
            self.offload_books.send_unshared()  # pages that sessions gave up may have no other users left
        return enough

    def _find_reusable(self, seq: Sequence, tokens: np.ndarray, version: int) -> Reusable:
        """KV that `seq` need not compute: the prompt of its group, else KV of its session or, if more, of the cache."""
        share = seq.group.share
        full = (len(tokens) - 1) // self.page_size  # the page of the last token is never shared: it is written again
        if share is not None and share.version == version and not seq.tokens:
            keys = share.keys.fork(full) if share.keys else None
            return Reusable(share.pages[:full], share.pages[full], len(tokens) - 1, keys=keys)
        if seq.scores_prompt:  # log-probs of the prompt need a forward of the whole prompt
            return Reusable(keys=self._no_keys(seq, version) if self.prefix_cache else None)
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
            found.copied, found.tokens = None, len(found.shared) * self.page_size
        else:
            key, page = self._find_last(keys, seq.content_between(full * self.page_size, len(tokens)), len(tokens))
            if page is not None and found.tokens < len(tokens) - 1:
                found.copied, found.tokens = page, len(tokens) - 1
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
        theirs = other.kv.prefill_tokens
        if theirs is None or other.priority < seq.priority:
            return None
        most = min(len(theirs), len(tokens))
        differ = np.flatnonzero(theirs[:most] != tokens[:most])
        same = int(differ[0]) if len(differ) else most
        if same == len(theirs) == len(tokens):
            return other, same
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
        return Reusable(kv.pages[:full], copied, same, same, keys)

    # --- while the sequence runs -------------------------------------------------------------------------------------

    def try_grow(self, seq: Sequence) -> bool:
        """One page more for `seq`; False if no page is free and no session has one."""
        while (page := self.pool.allocate()) is None:
            if not self.sessions.evict_one():
                return False
        seq.kv.add_pages([page], self.page_size)
        return True

    def chunk_launched(self, seq: Sequence, version: int) -> None:
        """A step in flight computes more of the sequence's KV, up to its length."""
        self._release_copy_source(seq)
        if seq.kv.offloaded is not None:
            self._restored(seq, seq.kv.offloaded, version)
        self.remember(seq, seq.kv.length, version)
        self._move_frontier(seq, version)

    def _move_frontier(self, seq: Sequence, version: int) -> None:
        """Its prefill computes another page next, or is all launched: then the tail of the prompt can be found."""
        self.drop_frontier(seq)
        kv, page_size = seq.kv, self.page_size
        if kv.keys is None or kv.prefill_tokens is None or kv.version != version or kv.uniform < kv.length:
            return
        start, end = len(kv.keys) * page_size, len(kv.prefill_tokens)
        if start == end:
            return
        key = kv.keys.next_key if start + page_size <= end else kv.keys.tail_key
        page_key = key(seq.content_between(start, min(start + page_size, end)))
        if kv.length == end:
            self.pool.remember_tail(page_key, kv.pages[start // page_size])
        else:
            kv.frontier = page_key
            other = self._frontiers.get(page_key)
            if other is None or other.priority < seq.priority:  # of lower priority: nobody waits for it
                self._frontiers[page_key] = seq

    def drop_frontier(self, seq: Sequence) -> None:
        """Nobody waits for this prefill any more: it has gone on, or it stops."""
        key, seq.kv.frontier = seq.kv.frontier, None
        if key is not None and self._frontiers.get(key) is seq:
            del self._frontiers[key]

    def _release_copy_source(self, seq: Sequence) -> None:
        """The copy is enqueued, or not needed any more: later writes to the source come after it."""
        if seq.kv.copy_source is not None:
            self.pool.release(seq.kv.copy_source)
            seq.kv.copy_source = None

    def _restored(self, seq: Sequence, offloaded: OffloadedKV, version: int) -> None:
        """The sequence goes on with its restored KV."""
        assert self.offload_books is not None
        kv = seq.kv
        if self.experts is not None:
            host_pages, pages = [host for host, _ in offloaded.restored], [page for _, page in offloaded.restored]
            self._restored_experts[seq] = pages, self.experts.stowed(host_pages)
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

    def note_experts(self, prompts: list[tuple[Sequence, tuple[int, int] | None]], record: np.ndarray) -> None:
        """A step is committed: `record` has the experts of its tokens.

        `prompts` are the sequences whose prompts it computed, each with the page that it copied: (source, target).
        """
        assert self.experts is not None, "a slot has a record only where experts are kept"
        for seq, copied in prompts:
            if copied is not None:
                self.experts.copy(*copied)
            if seq in self._restored_experts:
                self.experts.put(*self._restored_experts.pop(seq))
        self.experts.take(record)

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
        left = SessionKV(seq.history()[:known], kv.pages, version, kv.keys, kv.adapter_edition)
        self.sessions.keep(seq.group.session, left, now_s)

    def release(self, seq: Sequence) -> None:
        """Take the adapter's slot back, and all pages unless they are offloaded."""
        self._release_copy_source(seq)
        if seq.adapter_use.slot is not None:
            assert self.adapters is not None
            self.adapters.give(seq.adapter_use.slot)
            seq.adapter_use.slot = None
        if self.experts is not None and seq.routing is not None and not seq.finalized:
            seq.routing.keep(self.experts, seq.kv.pages, seq.consumed)
        if self.offload_books is None or not self.offload_books.take(seq):
            for page in seq.kv.pages:
                self.pool.release(page)
        seq.kv.give_up_pages()

    def cancel_restores(self, seq: Sequence) -> bool:
        """Copy no more KV back for a sequence that leaves its row; True while copies under way write to its pages."""
        books = self.offload_books
        return books is not None and seq.kv.offloaded is not None and books.cancel_restores(seq)

    def drop_offloaded(self, seq: Sequence) -> None:
        """The KV that a preempted sequence has offloaded, or would offload now, is of no use."""
        seq.kv.wants_offload = False
        if self.offload_books is not None and seq.kv.offloaded is not None and not seq.kv.pages:
            self.offload_books.drop(seq)

    # --- group shares ------------------------------------------------------------------------------------------------

    def open_share(self, seq: Sequence, version: int) -> bool:
        """Retain the prompt pages of a prefilled leader for its group; False if its KV is not all of `version`."""
        if seq.kv.version != version or seq.kv.uniform < seq.prompt_len:
            return False
        pages = seq.kv.pages[: pages_for(seq.prompt_len, self.page_size)]
        for page in pages:
            self.pool.retain(page)
        seq.group.share = PromptShare(pages, version, seq.kv.keys)
        self.sharing.append(seq.group)
        return True

    def close_share(self, group: Group) -> None:
        """Release a group's prompt pages."""
        if group.share is not None:
            for page in group.share.pages:
                self.pool.release(page)
            group.share = None
            self.sharing.remove(group)

    # --- all sequences -----------------------------------------------------------------------------------------------

    def end_sharing(self) -> None:
        """Close all shares and empty all sessions: only rows and offloaded sequences use pages after that."""
        for group in list(self.sharing):
            self.close_share(group)
        self.sessions.drop_all()

    def forget_all(self) -> None:
        """Drop cache, shares and sessions: their KV is of no use any more."""
        self.end_sharing()
        self._frontiers.clear()
        self.pool.forget_all()

    def check(self) -> None:
        """Assert that the books agree, and that only sessions use pages."""
        self.pool.check()
        self.sessions.check()
        if self.adapters is not None:
            self.adapters.check_unused()
        assert not self._frontiers, "a prefill is waited for"
        assert not self._restored_experts, "experts of restored pages wait for a commit"
        if self.offload_books is not None:
            self.offload_books.check()
        used, kept = self.pool.used, self.sessions.pages
        assert used == kept, f"{used} pages are in use, {kept} of them by sessions"
