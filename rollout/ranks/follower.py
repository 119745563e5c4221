"""A follower: a process that runs the steps of rank 0 on its own shard, and nothing else.

    main thread    ring --> launch, draw, swap on its own streams        no scheduler, no copy back, no commit
    updates        checks and plans updates, which takes longer than a step
    adapters       maps adapters, which does, too
    beat           reports that the process lives and how far its device is (`beat.py`)

It has the shard of the model, KV pages, row state and slots that rank 0 has, made by the same code in the same order.
A follower ends with rank 0 (the kernel sees to it), and at any error: rank 0 then ends the group.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgpack
import torch

from rollout.config import Settings
from rollout.engine.build import build_follower, sleeping_memory
from rollout.engine.device.streams import Event, make_device
from rollout.engine.sequence.features import Feature
from rollout.engine.step.execute import Executor
from rollout.engine.step.slot import Slot
from rollout.engine.step.upload import Header, Upload
from rollout.models import load_model
from rollout.models.loader import LoadedModel
from rollout.process.logs import set_up, worker_name
from rollout.ranks.adapters import AdapterCopies
from rollout.ranks.beat import Beat, DeviceProgress
from rollout.ranks.compiling import watch_compilations
from rollout.ranks.copies import FollowerCopies
from rollout.ranks.devices import rank_device
from rollout.ranks.orders import ANY_VERSION, DRAW, END, PIXELS, PREPARE, STEP, SWAP, read_draw, read_step
from rollout.ranks.processes import connect
from rollout.ranks.reports import Reports
from rollout.ranks.ring import Head, RingReader, SharedMemory
from rollout.ranks.updates import PinnedView
from rollout.weights.parameter_map import ParameterMap, update_names
from rollout.weights.staging import Copy, plan_copies
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import Manifest, from_wire

log = logging.getLogger(__name__)

_WAIT_S = 0.25  # for orders, between two looks at the streams
_SWAP_POLL_S = 0.002  # while a swap or another copy is under way, whose end is reported


class Follower:
    """Carries out the orders of rank 0."""

    def __init__(
        self,
        settings: Settings,
        number: int,
        executor: Executor,
        slots: list[Slot],
        updates: PreparedUpdates,
        copies: FollowerCopies,
        progress: DeviceProgress,
    ) -> None:
        self._executor, self._slots, self._updates, self._copies = executor, slots, updates, copies
        self._number, self._progress = number, progress
        self._version = settings.weights.initial_version
        self._pixels = bytearray()  # of the next step
        self._last: tuple[Header, Slot] | None = None
        self._swap: tuple[int, Event] | None = None

    def serve(self, reader: RingReader, reports: Reports) -> None:
        """Carry out orders until the end is ordered. Raises what goes wrong."""
        me = self._number
        reports.set(me, "ready", 1)
        while True:
            if self._swap is not None and self._swap[1].query():
                self._executor.check()
                reports.set(me, "swapped", self._swap[0])
                self._swap = None
            copying = self._copies.report()
            if not reader.wait(_WAIT_S if self._swap is None and not copying else _SWAP_POLL_S):
                self._executor.check()
                continue
            head, body = reader.read()
            if head.version not in (self._version, ANY_VERSION):
                raise RuntimeError(
                    f"order {head.sequence} is for version {head.version}, this rank has {self._version}"
                )
            if head.kind == END:
                return
            self._carry_out(head, body, reports)
            body.release()
            reader.done(head)
            reports.set(me, "sequence", head.sequence)

    def _carry_out(self, head: Head, body: memoryview, reports: Reports) -> None:
        layout, rest = body[: head.layout], body[head.layout :]
        if head.kind == STEP:
            pixels, self._pixels = self._pixels, bytearray()
            upload = read_step(layout, rest, pixels)
            self._launch(upload)
            if not upload.header.features & Feature.CONSTRAIN.value:
                self._enqueued(reports)
        elif head.kind == PIXELS:
            self._pixels += rest
        elif head.kind == DRAW:
            assert self._last is not None, "a draw follows its step"
            header, slot = self._last
            at, refused, masks_CW = read_draw(layout, rest)
            slot.masks.arrived.synchronize()  # the masks of two steps before are read
            slot.masks.set_rows(at, refused)
            slot.masks.host[: len(at)].copy_(masks_CW)
            self._executor.draw_with_masks(header, slot)
            self._enqueued(reports)
            reports.add(self._number, "drawn")
        elif head.kind == PREPARE:
            self._updates.prepare(*msgpack.unpackb(layout))
        elif head.kind == SWAP:
            number, version = msgpack.unpackb(layout)
            self._swap = (number, self._begin_swap(number, version))
        else:
            self._copies.carry_out(head.kind, msgpack.unpackb(layout))

    def _enqueued(self, reports: Reports) -> None:
        self._progress.enqueued += 1
        reports.set(self._number, "launched", self._progress.enqueued)

    def _launch(self, upload: Upload) -> None:
        slot = self._slots[0]
        self._slots.reverse()
        slot.h2d_done.synchronize()  # the upload of two steps before is read
        words = slot.staging.words[: len(upload.words)]
        words.copy_(upload.words)
        self._executor.h2d.wait(slot.end)  # and so is its copy on the device
        self._executor.execute(Upload(upload.header, words, upload.encodes), slot)
        self._last = (upload.header, slot)

    def _begin_swap(self, number: int, version: int) -> Event:
        copies = self._updates.take(number, version)
        device = self._executor.device
        start, end = device.event(), device.event()
        self._executor.swap(version, lambda: _copy(copies), start, end)
        self._version = version
        return end


@torch.no_grad()
def _copy(copies: list[Copy]) -> None:
    for view, staged in copies:
        view.copy_(staged, non_blocking=True)


class PreparedUpdates:
    """Checks updates and plans their copies, in a thread of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        staged: SharedMemory,
        manifest: SharedMemory,
        reports: Reports,
        number: int,
    ) -> None:
        self._views = loaded.trainer_views()
        self._map = ParameterMap(self._views, update_names(settings.model, loaded))
        self._staged, self._manifest, self._reports, self._number = staged, manifest, reports, number
        self._view = PinnedView(loaded.model.embed.device)
        self._orders: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        self._lock = threading.Lock()
        self._ready: tuple[int, int, list[Copy]] = (0, 0, [])
        self._planned: tuple[tuple[str, int], list[Copy]] | None = None
        threading.Thread(target=self._run, name="updates", daemon=True).start()

    def prepare(self, number: int, total_bytes: int, manifest_bytes: int) -> None:
        """Begin to check an update; the outcome is reported."""
        self._orders.put((number, total_bytes, manifest_bytes))

    def take(self, number: int, version: int) -> list[Copy]:
        """The copies of a prepared update. Raises RuntimeError for another one."""
        with self._lock:
            prepared, prepared_version, copies = self._ready
        if (prepared, prepared_version) != (number, version):
            raise RuntimeError(f"update {number} of version {version} is ordered, {prepared} is prepared")
        return copies

    def _run(self) -> None:
        while True:
            number, total_bytes, manifest_bytes = self._orders.get()
            try:
                manifest = from_wire(msgpack.unpackb(self._manifest.map()[:manifest_bytes]))
                copies = self._plan(manifest, total_bytes)
            except WeightsRejected as error:
                self._refuse(number, str(error))
            # Whatever it is, rank 0 waits for an answer, and the old weights stay in use.
            except Exception as error:
                log.exception("an update cannot be prepared")
                self._refuse(number, f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._ready = (number, manifest.version, copies)
                self._reports.set(self._number, "prepared", number)

    def _refuse(self, number: int, message: str) -> None:
        self._reports.say(self._number, message)
        self._reports.set(self._number, "refused", number)

    def _plan(self, manifest: Manifest, total_bytes: int) -> list[Copy]:
        stream = self._view.of(self._staged.map())[:total_bytes]
        key = (manifest.layout_digest, stream.data_ptr())
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, plan_copies(manifest, self._map.check(manifest), self._views, stream))
        return self._planned[1]


