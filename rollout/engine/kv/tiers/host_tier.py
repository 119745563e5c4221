"""The tier in host memory, with a folder on disk below it: the engine's interface to this package.

`known` has the books of known prefixes, `offload` the books of preempted sequences. Between two steps pages are copied
as these books say, first for preempted sequences:

    advance:  account for complete copies --> pages are free, rows can be planned again;  then begin the next copies
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from rollout.engine.device.streams import DeviceStream
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.tier import Fetch, KVTier, PageMirror, Room, TierPrefix, TierWaiters
from rollout.engine.kv.tiers.known import KnownBooks
from rollout.engine.kv.tiers.moves import Move, MoveBooks
from rollout.engine.kv.tiers.offload import NO_HOST_STATE, OffloadBooks, in_host_tier
from rollout.engine.kv.tiers.page_mover import CopyPiece, CopyQueue, PageMover
from rollout.engine.messages.statuses import KeptStatus, OffloadStatus
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import PrefixEnd, PrefixKeys

log = logging.getLogger(__name__)

#: The most fetches for one admission of a sequence. Pages that wait for a row may be evicted meanwhile.
_MOST_FETCHES = 3
_RECENT_MOVES = 4096


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A piece that was copied. Times are seconds of the steps' clock."""

    direction: Literal["out", "in"]
    pages: int
    start_s: float
    end_s: float


