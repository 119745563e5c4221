"""A follower: a process that runs the steps of rank 0 on its own shard, and nothing else.

    main thread    ring --> launch, draw, swap on its own streams        no scheduler, no copy back, no commit
    updates        receives updates (`follower_updates.py`)
    adapters       maps adapters, which takes longer than a step
    beat           reports that the process lives and how far its device is (`beat.py`)

It has the shard of the model, KV pages, row state and slots that rank 0 has, made by the same code in the same order.
A follower ends with rank 0 (the kernel sees to it), and at any error: rank 0 then ends the group.
"""

import logging
import os
from pathlib import Path
from typing import Any

import msgpack

from rollout.config import Settings
from rollout.engine.build import build_follower, sleeping_memory
from rollout.engine.device.streams import make_device
from rollout.engine.step.execute import Executor
from rollout.engine.step.slot import Slot
from rollout.engine.upload import Header, RowNeeds, Upload
from rollout.models import load_model
from rollout.process.compiling import use_kernels, watch_compilations
from rollout.process.interpreter import collect_and_freeze, hand_over_soon, set_cpu_threads
from rollout.process.logs import set_up, worker_name
from rollout.ranks.adapters import AdapterCopies
from rollout.ranks.beat import Beat, DeviceProgress
from rollout.ranks.copies import FollowerCopies
from rollout.ranks.device_relay import device_memory
from rollout.ranks.devices import rank_device
from rollout.ranks.follower_updates import FollowerUpdates
from rollout.ranks.orders import ANY_VERSION, DRAW, END, EXTRA, LANE, STEP, read_draw, read_step
from rollout.ranks.processes import connect
from rollout.ranks.rank_watch import LaneName
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.ring import OrderHeader, RingReader, SharedMemory
from rollout.ranks.start_watch import CONNECTING, LOADING, PREPARING, READY, StartProgress
from rollout.ranks.updates import write_cuts
from rollout.weights.parameter_map import ParameterMap, update_names
from rollout.weights.staging import make_staging

log = logging.getLogger(__name__)

_WAIT_S = 0.25  # wait for orders between two looks at the streams
_COPYING_POLL_S = 0.002  # while a copy is under way, whose end is reported


class Follower:
    """Carries out the orders of rank 0."""

    def __init__(
        self,
        settings: Settings,
        number: int,
        executor: Executor,
        slots: list[Slot],
        updates: FollowerUpdates,
        copies: FollowerCopies,
        progress: DeviceProgress,
    ) -> None:
        self._executor, self._slots, self._updates, self._copies = executor, slots, updates, copies
        self._number, self._progress = number, progress
        self._version = settings.weights.initial_version
        self._extra = bytearray()  # extra data of the next step
        self._last: tuple[Header, Slot] | None = None

    def serve(self, reader: RingReader, reports: RankReports) -> None:
        """Carry out orders until the end is ordered. Raises what goes wrong."""
        me = self._number
        reports.set(me, "thread", self._executor.compute.thread_id)
        reports.set(me, "ready", 1)
        while True:
            copying = self._copies.report()
            reports.add(me, "looks")
            if not reader.wait(_COPYING_POLL_S if copying else _WAIT_S):
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

    def _carry_out(self, head: OrderHeader, body: memoryview, reports: RankReports) -> None:
        layout, rest = body[: head.layout], body[head.layout :]
        if head.kind == STEP:
            content, self._extra = self._extra, bytearray()
            upload = read_step(layout, rest, content)
            self._launch(upload)
            if not upload.header.needs & RowNeeds.CONSTRAIN.value:
                self._enqueued(reports)
        elif head.kind == EXTRA:
            self._extra += rest
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
        elif head.kind == LANE:
            self._carry_out_lane(*msgpack.unpackb(layout))
        else:
            raise RuntimeError(f"an order has the unknown kind {head.kind}")

    def _carry_out_lane(self, lane: LaneName, number: int, *fields: Any) -> None:
        if lane == "swap":
            self._begin_swap(number, *fields)
        elif lane == "update_reads":
            self._updates.read(number, *fields)
        elif lane != "updates":
            self._copies.carry_out(lane, number, *fields)
        else:
            if self._updates.in_place and fields[0] in ("open", "prepare"):
                self._executor.finish()  # rank 0 holds generation when it writes, and has committed all steps
            self._updates.carry_out(number, *fields)

    def _enqueued(self, reports: RankReports) -> None:
        self._progress.enqueued += 1
        reports.set(self._number, "launched", self._progress.enqueued)

    def _launch(self, upload: Upload) -> None:
        slot = self._slots[0]
        self._slots.reverse()
        slot.h2d_done.synchronize()  # the upload of two steps before is read
        words = slot.staging.words[: len(upload.words)]
        words.copy_(upload.words)
        self._executor.h2d.wait(slot.end)  # its copy on the device is free, too
        self._executor.execute(Upload(upload.header, words, upload.extras), slot)
        self._last = (upload.header, slot)

    def _begin_swap(self, number: int, version: int) -> None:
        copies = self._updates.take(number, version)
        device = self._executor.device
        start, end = device.event(), device.event()
        self._executor.swap(version, lambda: self._updates.staging.swap_copies.enqueue(copies), start, end)
        self._version = version
        self._copies.watch("swap", number, start, end)


