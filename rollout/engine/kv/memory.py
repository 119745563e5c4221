"""Pages of sequences: admission, growth, sharing, release. The scheduler decides who; this decides which pages.

cached prefix      full pages found by key, shared
session            what the turn before has left, as far as its tokens are the same: full pages are shared, and the page
                   in which they begin to differ is copied
group share        a prefilled prompt: its full pages are shared, the page of its last token is copied (the copy is
                   the sequence's own, so that what it writes there is seen by nobody else), and only that last
                   token is computed again
own pages          the rest of the prompt and one page more; after that a page at a time
parked             what a preempted sequence had, and takes back instead of all this (see `parking`)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollout.engine.adapter_table import AdapterTable
from rollout.engine.kv.parking import Parked, Parking, Place
from rollout.engine.kv.pool import PagePool, PrefixKeys
from rollout.engine.kv.sessions import Held, Sessions
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.sequence import Group, PromptShare, Sequence
from rollout.engine.step.expert_trace import ExpertPages


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


@dataclass(slots=True)
class Found:
    """KV that is there already."""

    pages: list[int] = field(default_factory=list)  # to be shared
    keys: PrefixKeys | None = None
    source: int | None = None  # page to copy behind them
    tokens: int = 0  # whose KV all this is
    in_session: int = 0  # tokens that the session has the KV of


class SequenceMemory:
    """Hands pages of one pool to sequences; `sessions` keep some of them between their turns."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: bool,
        sessions: Sessions,
        experts: ExpertPages | None = None,
        adapters: AdapterTable | None = None,
        parking: Parking | None = None,
    ) -> None:
        self.pool = pool
        self.parking = parking  # of preempted sequences, where their KV is kept
        self.sessions = sessions
        self.experts = experts  # that tokens took, where they are kept
        self.adapters = adapters
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.sharing: list[Group] = []  # groups that hold a share, oldest first
        self._brought: dict[Sequence, tuple[list[int], np.ndarray]] = {}  # experts for pages that were brought back

    def adapter_ready(self, seq: Sequence) -> bool:
        """True if the adapter of `seq`, if it has one, lies in a slot; else it is on its way there or waits for one."""
        adapter = seq.group.adapter
        return adapter is None or (self.adapters is not None and self.adapters.ready(adapter))

    def try_admit(self, seq: Sequence, version: int, spare: int) -> bool:
        """Give `seq` the pages of its history and one more, if `spare` pages stay available after that.

        On success pages, `kv_len` (tokens whose KV is there already, or is being copied), keys and copy source are set.
        """
        if seq.parked is not None:
            return self._try_restore(seq, seq.parked, spare)
        tokens = seq.history()
        found = self._find(seq, tokens, version)
        most = pages_for(seq.prompt_len + seq.max_tokens - 1, self.page_size)
        wanted = min(pages_for(len(tokens), self.page_size) + 1, most) - len(found.pages)
        held = [*found.pages, *([] if found.source is None else [found.source])]
        for page in held:
            self.pool.retain(page)
        room = self._make_room(wanted + spare, held)
        if not room and found.in_session and found.source is not None:  # the page to be copied may be the missing one
            self.pool.release(held.pop())
            found.source, found.tokens = None, len(found.pages) * self.page_size
            found.in_session = found.tokens
            room = self._make_room(wanted + spare, held)
        if not room:
            for page in held:
                self.pool.release(page)
            return False
        own = [page for page in (self.pool.allocate() for _ in range(wanted)) if page is not None]
        assert len(own) == wanted, "availability was checked"
        seq.add_pages([*found.pages, *own], self.page_size)
        seq.prefill_tokens = tokens
        seq.copy_source = found.source
        seq.keys = found.keys
        seq.kv_len = seq.kv_uniform = found.tokens
        seq.kv_version, seq.kv_generation = version, seq.generation
        self._take_adapter(seq)
        if seq.group.session is not None:
            self.sessions.hand_over(seq.group.session, found.in_session)
        return True

    def _try_restore(self, seq: Sequence, parked: Parked, spare: int) -> bool:
        """Give a preempted sequence pages for its KV, and have what is not in the pool any more copied back."""
        assert self.parking is not None
        if self.available <= spare and not self.parking.sweep():
            return False
        found = self.parking.pages_left(parked)
        held = [page for page in found if page is not None]
        for page in held:
            self.pool.retain(page)
        known = seq.prompt_len + len(seq.tokens)
        most = pages_for(seq.prompt_len + seq.max_tokens - 1, self.page_size)
        wanted = min(pages_for(known, self.page_size) + 1, most) - len(held)
        if not self._make_room(wanted + spare, held):
            for page in held:
                self.pool.release(page)
            return False
        own = [page for page in (self.pool.allocate() for _ in range(wanted)) if page is not None]
        assert len(own) == wanted, "availability was checked"
        missing = [i for i, page in enumerate(found) if page is None]
        pages, rest = [*found, *own[len(missing) :]], own[: len(missing)]
        for i, page in zip(missing, rest, strict=True):
            pages[i] = page
        seq.add_pages((page for page in pages if page is not None), self.page_size)
        seq.prefill_tokens = seq.history()
        seq.kv_len, seq.kv_uniform, seq.keys = parked.kv_len, parked.kv_uniform, parked.keys
        same = parked.kv_generation == seq.generation
        seq.kv_version = parked.kv_version if same else -1  # of several generations: nobody else may have it
        seq.kv_generation = parked.kv_generation
        self._take_adapter(seq)
        self.parking.bring(seq, list(zip(missing, rest, strict=True)))
        return True

    def _take_adapter(self, seq: Sequence) -> None:
        if seq.group.adapter is not None:
            assert self.adapters is not None
            seq.adapter_slot = self.adapters.take(seq.group.adapter)

    def still_arriving(self, seq: Sequence) -> bool:
        """Bring nothing more back for a sequence that leaves; True while copies under way write to its pages."""
        return self.parking is not None and seq.parked is not None and self.parking.stop_bringing(seq)

    def forget_parked(self, seq: Sequence) -> None:
        """The KV that a preempted sequence has, or is about to leave, is of no use."""
        seq.keeps_kv = False
        if self.parking is not None and seq.parked is not None and not seq.pages:
            self.parking.drop(seq)

    def pages_left_pool(self, places: list[Place], failed: bool) -> None:
        """Copies to the host are complete, or have failed."""
        assert self.parking is not None
        if self.experts is not None and not failed:
            self.experts.stow([place.page for place in places if place.page], [place.host for place in places])
        self.parking.gone(places, failed)

    @property
    def making_room(self) -> bool:
        """True while pages are on their way to the host, to be given to others."""
        return self.parking is not None and (self.parking.going > 0 or self.parking.sweep())

    @property
    def available(self) -> int:
        """Pages that can be had at most: those that nobody uses, and those of idle sessions."""
        return self.pool.available + self.sessions.pages

    def _make_room(self, pages: int, held: list[int]) -> bool:
        """Have so many pages available, at the cost of idle sessions if need be; False if that is not enough.

        Those that are `held` for the newcomer are not to be had.
        """
        if self.pool.available >= pages:
            return True
        room = self.available - self.sessions.count(held) >= pages  # or it would cost sessions theirs for nothing
        while room and self.pool.available < pages:
            room = self.sessions.evict_one()
        if not room and self.parking is not None:
            self.parking.sweep()  # after that: what sessions have let go may be used by preempted sequences alone
        return room

    def _find(self, seq: Sequence, tokens: np.ndarray, version: int) -> Found:
        """What `seq` need not compute: its group's prompt; or what its session holds, or the cache, if that is more."""
        share = seq.group.share
        full = (len(tokens) - 1) // self.page_size  # the page of the last token is never shared: it is written again
        if share is not None and share.version == version and not seq.tokens:
            keys = share.keys.fork(full) if share.keys else None
            return Found(share.pages[:full], keys, share.pages[full], len(tokens) - 1)
        if seq.scores_prompt:  # KV that is there already says nothing of log-probs
            return Found(keys=self._no_keys(seq, version) if self.prefix_cache else None)
        found = self._find_in_session(seq, tokens, version)
        if not self.prefix_cache:
            return found
        found.keys = keys = found.keys or self._no_keys(seq, version)
        for index in range(len(found.pages), full):
            key = keys.next_key(tokens[index * self.page_size : (index + 1) * self.page_size])
            page = self.pool.find(key)
            if page is None:
                break
            found.pages.append(page)
            keys.append(key)
            found.source, found.tokens = None, len(found.pages) * self.page_size
        return found

    def _no_keys(self, seq: Sequence, version: int) -> PrefixKeys:
        return PrefixKeys(version, self.page_size, seq.generation)

    def _find_in_session(self, seq: Sequence, tokens: np.ndarray, version: int) -> Found:
        if seq.group.session is None:
            return Found()
        held, same = self.sessions.match(seq.group.session, tokens, version, seq.generation)
        if held is None:
            return Found()
        full = same // self.page_size
        source = held.pages[full] if same % self.page_size else None
        keys = held.keys.fork(full) if held.keys is not None else None
        return Found(held.pages[:full], keys, source, same, same)

    def keep_turn(self, seq: Sequence, version: int, now_s: float) -> None:
        """No step names this finalized turn: leave its KV to its session, as far as all of it is of `version`."""
        assert seq.group.session is not None and seq.finish is not None
        known = min(seq.kv_uniform, seq.prompt_len + len(seq.tokens))
        if seq.copy_source is not None:  # it ended before its first chunk: the page was not copied
            known -= known % self.page_size
        # Its adapter may have changed while its last steps, of the weights of before, were in flight; and what is
        # parked is not there, or not yet.
        of_now = seq.kv_version == version and seq.kv_generation == seq.generation
        if not of_now or seq.finish.reason == "error" or seq.parked is not None:
            known = 0
        self.remember(seq, known, version)
        left = Held(seq.history()[:known], seq.pages, version, seq.keys, seq.kv_generation)
        self.sessions.keep(seq.group.session, left, now_s)

    def try_grow(self, seq: Sequence) -> bool:
        """One page more for `seq`, if there is one or a session has one."""
        while (page := self.pool.allocate()) is None:
            if not self.sessions.evict_one():
                return False
        seq.add_pages([page], self.page_size)
        return True

    def drop_copy_source(self, seq: Sequence) -> None:
        """The copy is enqueued (or not needed any more): later writes to the source come after it."""
        if seq.copy_source is not None:
            self.pool.release(seq.copy_source)
            seq.copy_source = None

    def chunk_launched(self, seq: Sequence, version: int) -> None:
        """A step is in flight that computes more of the sequence's KV, up to `kv_len`."""
        self.drop_copy_source(seq)
        if seq.parked is not None:
            self._restored(seq, seq.parked, version)
        self.remember(seq, seq.kv_len, version)

    def _restored(self, seq: Sequence, parked: Parked, version: int) -> None:
        """The sequence goes on with what it has got back."""
        assert self.parking is not None
        if self.experts is not None:
            hosts, pages = [host for host, _ in parked.brought], [page for _, page in parked.brought]
            self._brought[seq] = pages, self.experts.stowed(hosts)
        if seq.keys is not None and seq.kv_version == version:
            for i in range(len(seq.keys)):
                self.pool.remember(seq.keys[i], seq.pages[i])
        self.parking.counts.restored += 1
        self.parking.drop(seq)

    def release(self, seq: Sequence) -> None:
        """Take the adapter's slot and all pages back, or leave the pages to the parking."""
        self.drop_copy_source(seq)
        if seq.adapter_slot is not None:
            assert self.adapters is not None
            self.adapters.give(seq.adapter_slot)
            seq.adapter_slot = None
        if self.experts is not None and seq.routing is not None and not seq.finalized:
            seq.routing.keep(self.experts, seq.pages, seq.consumed)
        if self.parking is None or not self.parking.keep(seq):
            for page in seq.pages:
                self.pool.release(page)
        seq.pages = []
        seq.kv_capacity = seq.kv_len = seq.kv_uniform = 0
        seq.prefill_tokens = seq.keys = None

    def remember(self, seq: Sequence, known: int, version: int) -> None:
        """Make the full pages among the first `known` tokens findable, as far as their KV is all of `version`."""
        if seq.keys is None or seq.kv_version != version:
            return
        for index in range(len(seq.keys), min(known, seq.kv_uniform) // self.page_size):
            start = index * self.page_size
            key = seq.keys.next_key(seq.tokens_between(start, start + self.page_size))
            seq.keys.append(key)
            self.pool.remember(key, seq.pages[index])

    def note_experts(self, plan: Plan, record: np.ndarray) -> None:
        """A step is committed: its tokens took these experts."""
        assert self.experts is not None, "slots have a record where there is a place for it"
        for span in plan.spans if plan.kind == "prefill" else ():
            if span.copy is not None:
                self.experts.copy(*span.copy)
            if span.seq in self._brought:
                self.experts.put(*self._brought.pop(span.seq))
        self.experts.take(record)

    # --- group shares ---

    def open_share(self, seq: Sequence, version: int) -> bool:
        """Hold the prompt pages of a prefilled leader for its group; False if its KV is not all of `version`."""
        if seq.kv_version != version or seq.kv_uniform < seq.prompt_len:
            return False
        pages = seq.pages[: pages_for(seq.prompt_len, self.page_size)]
        for page in pages:
            self.pool.retain(page)
        seq.group.share = PromptShare(pages, version, seq.keys)
        self.sharing.append(seq.group)
        return True

    def close_share(self, group: Group) -> None:
        """Let go of a group's prompt pages."""
        if group.share is not None:
            for page in group.share.pages:
                self.pool.release(page)
            group.share = None
            self.sharing.remove(group)

    def let_go(self) -> None:
        """Hold nothing for groups and sessions: pages in use are those of rows and of what is parked."""
        for group in list(self.sharing):
            self.close_share(group)
        self.sessions.drop_all()

    def weights_changed(self) -> None:
        """Nothing that is cached or held for sharing or by sessions is of the new version."""
        self.let_go()
        self.pool.forget_all()

    def check(self) -> None:
        """Assert that the books agree, and that no page is in use but by sessions."""
        self.pool.check()
        self.sessions.check()
        if self.adapters is not None:
            self.adapters.check_unused()
        assert not self._brought, "experts that were brought back wait for a commit"
        if self.parking is not None:
            self.parking.check()
        used, held = self.pool.used, self.sessions.pages
        assert used == held, f"{used} pages are in use, {held} of them by sessions"
