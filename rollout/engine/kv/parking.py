"""Where the KV of preempted sequences waits for their return: the books. No tensor is touched here.

    park       a sequence has left its row and no step names it: each page of its KV becomes a place
    send       a place whose page nobody else refers to is copied to the host; then the page is given back
    bring      the sequence is admitted again: what is still in the pool is shared, the rest is copied into new pages
    drop       its first step is launched, or it ends, or its KV is of no use any more: the places are given up

A place is the KV of one page of preempted sequences:

    kept       in a page of the pool that others use too; nothing would be gained by copying it
    going      in a page of the pool; the copy to the host waits its turn or is under way
    away       on the host only
    coming     on its way to a page of a sequence that was admitted again; others that come back share the page
    back       kept again, and on the host, too: there are some that share it and have not come back

Invariants:
- Host room is set aside for every place when it is made, so that a place can always be sent.
- A place refers to its page once, however many sequences hold it, until the copy on the host is complete.
- Host room is not used again before no copy reads or writes it.
- Only pages that no step in flight names are sent: who may write a page refers to it until its steps are committed.
- A sequence may take a page back, and write to it, while it is being copied: that copy is never used.
- Nobody writes to a page whose place several hold: such pages are full, and were shared before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout.engine.kv.pool import PagePool, PrefixKeys
from rollout.engine.messages import OffloadStatus

if TYPE_CHECKING:
    from rollout.engine.schedule.sequence import Sequence


@dataclass(eq=False, slots=True)
class Place:
    """The KV of one page, and where it is."""

    page: int | None  # of the pool; None once it is away
    host: int  # its room on the host
    holders: int = 1  # preempted sequences that need it
    going: bool = False
    flying: bool = False  # going, and the copy has begun
    coming: Arrival | None = None
    back: bool = False  # what is in `page` is on the host, too


@dataclass(eq=False, slots=True)
class Parked:
    """The KV of one preempted sequence, and what was known of it."""

    places: list[Place]
    kv_len: int  # tokens
    kv_uniform: int
    kv_version: int
    kv_generation: int  # of its adapter's weights
    keys: PrefixKeys | None  # of its full pages
    coming: list[Arrival] = field(default_factory=list)  # that it waits for, their copies not complete yet
    brought: list[tuple[int, int]] = field(default_factory=list)  # (room on the host, page of the sequence) of all

    @property
    def missing(self) -> int:
        """Pages that it waits for."""
        return len(self.coming)

    @property
    def flying(self) -> int:
        """Those of them whose copy has begun."""
        return sum(arrival.flying for arrival in self.coming)


@dataclass(eq=False, slots=True)
class Arrival:
    """One place on its way back into a page of the pool."""

    place: Place
    page: int
    seqs: list[Sequence] = field(default_factory=list)  # that have the page, and wait for it
    flying: bool = False  # the copy has begun


@dataclass(slots=True)
class OffloadCounts:
    """Running totals since start."""

    parked: int = 0  # preempted sequences whose KV was kept
    restored: int = 0  # those that went on with it
    refused: int = 0  # preempted sequences for whose KV there was no room
    pages_out: int = 0
    pages_in: int = 0


class Parking:
    """Places of preempted sequences, and the room for them on the host: `room` pages."""

    def __init__(
        self, pool: PagePool, page_size: int, room: int, page_bytes: int, counts: OffloadCounts | None = None
    ) -> None:
        self.counts = counts or OffloadCounts()
        self.closed = False  # copies fail: nothing is parked any more
        self.going = 0  # places whose page will be given back once it is copied
        self.room = room
        self._pool = pool
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._free = list(range(room - 1, -1, -1))
        self._by_page: dict[int, Place] = {}  # those that are not away
        self._kept: dict[int, Place] = {}  # those of them that are not going
        self._outgoing: deque[Place] = deque()  # going, not begun; some may have been given up since
        self._incoming: deque[Arrival] = deque()
        self._sequences = 0

    # --- sequences ---------------------------------------------------------------------------------------------------

    def keep(self, seq: Sequence) -> bool:
        """A sequence gives its pages up: True if they have become places, False if they are the caller's to release.

        A sequence that was being restored has its places already; one that has ended needs none.
        """
        wanted, seq.keeps_kv = seq.keeps_kv and not seq.finalized, False
        if seq.parked is None:
            return wanted and self._park(seq)
        if not wanted:
            self.drop(seq)
        return False

    def _park(self, seq: Sequence) -> bool:
        count = -(-seq.kv_len // self._page_size)
        held, rest = seq.pages[:count], seq.pages[count:]
        if self.closed or not held:
            return False
        if sum(page not in self._by_page for page in held) > len(self._free):
            self.counts.refused += 1
            return False
        places = [self._place_of(page) for page in held]
        for page in rest:
            self._pool.release(page)
        for place in reversed(places):  # of what is given back, the begin of a prefix is of use longest
            if not place.going:
                self._send_or_keep(place)
        seq.parked = Parked(places, seq.kv_len, seq.kv_uniform, seq.kv_version, seq.kv_generation, seq.keys)
        self.counts.parked += 1
        self._sequences += 1
        return True

    def _place_of(self, page: int) -> Place:
        """The place for a page to which the caller gives its reference up."""
        place = self._by_page.get(page)
        if place is None:
            place = self._by_page[page] = Place(page, self._free.pop())
        else:
            place.holders += 1
            self._pool.release(page)
        return place

    def pages_left(self, parked: Parked) -> list[int | None]:
        """For each place the page of the pool in which its KV is or will be, None where it has to be brought back."""
        keys = parked.keys
        pages = [place.page if place.coming is None else place.coming.page for place in parked.places]
        for i in range(0 if keys is None else len(keys)):
            assert keys is not None
            if pages[i] is None:
                pages[i] = self._pool.find(keys[i])
        return pages

    def bring(self, seq: Sequence, pages: list[tuple[int, int]]) -> None:
        """Have places, by their number, copied into these pages of an admitted sequence, which has one for each."""
        parked = seq.parked
        assert parked is not None and not parked.coming
        for i, page in pages:
            arrival = parked.places[i].coming = Arrival(parked.places[i], page)
            self._incoming.append(arrival)
        parked.coming = [place.coming for place in parked.places if place.coming is not None]
        for arrival in parked.coming:
            arrival.seqs.append(seq)
        places = zip(parked.places, seq.pages, strict=False)
        parked.brought = [(place.host, page) for place, page in places if place.coming is not None or place.back]

    def stop_bringing(self, seq: Sequence) -> bool:
        """Copy nothing more for this sequence alone; True while copies that have begun write to pages only it has."""
        parked = seq.parked
        assert parked is not None
        needed: list[Arrival] = []
        others: list[Arrival] = []
        for arrival in parked.coming:
            (needed if arrival.flying and len(arrival.seqs) == 1 else others).append(arrival)
        for arrival in others:
            arrival.seqs.remove(seq)
            if not arrival.seqs:
                arrival.place.coming = None
        if others:
            self._incoming = deque(arrival for arrival in self._incoming if arrival.seqs)
            parked.coming = needed
        return bool(needed)

    def drop(self, seq: Sequence) -> None:
        """The sequence needs its places no more."""
        parked, seq.parked = seq.parked, None
        assert parked is not None and parked.missing == 0, "a copy may still read a place"
        self._sequences -= 1
        for place in parked.places:
            place.holders -= 1
            if place.holders == 0 and not place.flying:
                self._give_up(place)
            elif place.holders == 0:  # who took the page back writes to it: what arrives is nobody's
                self._forget_page(place)

    # --- places ------------------------------------------------------------------------------------------------------

    def sweep(self) -> bool:
        """Pages are short: send the places that only preempted sequences use by now. True if there are any."""
        assert all(place.page is not None for place in self._kept.values())
        found = [place for page, place in self._kept.items() if self._pool.refs[page] == 1]
        for place in found:
            self._send_or_keep(place)
        return bool(found)

    def _send_or_keep(self, place: Place) -> None:
        assert place.page is not None
        if self._pool.refs[place.page] > 1:
            self._kept[place.page] = place
            return
        self._kept.pop(place.page, None)
        if place.back:
            self._leave_page(place)
            return
        place.going = True
        self.going += 1
        self._outgoing.append(place)

    def _leave_page(self, place: Place) -> None:
        """What is in its page is on the host."""
        assert place.page is not None
        del self._by_page[place.page]
        self._pool.release(place.page)
        place.page, place.back = None, False

    def _give_up(self, place: Place) -> None:
        """Nobody holds the place and no copy reads or writes its room."""
        if place.page is not None:
            self._forget_page(place)
            self._pool.release(place.page)
            place.page = None
        if place.going:
            place.going = False
            self.going -= 1
        self._free.append(place.host)

    def _forget_page(self, place: Place) -> None:
        """Whoever parks the page from now on makes a new place of it."""
        assert place.page is not None
        if self._by_page.get(place.page) is place:
            del self._by_page[place.page]
            self._kept.pop(place.page, None)

    # --- copies ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """True while there are copies to begin or under way."""
        return self.going > 0 or bool(self._incoming)

    def next_out(self, most: int) -> list[Place]:
        """Up to `most` places whose copies to the host begin now."""
        taken: list[Place] = []
        while self._outgoing and len(taken) < most:
            place = self._outgoing.popleft()
            if not place.going:
                continue  # it was given up
            assert place.page is not None and not place.flying
            if self._pool.refs[place.page] > 1:  # somebody has come to use it since
                place.going = False
                self.going -= 1
                self._kept[place.page] = place
                continue
            place.flying = True
            taken.append(place)
        return taken

    def gone(self, places: list[Place], failed: bool) -> None:
        """Copies to the host are complete, or have failed: then their pages stay as long as somebody needs them."""
        for place in places:
            place.going = place.flying = False
            self.going -= 1
            if place.holders == 0:
                self._give_up(place)
            elif not failed:
                self._leave_page(place)
        if not failed:
            self.counts.pages_out += len(places)

    def next_in(self, most: int) -> list[Arrival]:
        """Up to `most` places whose copies from the host begin now."""
        taken = [self._incoming.popleft() for _ in range(min(most, len(self._incoming)))]
        for arrival in taken:
            arrival.flying = True
        return taken

    def arrived(self, arrivals: list[Arrival], failed: bool) -> list[Sequence]:
        """Copies from the host are complete, or have failed; the sequences of which no more are expected."""
        whole: list[Sequence] = []
        for arrival in arrivals:
            arrival.place.coming = None
            if arrival.place.holders > len(arrival.seqs) and not failed:
                self._keep_again(arrival.place, arrival.page)
            for seq in arrival.seqs:
                assert seq.parked is not None
                seq.parked.coming.remove(arrival)
                if not seq.parked.coming:
                    whole.append(seq)
        if not failed:
            self.counts.pages_in += len(arrivals)
        return whole

    def _keep_again(self, place: Place, page: int) -> None:
        """Others will want the page that a place has come back to."""
        assert place.page is None and page not in self._by_page
        self._pool.retain(page)
        place.page, place.back = page, True
        self._by_page[page] = self._kept[page] = place

    # --- views -------------------------------------------------------------------------------------------------------

    def status(self) -> OffloadStatus:
        """A snapshot of now."""
        counts = self.counts
        return OffloadStatus(
            sequences=self._sequences,
            pages=self.room - len(self._free),
            pages_total=self.room,
            parked=counts.parked,
            restored=counts.restored,
            refused=counts.refused,
            bytes_out=counts.pages_out * self._page_bytes,
            bytes_in=counts.pages_in * self._page_bytes,
        )

    def check(self) -> None:
        """Assert that nothing is parked, and that all room is free."""
        assert not self.waiting and not self._by_page and not self._kept, "a place is left"
        assert self._sequences == 0 and sorted(self._free) == list(range(self.room)), "host room is in use"
