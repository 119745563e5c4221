"""Rank 0's side of a tensor group: starts the followers, connects with them, watches them, ends them.

    start       a process each, with inherited memory (ring, reports, staged updates) and an eventfd
    connect     a process group over a file store in a private folder: gloo on a CPU, NCCL on GPUs; no port is opened
    lead        the followers are ready: size the ring, give orders
    watch       a thread: a follower that ended, or whose loop is silent, is the end of the group
    close       kill the followers: they hold nothing that anybody needs

A group cannot be made whole: the others wait for the lost rank in a collective operation. So rank 0 hands its requests
back and ends, and a supervisor starts it again. The kernel ends the followers when rank 0 ends.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_kernels.parallel import TensorGroup

from rollout.config import Settings
from rollout.models.language_model import LanguageModel, native
from rollout.process.scratch import ScratchFolder
from rollout.ranks.adapters import RankAdapters
from rollout.ranks.orders import Orders
from rollout.ranks.reports import Number, Reports
from rollout.ranks.ring import RingWriter, SharedMemory
from rollout.ranks.updates import RankUpdates

log = logging.getLogger(__name__)

#: Seconds without a pass of a follower's loop after which the group is lost.
SILENT_S = 6.0
#: Seconds that rank 0 waits for room in the ring.
ROOM_S = 8.0
_LOOK_S = 0.25
#: Of loading a checkpoint and capturing steps. A follower that ends meanwhile is noticed at once.
_CONNECT_S = 3600.0
_READY_POLL_S = 0.02
_KILL_WAIT_S = 5.0
_FAILED = 1


class RankLostError(RuntimeError):
    """A follower ended or hangs: the group is at its end."""


class Ranks:
    """The tensor group of a worker, seen from rank 0. Of one rank it has no followers and does nothing.

    The constructor starts the followers. `failure` says why the group is lost, or is empty.
    """

    def __init__(self, settings: Settings) -> None:
        self.size = settings.engine.tensor_parallel
        self.failure = ""
        self.group = TensorGroup.single()
        self.updates: RankUpdates | None = None
        self.orders: Orders | None = None
        self._settings = settings
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._on_lost: Callable[[str], None] = _end_at_once
        if self.size == 1:
            return
        count = self.size - 1
        self._folder = ScratchFolder("rollout-ranks-")
        self._ring = SharedMemory.create("rollout-ring", 0)  # sized by `lead`
        table = SharedMemory.create("rollout-reports", count * Reports.line_bytes())
        self.reports = Reports(table, count)
        self._staged = SharedMemory.create("rollout-update", 0)
        self._manifest = SharedMemory.create("rollout-manifest", 0)
        self._eventfds = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(count)]
        self._adapters = SharedMemory.create("rollout-adapters", 0)
        inherited = {"ring": self._ring, "reports": table, "staged": self._staged, "manifest": self._manifest}
        inherited["adapters"] = self._adapters
        shared = {name: memory.descriptor for name, memory in inherited.items()}
        for rank, eventfd in enumerate(self._eventfds, 1):
            self._processes.append(self._start(rank, {**shared, "eventfd": eventfd}))
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def connect(self, device: torch.device) -> TensorGroup:
        """Connect with the followers, which load the model meanwhile; returns the group."""
        if self.size > 1:
            self.group = connect(self._folder.path, 0, self.size, device)
        return self.group

    def lead(self, ring_bytes: int, version: int) -> Orders | None:
        """Wait until all followers are ready, and give orders from now on. None for one rank."""
        if self.size == 1:
            return None
        while min(self.reports.get("ready")) == 0:
            self.check()
            time.sleep(_READY_POLL_S)
        self._ring.grow(ring_bytes)
        ring = RingWriter(self._ring, self._eventfds, lambda: self.reports.get("position"), ROOM_S)
        self.orders = Orders(ring, version, self.reports)
        return self.orders

    def take_updates(self, device: torch.device) -> RankUpdates | None:
        """What the weight receiver uses to have all ranks take an update; None for one rank."""
        if self.size == 1:
            return None
        self.updates = RankUpdates(self._staged, self._manifest, self.reports, lambda: self.orders, device)
        return self.updates

    def take_adapters(self, model: LanguageModel) -> RankAdapters | None:
        """What gives all ranks their parts of adapters; None for one rank, or where no adapters are served."""
        engine = self._settings.engine
        if self.size == 1 or not engine.adapter_slots:
            return None
        spec, dtype = native(model).spec, model.embed.dtype
        limits = (engine.adapter_rank, dtype, engine.max_adapters)
        return RankAdapters(self._adapters, spec, *limits, self.reports, lambda: self.orders, model.embed.device)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called, on the watching thread, once the group is lost. Before, the process ends at once."""
        self._on_lost = on_lost

    def check(self) -> None:
        """Raise `RankLostError` if the group is lost."""
        if self.failure:
            raise RankLostError(self.failure)

    def status(self) -> list[dict[str, Any]]:
        """The followers, for `status`."""
        names: tuple[Number, ...] = ("sequence", "launched", "swapped")
        columns = [self.reports.get(name) for name in names] if self.size > 1 else []
        return [
            {"rank": rank, "pid": process.pid, **dict(zip(names, numbers, strict=True))}
            for rank, (process, *numbers) in enumerate(zip(self._processes, *columns, strict=True), 1)
        ]

    def wait_for_cause(self, seconds: float) -> str:
        """Why the group is lost, once the watching thread knows it; empty if it does not in time."""
        until_s = time.monotonic() + seconds
        while not self.failure and self._processes and time.monotonic() < until_s:
            time.sleep(_READY_POLL_S)
        return self.failure

    def close(self) -> None:
        """End the followers. Idempotent."""
        if self._closing.is_set() or self.size == 1:
            return
        self._closing.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.wait(_KILL_WAIT_S)
            except subprocess.TimeoutExpired:  # in a driver call that cannot be interrupted
                log.warning("a follower does not end", extra={"pid": process.pid})
        self._folder.close()

    def _start(self, rank: int, shared: dict[str, int]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rollout.ranks.follower"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=list(shared.values()))
        assert process.stdin is not None
        told = {"rank": rank, "parent": os.getpid(), "folder": str(self._folder.path), "shared": shared}
        process.stdin.write(json.dumps({**told, "settings": self._settings.model_dump(mode="json")}).encode())
        process.stdin.close()
        return process

    # --- the watching thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        count = len(self._processes)
        seen, silent_s, looked_s = [0] * count, [0.0] * count, time.monotonic()
        while not self._closing.wait(_LOOK_S):
            # A process that was stopped itself counts only the time that this thread observed.
            now_s = time.monotonic()
            passed_s, looked_s = min(now_s - looked_s, 2 * _LOOK_S), now_s
            beats = self.reports.get("beat")
            silent_s = [
                0.0 if beat != before or beat == 0 else silent + passed_s
                for beat, before, silent in zip(beats, seen, silent_s, strict=True)
            ]
            seen = beats
            if (failure := self._lost(silent_s)) and not self._closing.is_set():
                self.failure = failure
                log.critical("the tensor group is lost: %s", failure)
                self._on_lost(failure)
                return

    def _lost(self, silent_s: list[float]) -> str:
        for rank, process in enumerate(self._processes, 1):
            said = self.reports.text(rank - 1)
            said = f": {said}" if said else ""
            if (status := process.poll()) is not None:
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                return f"rank {rank} {how}{said}"
            if silent_s[rank - 1] > SILENT_S:
                return f"rank {rank} (process {process.pid}) has hung for {silent_s[rank - 1]:.0f} s{said}"
        return ""


def connect(folder: Path, rank: int, size: int, device: torch.device) -> TensorGroup:
    """Connect this process, as one rank, with the others that use the same folder."""
    store = dist.FileStore(str(folder / "store"), size)
    options: dict[str, Any] = {
        "store": store,
        "rank": rank,
        "world_size": size,
        "timeout": timedelta(seconds=_CONNECT_S),
    }
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        with _on_loopback():
            dist.init_process_group("gloo", **options)
    assert dist.group.WORLD is not None
    return TensorGroup.connected(dist.group.WORLD, device)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Gloo listens on the loopback interface; other groups of this process choose for themselves."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end_at_once(failure: str) -> None:
    """While the worker starts nobody waits for an answer, and this rank may wait for the lost one for ever."""
    os._exit(_FAILED)