def run_follower(told: dict[str, Any]) -> None:
    """Be the rank that rank 0 has asked for; never returns."""
    settings, rank = Settings.model_validate(told["settings"]), told["rank"]
    set_up(settings.log_level, settings.log_format, f"{worker_name()} rank {rank}")
    shared = {name: SharedMemory(descriptor) for name, descriptor in told["shared"].items() if name != "eventfd"}
    reports, number = RankReports(shared["reports"], settings.engine.tensor_parallel - 1), rank - 1
    beat = Beat(reports, number, None if settings.engine.rank_stall_s is None else os.getppid())

    def report(stage: int, done: int, total: int) -> None:
        for name, value in (("stage", stage), ("stage_total", total), ("stage_done", done)):
            reports.set(number, name, value)  # type: ignore[arg-type]

    start = StartProgress(report)
    try:
        watch_compilations()
        use_kernels(settings.engine.kernel_cache)
        set_cpu_threads()
        hand_over_soon()  # the thread of updates must not hold back the launch of a step
        device = make_device(rank_device(settings.model.device, rank))
        start.enter(CONNECTING)
        group = connect(Path(told["folder"]), rank, settings.engine.tensor_parallel, device.torch_device)
        model = settings.model.model_copy(update={"device": str(device.torch_device)})
        engine = settings.engine
        start.enter(LOADING)
        loaded = load_model(
            model,
            device.torch_device,
            start.advance,
            folder=Path(told["checkpoint"]),  # the folder that rank 0 found: a hub may have changed meanwhile
            weights=engine.weight_format,
            group=group,
            draft=None if told["draft"] is None else Path(told["draft"]),
            mtp=engine.mtp,
            split=engine.attention_split,
        )
        start.enter(PREPARING)
        memory = sleeping_memory(settings, device, loaded.model)  # before anything takes views of the weights
        allocate = memory.buffer if memory.sleeps else None
        parameters = ParameterMap(loaded.trainer_views(), update_names(settings.model, loaded))
        advance = LaneReport(reports, number, "updates").advance
        staging = make_staging(parameters.views, settings.weights, True, allocate, advance)
        memories = (shared["relayed"], shared["manifest"], reports, number)
        updates = FollowerUpdates(parameters, staging, *memories, device_memory(device.torch_device))
        write_cuts(shared["cuts"], staging.cuts)
        adapters = AdapterCopies(shared["adapters"], rank, loaded.dtype, device.torch_device, reports)
        executor, slots = build_follower(settings, device, loaded.model, memory, start.advance)
        copies = FollowerCopies(executor, adapters, updates.work, memory, reports, number)
        progress = DeviceProgress(device, slots, group.peers, memory, staging.swap_copies)
        follower = Follower(settings, number, executor, slots, updates, copies, progress)
        reader = RingReader(
            shared["ring"], told["shared"]["eventfd"], lambda position: reports.set(number, "position", position)
        )
        collect_and_freeze()
        start.enter(READY)
        beat.serve(progress)
        follower.serve(reader, reports)
    # The other ranks wait for this one: say why it ends, and end, whatever threads still run.
    except BaseException as error:
        reports.set_text(number, "end", f"{type(error).__name__}: {error}")
        log.critical("rank %d failed", rank, exc_info=True)
        os._exit(1)
    os._exit(0)
