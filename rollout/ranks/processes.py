"""Rank 0's side of a tensor group: starts, connects, watches and ends the followers.

    start       a process each (`follower_processes.py`), perhaps before this one has imported its libraries
    connect     a process group over a file store in a private folder: gloo on a CPU, NCCL on GPUs; no port is opened
    lead        the followers are ready: size the ring, give orders
    watch       a thread: a rank that ended or hangs ends the group (`rank_watch.py`; at the start `start_watch.py`)
    close       kill the followers: they hold nothing of value

A group cannot be made whole: the others wait for the lost rank in a collective operation. So rank 0 hands its requests
back and ends, and a supervisor starts it again. The kernel ends the followers when rank 0 ends.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_kernels.parallel import TensorGroup

from rollout.config import Settings
from rollout.engine.messages.statuses import RankStatus
from rollout.models.language_model import LanguageModel, native
from rollout.models.peft_tensors import AdapterPacker
from rollout.process.compiling import compiling, watch_compilations
from rollout.process.watchdog import ObservedTime
from rollout.ranks.adapters import RankAdapters
from rollout.ranks.device_relay import device_memory
from rollout.ranks.devices import rank_device
from rollout.ranks.follower_processes import FollowerProcesses
from rollout.ranks.orders import OrderWriter
from rollout.ranks.rank_watch import COPY_LANES, FollowerState, LaneName, LaneProgress, RanksState, RankWatch
from rollout.ranks.reports import NUMBERS, Number, RankReports
from rollout.ranks.ring import RingWriter
from rollout.ranks.start_watch import CONNECTING, LOADING, READY, StartPosition, StartProgress, StartState, StartWatch
from rollout.ranks.thread_stat import thread_stat
from rollout.ranks.updates import RankUpdates
from rollout.weights.staging import WeightStaging
from rollout.weights.update_memory import UpdateMemories
from trainer_bridge.scratch import ScratchFolder
from trainer_bridge.transports.nccl.nccl_group import NCCL_ENVIRONMENT, environment

log = logging.getLogger(__name__)

_LOOK_S = 0.25
#: Seconds for loading a checkpoint and capturing steps. A follower that ends or hangs meanwhile is noticed before.
_CONNECT_S = 3600.0
_READY_POLL_S = 0.02
_BEATS_TO_SETTLE = 3
_FLAG_CAUSE_S = 1.0
_FAILED = 1
#: Bytes of /dev/shm that are enough for NCCL. The ring and the relay of updates take none of them.
_SHM_BYTES = 1 << 30


class RankLostError(RuntimeError):
    """A follower ended or hangs: the group is at its end."""


class ConnectError(OSError):
    """NCCL cannot connect the ranks; the message says what may be the reason."""


@dataclass(frozen=True, slots=True)
class OwnProgress:
    """The progress of rank 0, for the watching thread."""

    committed: int = 0  # steps
    busy: bool = False  # a step is not complete on the device
    lanes: Mapping[LaneName, LaneProgress] = field(default_factory=dict)
    thread: int = 0  # id of the thread that computes steps


class Ranks:
    """The tensor group of a worker, seen from rank 0. With one rank no method does anything.

    The constructor has the followers load from the folders `checkpoint` and `draft`; it starts them, if `followers` are
    not given. `failure` says why the group is lost, or is empty.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoint: Path | None = None,
        draft: Path | None = None,
        followers: FollowerProcesses | None = None,
    ) -> None:
        self.size = settings.engine.tensor_parallel
        self.failure = ""
        self.group = TensorGroup.single()
        self.updates: RankUpdates | None = None
        self.orders: OrderWriter | None = None
        self._settings = settings
        self._own_start = (CONNECTING, 0, 0)
        self.start = StartProgress(self._set_own_start)
        self._closing, self._closes = threading.Event(), threading.Lock()
        self._on_lost: Callable[[str], None] = self._end_at_once
        self._progress: Callable[[], OwnProgress] = OwnProgress
        if self.size == 1:
            return
        self._folder = ScratchFolder("ranks")
        self._followers = FollowerProcesses(self.size - 1) if followers is None else followers
        self.reports = RankReports(self._followers.memories["reports"], self.size - 1)
        facts: dict[str, Any] = {"folder": str(self._folder.path), "settings": settings.model_dump(mode="json")}
        for name, folder in (("checkpoint", checkpoint), ("draft", draft)):
            facts[name] = None if folder is None else str(folder)
        self._followers.send_facts(facts)
        self._watch_rules = RankWatch(self.size - 1, settings.engine.rank_stall_s)
        self._start_rules = StartWatch(settings.engine.rank_start_stall_s)
        watch_compilations()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def connect(self, device: torch.device) -> TensorGroup:
        """Connect with the followers, which load the model meanwhile; returns the group."""
        if self.size > 1:
            self.start.enter(CONNECTING)
            self.group = connect(self._folder.path, 0, self.size, device)
            self.start.enter(LOADING)
        return self.group

    def lead(self, ring_bytes: int, version: int) -> OrderWriter:
        """Wait until all followers are ready, and give orders from now on. Only of several ranks."""
        self.start.enter(READY)
        while min(self.reports.get("ready")) == 0:
            self.check()
            time.sleep(_READY_POLL_S)
        memory, eventfds = self._followers.memories["ring"], self._followers.eventfds
        memory.grow(ring_bytes, reserve=True)
        ring = RingWriter(memory, eventfds, lambda: self.reports.get("position"), lambda: bool(self._why_lost()))
        self.orders = OrderWriter(ring, version, self.reports, self._settle, self.updates)
        return self.orders

    def update_memories(self, staging: WeightStaging) -> UpdateMemories:
        """The memory for updates, which all ranks take or none; `staging` belongs to this rank."""
        if self.size == 1:
            return UpdateMemories(staging)
        self.updates = RankUpdates(
            staging,
            self._followers.memories,
            self.reports,
            lambda: self.orders,
            device_memory(next(iter(staging.views.values())).device),
            lost=self._why_lost,
            cuts=self._followers.cuts,
        )
        return self.updates

    def adapter_packer(self, model: LanguageModel) -> AdapterPacker:
        """The packer that gives all ranks their parts of adapters."""
        engine, device = self._settings.engine, model.embed.device
        if self.size == 1 or not engine.adapter_slots:
            return AdapterPacker(pinned=device.type == "cuda")
        memory, spec, dtype = self._followers.memories["adapters"], native(model).spec, model.embed.dtype
        return RankAdapters(memory, spec, engine, dtype, device, lambda: self.orders, self._why_lost)

    def watch(self, on_lost: Callable[[str], None], progress: Callable[[], OwnProgress]) -> None:
        """Have `on_lost` called, on the watching thread, once the group is lost. Before, the process ends at once.

        `progress` is called on that thread, too.
        """
        self._progress = progress
        self._on_lost = on_lost

    def check(self) -> None:
        """Raise `RankLostError` if the group is lost."""
        if self.failure:
            raise RankLostError(self.failure)

    def status(self, launched: int, committed: int) -> list[RankStatus]:
        """All ranks; empty if there is one. `launched` and `committed` are steps of rank 0."""
        if self.size == 1:
            return []
        orders = self.orders
        ordered, swapped = (0, 0) if orders is None else (orders.ordered, orders.swapped)
        names: tuple[Number, ...] = ("sequence", "launched", "done")
        copies = map(sum, zip(*(self.reports.ended(lane) for lane in COPY_LANES if lane != "swap"), strict=True))
        followers = zip(
            self._followers.pids,
            self._watch_rules.silent_s,
            *(self.reports.get(name) for name in names),
            self.reports.ended("swap"),
            self.reports.get("prepared"),
            copies,
            strict=True,
        )
        rows = [(os.getpid(), 0.0, ordered, launched, committed, swapped, swapped, 0), *followers]
        device = self._settings.model.device
        return [RankStatus(rank, pid, rank_device(device, rank), *row) for rank, (pid, *row) in enumerate(rows)]

    def wait_for_cause(self, seconds: float) -> str:
        """Why the group is lost, once the watching thread knows it; empty if it does not in time."""
        until_s = time.monotonic() + seconds
        while not self.failure and self.size > 1 and time.monotonic() < until_s:
            time.sleep(_READY_POLL_S)
        return self.failure

    def close(self) -> None:
        """End the followers. Idempotent: the main thread and the watching thread may both call it, and both wait."""
        with self._closes:
            if self._closing.is_set() or self.size == 1:
                return
            self._closing.set()
            self._followers.kill()
            self._folder.close()

    def _why_lost(self) -> str:
        """Why nothing comes from the followers any more; empty if it does."""
        return self.failure or ("the worker ends" if self._closing.is_set() else "")

    def _end_at_once(self, failure: str) -> None:
        """End the process in its start: no client waits yet, and this rank may wait for the lost rank for ever."""
        self.close()
        os._exit(_FAILED)

    # --- the watching thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        observed = ObservedTime(_LOOK_S)
        while not self._closing.wait(_LOOK_S):
            passed_s = observed.passed_s()
            try:
                look = self._look()
                failure = self._watch_rules.find_stall(look, passed_s)
                if not failure and self.orders is None:
                    failure = self._start_rules.find_stall(self._look_at_start(), _compiles(look), passed_s)
            except RuntimeError as error:  # an error of the device
                failure = f"rank 0: {error}"
            if failure and not self._closing.is_set():
                self.failure = failure
                log.critical("the tensor group is lost: %s", failure)
                self._on_lost(failure)
                return

    def _look(self) -> RanksState:
        own, orders = self._progress(), self.orders
        columns = {name: self.reports.get(name) for name in NUMBERS}
        followers, on_cpu = [], self.group.device.type == "cpu"
        for number, process in enumerate(self._followers.running):
            at = {name: column[number] for name, column in columns.items()}
            main = thread_stat(process.pid, process.pid)
            compute_s = thread_stat(process.pid, at["thread"]).cpu_s
            followers.append(
                FollowerState(
                    pid=process.pid,
                    status=process.poll(),
                    stopped=main.state == "T",
                    said=self.reports.text(number, "end"),
                    beat=at["beat"],
                    ready=at["ready"] > 0,
                    sequence=at["sequence"],
                    launched=at["launched"],
                    done=at["done"],
                    lanes=self.reports.lanes(number),
                    looks=at["looks"],
                    compiling=at["compiling"] > 0,
                    main_s=main.cpu_s if on_cpu else None,
                    compute_s=compute_s if on_cpu else None,
                )
            )
        return RanksState(
            followers,
            ordered=0 if orders is None else orders.ordered,
            done=own.committed,
            busy=own.busy,
            lanes=own.lanes,
            compiling=compiling() > 0,
            compute_s=thread_stat(os.getpid(), own.thread).cpu_s if on_cpu else None,
        )

    def _look_at_start(self) -> list[StartState]:
        columns = [self.reports.get(name) for name in ("stage", "stage_done", "stage_total")]
        reported = [self._own_start, *zip(*columns, strict=True)]
        pids = [os.getpid(), *self._followers.pids]
        on_cpu = rank_device(self._settings.model.device, 0) == "cpu"
        return [
            look_at_start(pid, stage, done, total, on_cpu)
            for pid, (stage, done, total) in zip(pids, reported, strict=True)
        ]

    def _set_own_start(self, stage: int, done: int, total: int) -> None:
        self._own_start = stage, done, total

    def _settle(self) -> None:
        """Return when the flags that followers had at the call are known; raise if one is set, or a rank is lost."""
        if self.group.peers is None:
            return
        before = self.reports.get("beat")
        # The first beat may be older than the call, and each beat reports the copy that the one before began.
        while min(now - then for now, then in zip(self.reports.get("beat"), before, strict=True)) < _BEATS_TO_SETTLE:
            self.check()
            time.sleep(_READY_POLL_S)
        if any(self.reports.get("fault")):
            self.wait_for_cause(_FLAG_CAUSE_S)
            raise RankLostError(self.failure or "a rank did not get a part of a sum in time")
        self.check()