def follow(told: dict[str, Any]) -> None:
    """Be the rank that rank 0 has asked for; never returns."""
    settings, rank = Settings.model_validate(told["settings"]), told["rank"]
    set_up(settings.log_level, settings.log_format, f"{worker_name()} rank {rank}")
    shared = {name: SharedMemory(descriptor) for name, descriptor in told["shared"].items() if name != "eventfd"}
    reports, number = Reports(shared["reports"], settings.engine.tensor_parallel - 1), rank - 1
    beat = Beat(reports, number)
    try:
        watch_compilations()
        torch.set_num_threads(settings.model.cpu_threads)
        device = make_device(rank_device(settings.model.device, rank))
        group = connect(Path(told["folder"]), rank, settings.engine.tensor_parallel, device.torch_device)
        model = settings.model.model_copy(update={"device": str(device.torch_device)})
        loaded = load_model(model, device.torch_device, None, None, settings.engine.expert_format, group)
        memory = sleeping_memory(settings, device, loaded.model)  # before anything takes views of the weights
        updates = PreparedUpdates(loaded, settings, shared["staged"], shared["manifest"], reports, number)
        adapters = AdapterCopies(shared["adapters"], rank, loaded.dtype, device.torch_device, reports)
        executor, slots = build_follower(settings, device, loaded.model, memory)
        copies = FollowerCopies(executor, adapters, memory, reports, number)
        progress = DeviceProgress(device, slots, group.peers)
        follower = Follower(settings, number, executor, slots, updates, copies, progress)
        reader = RingReader(
            shared["ring"], told["shared"]["eventfd"], lambda position: reports.set(number, "position", position)
        )
        beat.serve(progress)
        follower.serve(reader, reports)
    # The other ranks wait for this one: say why it ends, and end, whatever threads still run.
    except BaseException as error:
        reports.say(number, f"{type(error).__name__}: {error}")
        log.critical("rank %d failed", rank, exc_info=True)
        os._exit(1)
    os._exit(0)