class HostTier(KVTier):
    """See `KVTier`. `movers` copy pages of KV and, with states of linear attention, states. `mirrors` accompany KV."""

    def __init__(
        self,
        sessions: Sessions,
        known: KnownBooks,
        offload: OffloadBooks,
        movers: Seq[PageMover],
        has_states: bool,
        mirrors: Seq[PageMirror] = (),
    ) -> None:
        self.known, self.offload = known, offload
        self.pages = offload.host.total
        self.mover = movers[0]
        self.recent: deque[MoveRecord] = deque(maxlen=_RECENT_MOVES)
        self._pool, self._snapshots, self._page_size = sessions.pool, sessions.snapshots, sessions.page_size
        self._movers, self._has_states, self._mirrors = movers, has_states, mirrors

    # --- room ---------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        return self.known.room

    @property
    def writing(self) -> int:
        return self.known.writing

    def want(self, pages: int) -> None:
        self.known.wanted = pages

    @property
    def outgoing(self) -> int:
        return self.offload.outgoing

    def send_unshared(self) -> bool:
        return self.offload.send_unshared()

    # --- known prefixes -----------------------------------------------------------------------------------------------

    def has(self, key: bytes, oldest: int) -> bool:
        return self.known.has(key, oldest)

    def has_end(self, point: PrefixEnd, tokens: int, oldest: int) -> bool:
        return self.known.has_end(point, tokens, oldest)

    def fetch_for(self, room: Room, seq: Sequence, prefix: TierPrefix, oldest: int, spare: int) -> Fetch | None:
        """See `KVTier`.

        After `_MOST_FETCHES` fetches, its pages would be evicted before it gets a row: the prefix is computed.
        """
        mine, given_way = in_host_tier(seq), room.given_way
        spare += room.pages_wanted(seq) - len(prefix.first) - len(prefix.keys) + prefix.half
        begins = mine.fetches < _MOST_FETCHES
        fetch = self._fetch(room, prefix, oldest, spare, begins)
        # There may be room without that page, which is copied. If sessions gave way, `first` may have been a session's.
        if fetch is None and prefix.half and room.given_way == given_way:
            fetch = self._fetch(room, prefix._replace(keys=prefix.keys[:-1]), oldest, spare, begins)
        mine.fetches += fetch is not None
        return fetch

    def fetch(self, room: Room, prefix: TierPrefix, oldest: int, spare: int) -> Fetch | None:
        """See `KVTier`. Not to be called while the pool's memory is given back."""
        return self._fetch(room, prefix, oldest, spare, begins=True)

    def _fetch(self, room: Room, prefix: TierPrefix, oldest: int, spare: int, begins: bool) -> Fetch | None:
        """The fetch of the prefix, or a fetch under way that brings a part of it."""
        first, keys, end, _ = prefix
        fetches = self.known.fetches
        for key in (*keys[:1], end.key):
            if (other := fetches.of(key)) is not None:
                return other
        known = [self._pool.find(key, oldest) for key in keys]
        missing = [
            key
            for key, page in zip(keys, known, strict=True)
            if not page and fetches.of(key) is None and self.known.has(key, oldest)
        ]
        if not begins or not (missing or end.key) or (end.key and not self._snapshots.has_place):
            return None
        half = [end.key] if end.after else []
        retained = [*first, *(page for page in known if page)]
        new = room.claim(retained, len(missing) + len(half), spare)
        if new is None:
            return None
        # Last: it may cost the snapshot that was found for the sequence.
        place = self._snapshots.take() if end.key else 0
        targets = dict(zip([*missing, *half], new, strict=True))
        pages = [targets.get(key, page) for key, page in zip(keys, known, strict=True)]
        all_pages = [*first, *(page for page in pages if page), *new[len(missing) :]]
        return fetches.begin(all_pages, list(targets.items()), oldest, end, place)

    def in_pool(self, keys: PrefixKeys | Seq[bytes]) -> None:
        self.known.host.in_pool(keys)

    def pool_emptied(self) -> None:
        self.known.host.pool_emptied()

    def lease(self, keys: Seq[bytes], until_s: float) -> None:
        self.known.lease(keys, until_s)

    # --- preempted sequences ------------------------------------------------------------------------------------------

    def preempted(self, seq: Sequence) -> None:
        in_host_tier(seq).wants_offload = seq.row_ready or seq.kv.own

    def holds_back(self, seq: Sequence) -> bool:
        restores = seq.kv.is_offloaded and self.offload.cancel_restores(seq)
        return restores or (self._has_states and self.offload.copies_state(seq))

    def take(self, seq: Sequence) -> bool:
        return self.offload.take(seq)

    def restore(self, room: Room, seq: Sequence, version: int, spare: int) -> bool:
        if room.admissible[seq.kv.rank] <= spare and not self.offload.send_unshared():
            return False
        kv, offloaded = seq.kv, in_host_tier(seq).offloaded
        found = self.offload.pool_pages(offloaded, version)
        shared = [page for page in found if page]
        new = room.claim(shared, room.pages_wanted(seq) - len(shared), spare)
        if new is None:
            return False
        missing = [i for i, page in enumerate(found) if not page]
        targets = list(zip(missing, new[: len(missing)], strict=True))
        pages = [*found, *new[len(missing) :]]
        for i, page in targets:
            pages[i] = page
        kv.hit = None
        kv.add_pages(pages, self._page_size)
        kv.prefill_tokens = seq.history()
        kv.length, kv.oldest, kv.keys = offloaded.length, offloaded.oldest, offloaded.keys
        kv.edition = offloaded.edition
        self.offload.restore(seq, targets)
        return True

    def started(self, seq: Sequence) -> None:
        """See `KVTier`: its state is copied to the row."""
        if in_host_tier(seq).offloaded.state is not NO_HOST_STATE:
            self._snapshots.give_up_saves(seq.row)
            self.offload.restore_state(seq)

    def restored(self, seq: Sequence) -> None:
        copied = in_host_tier(seq).offloaded.restored
        for mirror in self._mirrors:
            mirror.fetched([host for host, _ in copied], [page for _, page in copied])
        self.offload.counts.restored += 1
        self.offload.drop(seq)

    def drop(self, seq: Sequence) -> None:
        in_host_tier(seq).wants_offload = False
        if seq.kv.is_offloaded and not seq.kv.pages:
            self.offload.drop(seq)

    # --- between two steps --------------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        return self.offload.busy or self.known.busy or any(mover.moving for mover in self._movers)

    @property
    def copies_out(self) -> bool:
        return self.known.copies_out

    def advance(self, waiters: TierWaiters) -> None:
        self.known.expire(waiters.clock())
        self.known.use_disk()
        if not self.moving:
            return
        self._take_finished(waiters)
        if not self.failure:
            self._begin()
        if ended := self.known.fetches.take_ended():
            waiters.fetches_ended(ended)

    def wait(self, most_s: float) -> None:
        moving = [mover for mover in reversed(self._movers) if mover.moving]
        if moving:
            moving[0].wait(most_s)
        else:
            self.known.wait_for_disk(most_s)

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.known.costs.computed(tokens, seconds)

    def _take_finished(self, waiters: TierWaiters) -> None:
        costs = self.known.costs
        for mover, note in zip(self._movers, (costs.copied, costs.states_copied), strict=False):
            for direction, queue in mover.directions:
                for piece in queue.finished():
                    ended, moves = piece.entries
                    waiters.restores_ended(ended(moves, bool(piece.failure)))
                    if not piece.failure:
                        self._note(direction, piece, note)
                    elif not self.failure:
                        self._fail(piece.failure, waiters)

    def _note(self, direction: Literal["out", "in"], piece: CopyPiece, note: Callable[[int, float], None]) -> None:
        move = MoveRecord(direction, piece.pages, piece.start.time_s, piece.end.time_s)
        self.recent.append(move)
        note(move.pages, move.end_s - move.start_s)

    def _fail(self, why: str, waiters: TierWaiters) -> None:
        self.failure = f"KV is no longer offloaded, and preempted completions are computed again: {why}"
        log.error("%s", self.failure)
        self.offload.closed = True
        self.known.close()
        stopped = self.offload.states_copied_out([], failed=True)
        waiters.forget_offloaded()
        waiters.restores_ended(stopped)

    def _begin(self) -> None:
        self.known.look_at_ends()
        for mover, books in self._moves():
            out, back = mover.out, mover.back
            # After the steps in flight: one of them may still copy from a page that has been free since, belong to the
            # row's last sequence, save its state or a snapshot, or load from the place.
            steps = mover.compute
            while out.capacity and (moves := books.next_out(out.capacity)):
                _start(out, moves, books.out_ended, steps if books.out_after_steps else None)
            while back.capacity and (moves := books.next_in(back.capacity)):
                _start(back, moves, books.in_ended, steps)

    def _moves(self) -> list[tuple[PageMover, MoveBooks]]:
        """All books with the mover of their pages or states, in the order in which they are served."""
        books, known = self.offload, self.known
        of_movers = (books.page_moves, known.page_moves), (books.state_moves, known.state_moves)
        return [(mover, moves) for mover, served in zip(self._movers, of_movers, strict=False) for moves in served]

    # --- all KV -------------------------------------------------------------------------------------------------------

    def forget_older(self, oldest: int) -> None:
        self.known.forget_older(oldest)

    def forget_all(self) -> None:
        self.known.forget_all()

    def status(self) -> tuple[OffloadStatus, KeptStatus]:
        return self.offload.status(), self.known.status()

    def check(self) -> None:
        self.offload.check()
        self.known.check()


def _start(
    queue: CopyQueue, moves: Seq[Move], ended: Callable[[Any, bool], list[Sequence]], after: DeviceStream | None
) -> None:
    queue.start([move.place for move in moves], [move.host_place for move in moves], (ended, moves), after)
