"""A follower's end of updates: a thread that keeps the part of its shard of every piece, and plans the swap.

It works in the order of rank 0's orders, which the main thread hands on. The main thread takes the planned copies at
the swap, and until that swap is reported rank 0 begins no update, so nothing is written meanwhile.

What a publisher offers, memory or files, is read by a thread of its own, since a disk may hang. It keeps a piece only
while the update is the one that is received, under a lock. Memory is closed once no read is under way.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgpack
import torch

from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.relay import PinnedView
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory
from rollout.weights.delta_staging import WHOLE, DeltaStaging, open_staging, read_update_content
from rollout.weights.parameter_map import ParameterMap
from rollout.weights.staged_weights import Copy
from rollout.weights.staging import WeightStaging
from trainer_bridge.transports.base import OfferedMemory
from trainer_bridge.transports.cuda_ipc import IpcMemory, IpcReader
from trainer_bridge.transports.fingerprint import prepare_fingerprints
from trainer_bridge.transports.registry import TRANSPORTS
from trainer_bridge.transports.sections import section_of
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import Manifest, TensorEntry, from_wire

log = logging.getLogger(__name__)


class FollowerUpdates:
    """The updates of follower `number`; `of_device` reads memory of rank 0's GPU, if that is possible."""

    def __init__(
        self,
        parameters: ParameterMap,
        staging: WeightStaging,
        relayed: SharedMemory,
        manifest: SharedMemory,
        reports: RankReports,
        number: int,
        of_device: IpcMemory | None = None,
    ) -> None:
        self._of_device = of_device
        self._reader: IpcReader | None = None  # reads memory of rank 0's GPU
        self._offered: OfferedMemory | None = None  # memory or files of the publisher
        self._in_files = False  # these are files
        self._map, self.staging = parameters, staging
        self._relayed, self._manifest, self._reports, self._number = relayed, manifest, reports, number
        self._device = next(iter(parameters.views.values())).device
        prepare_fingerprints(self._device)
        self._view = PinnedView(self._device)
        self.work = OrderedWork("updates", self._device, reports, number)  # all that writes to the staging memory
        self._reads = OrderedWork("update_reads", self._device, reports, number)
        self._keeping = threading.Lock()
        self._ready: tuple[int, int, list[Copy]] = (0, 0, [])  # number, version, copies
        self._taking: WeightStaging | DeltaStaging = staging  # takes the bytes of the update that is received
        self._content = WHOLE
        self._section: tuple[tuple[str, int], list[TensorEntry]] | None = None  # own part of the last layout
        self._open = (0, 0)  # number and version of the update that is received; 0: none, or one that does not fit
        self._orders: dict[str, tuple[Callable[..., None], str]] = {  # work, text for the log if it fails
            "open": (self._begin, "an update cannot begin"),
            "take": (self._keep, "a piece of an update cannot be kept"),
            "prepare": (self._prepare, "an update cannot be prepared"),
            "offer": (self._open_offered, ""),
            "relay": (self._map_relay, ""),
        }

    # --- the main thread ----------------------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """Whether pieces are written into the parameters, which no step may use then."""
        return self.staging.in_place

    def carry_out(self, number: int, what: str, *fields: Any) -> None:
        """Begin to carry out an order of the lane. Raises KeyError for an unknown one."""
        work, failure = self._orders[what]
        self.work.put(number, lambda: work(number, *fields), failure)

    def read(self, number: int, *fields: Any) -> None:
        """Begin to read a bucket or piece from what was offered."""
        self._reads.put(number, lambda: self._read(*fields), "a piece of an update cannot be read", self._in_files)

    def take(self, number: int, version: int) -> list[Copy]:
        """The copies of a prepared update. Raises RuntimeError for another one."""
        prepared, prepared_version, copies = self._ready
        if (prepared, prepared_version) != (number, version):
            raise RuntimeError(f"update {number} of version {version} is ordered, {prepared} is prepared")
        return copies

    # --- the thread of updates ----------------------------------------------------------------------------------------

    def _begin(self, order: int, number: int, manifest_bytes: int) -> None:
        """Begin an update, if it fits this rank."""
        with self._keeping:
            self._open = (0, 0)
        told = msgpack.unpackb(self._manifest.map()[:manifest_bytes])
        manifest = from_wire(told["manifest"])
        self._content = read_update_content(told, manifest)
        self.work.advance()
        fit = self._map.check(manifest)
        self.work.advance()
        section = self._own_section(manifest, *told["sections"][1 + self._number :][:1])
        self._taking = open_staging(self.staging, manifest, fit, False, self._content, section)
        self._open = (number, manifest.version)

    def _own_section(self, manifest: Manifest, begin: int | None = None) -> list[TensorEntry] | None:
        """The section of this rank in an update, which begins at this byte; None if whole tensors come."""
        if begin is None:
            return None
        layout = manifest.layout_digest, begin
        if self._section is None or self._section[0] != layout:
            self._section = layout, [entry for entry, _, _ in section_of(manifest, self.staging.cuts, begin)]
        return self._section[1]

    def _map_relay(self, order: int, handle: bytes, nbytes: int) -> None:
        """Map a new relay on rank 0's GPU, or none, and unmap the old one."""
        try:
            if self._reader is not None:
                reader, self._reader = self._reader, None
                reader.close()  # all pieces in it are copied
            if nbytes:
                if self._of_device is None:
                    raise OSError(0, "this rank is on no GPU")
                self._reader = self._of_device.reader(handle, nbytes)
        except OSError as error:
            log.warning("rank 0's GPU cannot be read: %s", error)
        else:
            self._reports.set(self._number, "mapped", order)

    def _open_offered(self, order: int, transport: str, options: dict[str, Any]) -> None:
        """Open memory of the publisher, or none as the update is dropped, and close what was open before."""
        if not transport:
            with self._keeping:
                self._open = (0, 0)
        self._close_offered()
        opens = TRANSPORTS[transport].offered if transport else None
        if opens is None:
            return
        self._in_files = TRANSPORTS[transport].in_files
        try:
            if not self._reads.idle:
                raise OSError(0, "an earlier read hangs")
            self._offered = opens(options, self._device, self._of_device)
        except (OSError, RolloutError) as error:
            log.warning("the publisher's memory cannot be read, so its bytes come through rank 0: %s", error)
        else:
            self._reports.set(self._number, "offered", order)

    def _close_offered(self) -> None:
        offered, self._offered = self._offered, None
        if offered is not None:
            if not self._in_files:
                self._reads.finish()
            try:
                offered.close()
            except OSError as error:
                log.warning("the publisher's memory cannot be closed: %s", error)

    def _keep(self, order: int, start: int, nbytes: int, at: int, on_device: bool) -> None:
        """Keep this rank's part of a piece, unless the update is refused; return when the piece is read."""
        with self._keeping:  # the thread of reads keeps pieces, too
            opened, self._open = self._open, (0, 0)
            if opened[0] and not self._taking.skips(start, start + nbytes):
                if not on_device:
                    event = self._taking.take(start, self._view.of(self._relayed.map())[at : at + nbytes])
                else:
                    assert self._reader is not None, "rank 0 waits until its memory is mapped"
                    with self.staging.on_stream():
                        read = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                        self._reader.read(at, read)
                        event = self._taking.take(start, read)
                if event is not None:
                    event.synchronize()
            self._open = opened

    def _read(self, update: int, index: int, start: int, nbytes: int, check: int) -> None:
        """Keep this rank's part of the offered bytes, if any, unless the update is refused or dropped."""
        with self._keeping:
            offered, is_open = self._offered, self._open[0] == update
            if not is_open or offered is None or self._taking.skips(start, start + nbytes):
                return

        def keep(start: int, piece: torch.Tensor) -> torch.cuda.Event | None:
            with self._keeping:
                if self._open[0] != update:  # the thread of updates may open another one at this moment
                    return None
                opened, self._open = self._open, (0, 0)
                event = self._taking.take(start, piece)
                self._open = opened
                return event

        with self.staging.on_stream():
            offered.read(index, start, nbytes, check, keep)

    def _prepare(self, order: int, number: int) -> None:
        """Plan the swap of the update, whose bytes are verified, unless it is refused."""
        opened, version = self._open
        if opened != number:
            return
        while not self._taking.copied():
            self.work.advance()
        self._taking.check()
        self.staging.base.verified(self._content.name)
        self._close_offered()  # all of it is read
        self._ready = (number, version, self.staging.memory.copies())
        self._reports.set(self._number, "prepared", number)