def look_at_start(pid: int, stage: int, done: int, total: int, on_cpu: bool) -> StartState:
    """A look at a process that has reported its stage, with parts done and parts in all."""
    main = thread_stat(pid, pid)
    cpu_s = main.cpu_s if on_cpu or stage <= CONNECTING else main.kernel_s
    position = StartPosition(stage, total > 0, done)
    return StartState(position, total, _read_bytes(pid), main.state == "D", cpu_s)


def _read_bytes(pid: int) -> int:
    """Bytes that the main thread has read, by calls and from disks; 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/task/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))


def _compiles(look: RanksState) -> bool:
    return look.compiling or any(follower.compiling for follower in look.followers)


def connect(folder: Path, rank: int, size: int, device: torch.device) -> TensorGroup:
    """Connect this process, as one rank, with the others that use the same folder. Raises `ConnectError` on GPUs."""
    store = dist.FileStore(str(folder / "store"), size)
    options: dict[str, Any] = {
        "store": store,
        "rank": rank,
        "world_size": size,
        "timeout": timedelta(seconds=_CONNECT_S),
    }
    if device.type == "cuda":
        try:
            # The loss of a rank must not end rank 0, which has tokens to return.
            with environment(NCCL_ENVIRONMENT):
                dist.init_process_group("nccl", device_id=device, **options)
        except RuntimeError as error:
            raise connect_error(error, _shm_free_bytes()) from error
    else:
        with environment({"GLOO_SOCKET_IFNAME": "lo"}):  # other groups of this process choose for themselves
            dist.init_process_group("gloo", **options)
    assert dist.group.WORLD is not None
    return TensorGroup.connected(dist.group.WORLD, device)


def connect_error(error: RuntimeError, shm_free_bytes: float) -> ConnectError:
    """An error of NCCL with a likely cause, which comes first: rank 0 shows the beginning of a follower's error."""
    hint = ""
    if shm_free_bytes < _SHM_BYTES:
        free = f"/dev/shm has {shm_free_bytes / (1 << 20):.0f} MiB free"
        hint = f" ({free}, and NCCL may need more: in a container raise --shm-size to 1g)"
    return ConnectError(f"NCCL cannot connect the ranks{hint}: {error}")


def _shm_free_bytes() -> float:
    """Free bytes of the file system from which NCCL takes shared memory; without limit if it is not there."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize
