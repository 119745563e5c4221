"""Updates of the weights in a tensor group: all ranks take an update, or none does.

    receiver's thread   open --> each follower: the manifest fits its shard, its staging memory is laid out
                        take --> each piece, as it comes: every rank keeps its part, in its own staging memory
                        all bytes are verified
                        prepare --> each follower: its part is whole; it plans its copies
                        all are prepared, no rank has failed: the update is ready for the loop
    loop                swap, between two steps --> every rank copies its part
    receiver's thread   all have swapped: the staging memory may be written again

Bytes are verified on rank 0, or by the rank that reads them from the publisher's memory, and may be wrong until then:
followers use them in their swap only. An update that is dropped before its swap leaves no trace.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import msgpack
import numpy as np
import torch

from rollout.ranks.device_relay import DeviceBacking
from rollout.ranks.orders import OrderWriter, check_alive
from rollout.ranks.relay import RELAY_SIZES, HostBacking, RelayBacking, RelayMemory, RelaySizes
from rollout.ranks.reports import Number, RankReports
from rollout.ranks.ring import SharedMemory, SharedMemoryError
from rollout.weights.delta_staging import WHOLE, DeltaStaging, UpdateContent, open_staging
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staging import WeightStaging
from rollout.weights.update_memory import UpdateMemories, UpdateMemory
from trainer_bridge.transports.cuda_ipc import IpcMemory
from trainer_bridge.transports.cut import Cut
from trainer_bridge.transports.registry import TRANSPORTS
from trainer_bridge.transports.sections import RankCuts, Sections
from trainer_bridge.wire.errors import InternalError, Unavailable, WeightsRejected
from trainer_bridge.wire.manifest import Manifest

_POLL_S = 0.0005
_MOST_READS = 8  # pieces of files that the ranks read ahead: so many may be left when an update is dropped


class RankUpdates(UpdateMemories):
    """Rank 0's end. Belongs to the receiver's thread.

    `memories` has `relayed`, for pieces on the host, and `manifest`; both are shared with the followers. `on_device`
    makes memory for pieces on the device. `orders` returns None until the followers are ready, `lost` why the group is
    lost. Each follower has written to its memory of `cuts` by `write_cuts`.
    """

    def __init__(
        self,
        staging: WeightStaging,
        memories: Mapping[str, SharedMemory],
        reports: RankReports,
        orders: Callable[[], OrderWriter | None],
        on_device: IpcMemory | None = None,
        sizes: RelaySizes = RELAY_SIZES,
        lost: Callable[[], str] = lambda: "",
        cuts: Sequence[SharedMemory] = (),
    ) -> None:
        super().__init__(staging)
        device = next(iter(staging.views.values())).device
        self._lost = lost
        self._shared_cuts = cuts
        self._cuts: list[RankCuts] = []
        self._manifest, self._reports, self._find_orders = memories["manifest"], reports, orders

        def relay(backing: RelayBacking, on_device: bool) -> RelayMemory:
            def take(start: int, nbytes: int, at: int) -> int:
                return self.give("take", start, nbytes, at, on_device)

            return RelayMemory(backing, lambda: min(reports.ended("updates")), take, sizes)

        self._host = relay(HostBacking(memories["relayed"], device), on_device=False)
        self._device: RelayMemory | None = None
        if on_device is not None:
            backing = DeviceBacking(on_device, partial(self.give, "relay"), partial(self.answers, "mapped"))
            self._device = relay(backing, on_device=True)
        self._withdrawn = 0  # number of the last order to close what a publisher had offered
        self._last = 0  # number of the last update that followers know
        self._opened = self._planned = 0  # order numbers: of the last `open`; of the last `open` or `prepare`
        self._read = self._read_before = 0  # numbers of the last order to read, and of the last before the update

    def cuts(self) -> Sequence[RankCuts] | None:
        """Like `UpdateMemories.cuts`. Raises `Unavailable` while the worker starts."""
        self._orders()
        if not self._cuts and self._shared_cuts:
            self._cuts = [self.staging.cuts, *(read_cuts(memory) for memory in self._shared_cuts)]
        return self._cuts or None

    def open(
        self,
        manifest: Manifest,
        fit: ManifestFit,
        on_device: bool,
        content: UpdateContent = WHOLE,
        sections: Sections | None = None,
    ) -> UpdateMemory:
        """Begin an update on all ranks. Raises `Unavailable` while the worker starts."""
        self._orders()
        section = None if sections is None else sections.of_rank(0)
        taker = open_staging(self.staging, manifest, fit, False, content, section)
        arrives = manifest if content.delta is None else content.delta.codes
        if sections is not None:
            arrives = sections.manifest
        relays = [self._device, self._host] if on_device and self._device is not None else [self._host]
        for relay in relays:
            relay.open(arrives.bucket_bytes, arrives.total_bytes)
        begins = () if sections is None else sections.begins
        return GroupUpdateMemory(taker, manifest, self, relays, content, begins)

    def unmap(self) -> None:
        """A sleep begins: have the followers unmap the memory on rank 0's GPU, after all pieces that were given."""
        if self._device is not None:
            self._device.unmap()

    def free(self) -> int:
        """Give that memory back, after `unmap` is carried out; returns its bytes. The next update takes some again."""
        return 0 if self._device is None else self._device.free()

    @property
    def busy(self) -> bool:
        """Whether the staging memory of any rank may still be read."""
        orders = self._find_orders()
        return super().busy or (orders is not None and not orders.done("swap", orders.swapped))

    def announce(self, manifest: Manifest, content: UpdateContent, begins: Sequence[int]) -> bool:
        """Send followers an update's manifest, with their sections; false while they read an earlier manifest."""
        if not self.done(self._planned):
            return False
        packed = msgpack.packb({"manifest": manifest.to_wire(), "sections": begins, **content.to_wire()})
        self._manifest.grow(len(packed))
        self._manifest.map()[: len(packed)] = packed
        self._last += 1
        self._opened = self._planned = self.give("open", self._last, len(packed))
        self._read_before = self._read
        return True

    def prepare(self) -> None:
        """Tell the followers that all bytes of the update are verified."""
        orders = self._orders()
        orders.prepared = self._last
        self._planned = self.give("prepare", self._last)

    def are_done(self) -> bool:
        """Whether all followers have opened the update, or prepared it. Raises `WeightsRejected` if one refuses it."""
        done = self.done(self._planned)
        self.check()
        return done

    def give(self, what: str, *fields: Any) -> int:
        """Give all followers an order; returns its number."""
        return self._orders().give("updates", what, *fields)

    def answers(self, number: Number, order: int) -> list[bool] | None:
        """Which followers have reported an order in this number; None: one has not carried it out yet."""
        return [told == order for told in self._reports.get(number)] if self.done(order) else None

    def done(self, order: int) -> bool:
        """Whether all followers have carried out the order."""
        return self._reports.done("updates", order)

    def read(self, *piece: int) -> int:
        """Have each follower read a bucket or piece from what was offered, if it keeps some; returns the number."""
        self._read = self._orders().give("update_reads", self._last, *piece)
        return self._read

    def is_read(self, order: int) -> bool:
        """Whether all followers have carried out an order to read."""
        return self._reports.done("update_reads", order)

    def withdraw_offer(self) -> None:
        """Have the followers close what was offered."""
        self._withdrawn = self.give("offer", "", {})

    @property
    def offer_open(self) -> bool:
        return not self.done(self._withdrawn) and not self._lost()

    def check(self) -> None:
        """Raise `WeightsRejected` if a follower refuses the update."""
        failures = self._reports.failures("updates", self._opened)
        if failures := failures or self._reports.failures("update_reads", self._read_before + 1):
            raise WeightsRejected(failures[0], field="manifest")

    def check_alive(self) -> None:
        """Raise `InternalError` if the group is lost: its followers take nothing any more."""
        check_alive(self._lost)

    def _orders(self) -> OrderWriter:
        self.check_alive()
        orders = self._find_orders()
        if orders is None:
            raise Unavailable("this worker is starting; publish again in a moment")
        return orders


def write_cuts(memory: SharedMemory, cuts: RankCuts) -> None:
    """Name the cuts of a follower to rank 0."""
    packed = msgpack.packb(dict(cuts))
    memory.grow(len(packed))
    memory.map()[:] = packed


def read_cuts(memory: SharedMemory) -> RankCuts:
    """Read the bytes of `write_cuts`."""
    told = msgpack.unpackb(memory.map(), use_list=False)
    return {name: None if cut is None else Cut(*cut) for name, cut in told.items()}


class _Phase(IntEnum):
    """The progress of an update of all ranks."""

    WAITING = 0  # the followers read about another update
    ASKING = 1  # the followers were asked; whether they can read the publisher's memory is not known
    OPEN = 2  # pieces may come
    LANDED = 3  # some have come
    PREPARING = 4  # all bytes are verified, and the followers plan their swap


class GroupUpdateMemory(UpdateMemory):
    """The memory of one update on all ranks: this rank's, and a relay through which the others get its pieces.

    transport --> relay memory, which all ranks read --> staging memory of each rank --swap--> its parameters

    Of several relays it uses the first one that the followers can read. If the followers can read a transport's offer,
    each rank reads and checks its own bytes: the buckets of its section in the publisher's memory, or the pieces of
    files that hold a part of its shard.
    """

    def __init__(
        self,
        taker: WeightStaging | DeltaStaging,
        manifest: Manifest,
        updates: RankUpdates,
        relays: list[RelayMemory],
        content: UpdateContent = WHOLE,
        begins: Sequence[int] = (),
    ) -> None:
        super().__init__(updates.staging, manifest, taker, content.name)
        self._updates, self._relays, self._how, self._begins = updates, relays, content, begins
        self._phase = _Phase.WAITING
        self._opening = threading.Lock()  # a transport's thread puts, and the receiver's asks for room
        self._offered: tuple[str, dict[str, Any]] | None = None
        self._offer = 0  # number of the order to open it
        self._direct = False  # the ranks can read it
        self._left: deque[int] = deque()  # orders to read
        self._abandoned = False

    @property
    def dirty(self) -> bool:
        """Whether some of the parameters are written, on some of the ranks."""
        return self._staging.in_place and self._phase >= (_Phase.PREPARING if self._how.delta else _Phase.LANDED)

    def wait_for_room(self) -> bool:
        """Whether a piece can be passed on. There is no event for it: other processes make room.

        Raises `WeightsRejected` if the update does not fit a follower, `InternalError` if pieces get no memory.
        """
        self._updates.check_alive()
        try:
            with self._opening:
                room = self._has_room()
        except SharedMemoryError as error:
            raise InternalError(str(error)) from error
        if not room:
            time.sleep(_POLL_S)
        return room

    def _has_room(self) -> bool:
        if self._abandoned:
            return False  # a transport's thread may ask once more: the followers must not hear of it any more
        if self._phase > _Phase.WAITING:
            self._updates.check()
        if not self._is_open():
            return False
        if self._reads_files:
            return len(self._left) < _MOST_READS or self.unread() < _MOST_READS
        if self._direct and len(self._relays) > 1:
            return True  # data on the device is this rank's, and needs no relay
        while len(self._relays) > 1:
            usable = self._relays[0].usable()
            if usable is None:
                return False
            self._relays = self._relays[:1] if usable else self._relays[1:]
        return self._relays[0].has_room()

    @property
    def _reads_files(self) -> bool:
        return self._direct and not self._begins

    def _is_open(self) -> bool:
        """Whether pieces may come; if not, what is still to do for that is done or begun."""
        if self._phase == _Phase.WAITING and self._updates.announce(self._manifest, self._how, self._begins):
            self._phase = _Phase.ASKING
            if self._offered is not None and (self._begins or TRANSPORTS[self._offered[0]].in_files):
                self._offer = self._updates.give("offer", *self._offered)
        if self._phase == _Phase.ASKING:
            readers = self._updates.answers("offered", self._offer) if self._offer else [False]
            if readers is not None:
                self._direct, self._phase = all(readers), _Phase.OPEN
        return self._phase >= _Phase.OPEN

    def offer(self, transport: str, options: Mapping[str, Any]) -> None:
        """Like `Destination.offer`: the followers hear of it after the update."""
        self._offered = transport, dict(options)

    def leave_to_owner(self, index: int, start: int, end: int, check: int) -> bool:
        if not self._direct or start < min(self._begins[1:], default=0):
            return False  # the bytes come through this process, or belong to this rank's section
        self._phase = _Phase.LANDED
        self._left.append(self._updates.read(index, start, end - start, check))
        return self._taker.skips(start, end)

    def unread(self) -> int:
        """Like `Destination.unread`. No event comes: other processes read."""
        before = len(self._left)
        while self._left and self._updates.is_read(self._left[0]):
            self._left.popleft()
        if before:
            self._updates.check()
            self._updates.check_alive()
        if before and len(self._left) == before:
            time.sleep(_POLL_S)
        return len(self._left)

    def memory(self, start: int, end: int) -> np.ndarray:
        """Memory of the relay, or of this rank alone if each rank reads for itself."""
        if self._reads_files:
            self._arriving = self._staging.memory.arrival.reserve(end - start)
        else:
            self._arriving = self._relays[0].reserve(end - start)
        return self._arriving.numpy()

    def landed(self, start: int, end: int) -> None:
        """Start to copy the bytes into the memory of every rank, or of this one alone."""
        self._phase = _Phase.LANDED
        read = self._taker.take(start, self._arriving)
        if not self._reads_files:
            self._relays[0].pass_on(start, None, read)
        elif read is not None:
            read.synchronize()  # the next bytes arrive in the same memory

    def put(self, start: int, data: torch.Tensor) -> torch.Tensor:
        self._phase = _Phase.LANDED
        if self._direct:
            here = data.clone()  # the piece may be in another GPU's memory, which is read once
            self._taker.take(start, here)
            return here
        piece = self._relays[0].reserve(data.numel())
        piece.copy_(data, non_blocking=True)
        here = piece if piece.device == data.device else data
        taken = self._taker.take(start, here)  # on a device: its event is after the copy above
        self._relays[0].pass_on(start, taken, taken)
        return here

    def copied(self) -> bool:
        """Whether every rank has its part and is ready to swap. All bytes are verified when this is first called.

        Raises `WeightsRejected` if a follower refuses the update.
        """
        if self._how.delta is None and not self._taker.copied():
            return False
        self._updates.check_alive()
        if not self._is_open() or not self._relays[0].all_given():
            return False
        if self._phase < _Phase.PREPARING:
            if self._how.delta is not None and not self._updates.are_done():
                return False  # in place, no rank writes before all have found the base
            self._phase = _Phase.PREPARING
            self._updates.prepare()
        if self._how.delta is not None and not self._taker.copied():
            return False
        return self._updates.are_done()

    def abandon(self) -> None:
        """Give no further piece; return when this rank's memory is neither written nor read."""
        with self._opening:
            self._abandoned = True
        with contextlib.ExitStack() as steps:  # last to first, also after one that fails
            if self._offer:
                steps.callback(self._updates.withdraw_offer)
            steps.callback(self._staging.abandon)
            for relay in self._relays:
                steps.callback(relay.drop)
