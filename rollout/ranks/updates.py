"""Updates of the weights in a tensor group: all ranks take an update, or none does.

    receiver's thread   OPEN --> each follower: the manifest fits its shard, its staging memory is laid out --> opened
                        TAKE --> each piece, as it comes: every rank keeps its part, in its own staging memory
                        all bytes are verified
                        PREPARE --> each follower: its part is whole, its copies are planned --> prepared
                        all prepared: the update is ready for the loop
    loop                SWAP, between two steps --> every rank copies its part --> swapped
    receiver's thread   all swapped: the staging memory may be written again

Bytes are verified on rank 0 alone, and may be wrong until then: followers use them in their swap only. An update that
is dropped before its SWAP leaves no trace.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import msgpack
import numpy as np
import torch

from rollout.process.observed_time import ObservedTime
from rollout.ranks.device_relay import DevicePlace
from rollout.ranks.orders import Orders, check_alive
from rollout.ranks.relay import RELAY_BYTES, HostPlace, RelayMemory
from rollout.ranks.reports import Reports
from rollout.ranks.ring import SharedMemory, SharedMemoryError
from rollout.weights.destination import Destination, Destinations
from rollout.weights.parameter_map import Fit
from rollout.weights.staging import Staging
from trainer_bridge.transports.cuda_ipc import IpcMemory
from trainer_bridge.wire.errors import InternalError, Unavailable, WeightsRejected
from trainer_bridge.wire.manifest import Manifest

#: For the other ranks to take a piece, where the watch of the group finds nothing: it may be told not to.
_ROOM_S = 120.0
_POLL_S = 0.0005
#: A look counts twice this at the most: this process may have been stopped meanwhile.
_LOOK_S = 0.5


class RankUpdates(Destinations):
    """Rank 0's end. Belongs to the receiver's thread."""

    def __init__(
        self,
        staging: Staging,
        relayed: SharedMemory,
        manifest: SharedMemory,
        reports: Reports,
        orders: Callable[[], Orders | None],
        on_device: IpcMemory | None = None,
        relay_bytes: int = RELAY_BYTES,
        lost: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(staging)
        device = next(iter(staging.views.values())).device
        self._lost = lost  # says why the group is lost
        self._manifest, self._reports, self._find_orders = manifest, reports, orders

        def taken() -> int:
            return min(reports.get("taken"))

        self._host = RelayMemory(HostPlace(relayed, device), taken, functools.partial(self._give, False), relay_bytes)
        self._device: RelayMemory | None = None
        if on_device is not None:
            place = DevicePlace(on_device, reports, lambda *told: self._orders().relay(*told))
            self._device = RelayMemory(place, taken, functools.partial(self._give, True), relay_bytes)
        self._giving = threading.Lock()
        self._last = 0  # number of the last update that followers were told of

    def open(self, manifest: Manifest, fit: Fit, on_device: bool) -> Destination:
        """Begin an update on all ranks. Raises `Unavailable` while the worker starts."""
        self._orders()
        self.staging.open(manifest, fit)
        memories = [self._device, self._host] if on_device and self._device is not None else [self._host]
        for memory in memories:
            assert memory is not None
            memory.open(manifest.bucket_bytes, manifest.total_bytes)
        return GroupDestination(self.staging, manifest, self, [memory for memory in memories if memory is not None])

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
        return super().busy or orders is not None and min(self._reports.get("swapped")) < orders.swapped

    def tell(self, manifest: Manifest) -> int:
        """Tell the followers of an update; returns its number, or 0 while they still read about the one before."""
        answers = zip(self._reports.get("opened"), self._reports.get("refused"), strict=True)
        if any(max(answer) < self._last for answer in answers):
            return 0
        packed = msgpack.packb(manifest.to_wire())
        self._manifest.grow(len(packed))
        self._manifest.map()[: len(packed)] = packed
        self._last += 1
        self._orders().open(self._last, len(packed))
        return self._last

    def prepare(self, number: int) -> None:
        """Tell the followers that all bytes of an update are verified."""
        self._orders().prepare(number)

    def are_prepared(self, number: int) -> bool:
        """Whether all followers are ready to swap this update."""
        return min(self._reports.get("prepared")) >= number

    def check(self, number: int) -> None:
        """Raise `WeightsRejected` if a follower refuses this update."""
        for follower, refused in enumerate(self._reports.get("refused")):
            if refused == number:
                why = self._reports.text(follower, "update")
                raise WeightsRejected(f"rank {follower + 1}: {why}", field="manifest")

    def _give(self, on_device: bool, start: int, nbytes: int, at: int) -> int:
        with self._giving:  # so that the numbers are in the order of the pieces
            return self._orders().take(start, nbytes, at, on_device)

    def check_alive(self) -> None:
        """Raise `InternalError` if the group is lost: its followers take nothing any more."""
        check_alive(self._lost)

    def _orders(self) -> Orders:
        self.check_alive()
        orders = self._find_orders()
        if orders is None:
            raise Unavailable("this worker is starting; publish again in a moment")
        return orders


class GroupDestination(Destination):
    """The memory of one update on all ranks: this rank's, and a relay through which the others get its pieces.

    transport --> relay memory, which all ranks read --> staging memory of each rank --swap--> its parameters

    Of several relays it uses the first one that the followers can read.
    """

    def __init__(self, staging: Staging, manifest: Manifest, updates: RankUpdates, relays: list[RelayMemory]) -> None:
        super().__init__(staging, manifest)
        self._updates, self._relays = updates, relays
        self._number = 0
        self._asked = self._landed = False

    @property
    def dirty(self) -> bool:
        """Whether some of the parameters are written, on some of the ranks."""
        return self._landed and self._staging.in_place

    @property
    def has_room(self) -> bool:
        """Whether a piece can be passed on.

        Raises `WeightsRejected` if the update does not fit a follower, `InternalError` if pieces get no memory.
        """
        self._updates.check_alive()
        try:
            if not self._number:
                self._number = self._updates.tell(self._manifest)
            else:
                self._updates.check(self._number)
            while len(self._relays) > 1:
                usable = self._relays[0].usable()
                if usable is None:
                    return False
                self._relays = self._relays[:1] if usable else self._relays[1:]
            return self._number > 0 and self._relays[0].has_room()
        except SharedMemoryError as error:
            raise InternalError(str(error)) from error

    def wait_for_room(self) -> bool:
        """As `has_room`; waits a moment if there is none. No event tells: devices and other processes make room."""
        if has_room := self.has_room:
            return has_room
        time.sleep(_POLL_S)
        return False

    def memory(self, start: int, end: int) -> np.ndarray:
        """As `Destination.memory`: memory of the relay."""
        self._arriving = self._relays[0].reserve(end - start)
        return self._arriving.numpy()

    def landed(self, start: int, end: int) -> None:
        """Start to copy the bytes into the memory of every rank."""
        self._landed = True
        self._relays[0].pass_on(start, None, self._staging.take(start, self._arriving))

    def put(self, start: int, data: torch.Tensor) -> None:
        """Take bytes from any device. Waits for room: transports that put from threads of their own do not look.

        A rank that takes nothing is found by the watch of the group, and then `has_room` raises.
        """
        left_s, observed = _ROOM_S, ObservedTime(_LOOK_S)
        while not self.wait_for_room():
            left_s -= observed.passed_s()
            if left_s < 0:
                raise InternalError(f"a rank took no piece of the update for {_ROOM_S:g} s")
        self._landed = True
        self._relays[0].reserve(data.numel()).copy_(data, non_blocking=True)
        taken = self._staging.take(start, data)  # on a device: its event is after the copy above
        self._relays[0].pass_on(start, taken, taken)

    def copied(self) -> bool:
        """Whether every rank has its part and is ready to swap. All bytes are verified when this is first called.

        Raises `WeightsRejected` if a follower refuses the update.
        """
        if not self._staging.copied():
            return False
        self._updates.check_alive()
        if not self._number:
            self._number = self._updates.tell(self._manifest)
        if not self._number or not self._relays[0].all_given():
            return False
        if not self._asked:
            self._asked = True
            self._updates.prepare(self._number)
        self._updates.check(self._number)
        return self._updates.are_prepared(self._number)

    def abandon(self) -> None:
        """Give no further piece; return when this rank's memory is neither written nor read."""
        for relay in self._relays:
            relay.drop()
        super().abandon()
