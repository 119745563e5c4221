"""The copies of a follower besides its steps: swaps, adapters, KV to the host and back; and its sleeps.

Rank 0 waits for no copy: it asks whether all followers have acknowledged it. A copy counts as begun when the device
begins it, so the watch can tell a hung copy from a copy that waits for its turn.

    adapter_copies   beside steps: adapters stream, after the steps that were launched before it; steps that read the
                     slot come later. In use: compute stream, between two steps, as on rank 0
    kv_out ..        stream of the direction, after the steps that were launched before it
    swap             compute stream, between two steps
    kv_write ..      threads of `DiskFiles`, which acknowledge an order when it has ended
    sleep            here, while the device is quiet

Pieces of an update that rank 0 has dropped may still be on their way into staging memory that a sleep gives back. So an
order of a sleep waits for the thread of updates.
"""

import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engine.device.releasable import MemoryShortError, ReleasableMemory
from rollout.engine.device.streams import Event
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.kv.tiers.disk_files import DiskFiles, DiskJob
from rollout.engine.kv.tiers.page_mover import CopyQueue, HostMemory
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.step.execute import Executor
from rollout.ranks.adapters import AdapterCopies
from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.rank_watch import LANES, LaneName
from rollout.ranks.reports import LaneReport, RankReports


class FollowerCopies:
    """Carries out orders to copy, and reports when the copies have ended."""

    def __init__(
        self,
        executor: Executor,
        adapters: AdapterCopies,
        updates: OrderedWork,
        memory: ReleasableMemory,
        reports: RankReports,
        number: int,
    ) -> None:
        self._executor, self._adapters, self._updates = executor, adapters, updates
        self._reports, self._number = reports, number
        self._queues: dict[Any, CopyQueue] = {queue.name: queue for queue in executor.copy_queues}
        self._copies: dict[LaneName, deque[tuple[int, Event, Event]]] = {"adapter_copies": deque(), "swap": deque()}
        self._lanes: dict[Any, LaneReport] = {lane: LaneReport(reports, number, lane) for lane in LANES}
        self._sleeps: dict[str, Callable[[], int | None]] = {
            "save": memory.save,
            "release": memory.release,
            "restore": memory.restore,
            "fall_back": memory.fall_back,
            "forget": memory.forget,
        }
        self._orders: dict[Any, Callable[..., object]] = {
            "adapters": adapters.carry_out,
            "adapter_copies": self._write,
            "sleep": self._change_memory,
            **{name: functools.partial(self._move, queue) for name, queue in self._queues.items()},
        }
        for name, mover in (("kv", executor.mover), ("state", executor.state_mover)):
            if mover is not None:
                lanes = f"{name}_write", f"{name}_read"
                files = FollowerFiles(mover.host_memory, 1 + number, *(self._lanes[lane] for lane in lanes))
                self._orders |= dict.fromkeys(lanes, files.carry_out)

    def carry_out(self, lane: LaneName, number: int, *fields: Any) -> None:
        """Begin an order. Raises KeyError for an unknown one."""
        self._orders[lane](number, *fields)

    def watch(self, lane: LaneName, number: int, start: Event, end: Event) -> None:
        """Report when the device begins a copy that is enqueued, and when the copy has ended."""
        self._copies[lane].append((number, start, end))

    def report(self) -> bool:
        """Report the copies that have ended; true while others are under way. Raises RuntimeError if one failed."""
        for name, queue in self._queues.items():
            for piece in queue.finished():
                if piece.failure:
                    raise RuntimeError(f"KV cannot be moved: {piece.failure}")
                self._lanes[name].end(piece.entries)
            for piece in queue.under_way:
                if piece.start.query():
                    self._lanes[name].begin(piece.entries)
        for lane, copies in self._copies.items():
            for number, start, _ in copies:
                if start.query():
                    self._lanes[lane].begin(number)
            while copies and copies[0][2].query():
                self._executor.check()
                self._lanes[lane].end(copies.popleft()[0])
        return any(queue.under_way for queue in self._queues.values()) or any(self._copies.values())

    def _write(self, number: int, slot: int, adapter: int, beside: bool) -> None:
        executor, memory = self._executor, find_feature(self._executor.step.features, AdapterMemory)
        assert memory is not None, "rank 0 has slots for adapters, and so has this rank"
        loads = executor.streams.beside[memory.name]
        stream, start, end = executor.compute, executor.device.event(), executor.device.event()
        if beside:
            launched = executor.device.event()
            stream.record(launched)
            loads.wait(launched)
            stream = loads
        stream.record(start)
        stream.run(functools.partial(memory.slots.write, slot, self._adapters.weights(adapter)))
        stream.record(end)
        self.watch("adapter_copies", number, start, end)

    def _move(self, queue: CopyQueue, number: int, pages: list[int], host_pages: list[int]) -> None:
        self.report()  # a piece that rank 0 knows to have ended is free here, too
        queue.start(pages, host_pages, number, self._executor.compute)

    def _change_memory(self, number: int, what: str) -> None:
        self._updates.finish()
        if what in ("save", "release"):
            self._executor.finish()
        failure = ""
        try:
            self._reports.add(self._number, "memory_freed", self._sleeps[what]() or 0)
        except MemoryShortError as error:
            failure = str(error)
        self._lanes["sleep"].end(number, failure)


class FollowerFiles:
    """Files of this rank's parts of pages, which `memory` has. Their threads acknowledge the orders."""

    def __init__(self, memory: HostMemory, rank: int, writes: LaneReport, reads: LaneReport) -> None:
        self._memory, self._rank = memory, rank
        self._lanes = {"write": writes, "read": reads}
        self._orders: dict[str, Callable[..., object]] = {"open": self._open}

    def carry_out(self, number: int, what: str, *fields: Any) -> None:
        """Begin an order of either lane. Raises KeyError for an unknown one; a folder is opened first."""
        self._orders[what](number, *fields)

    def _open(self, number: int, folder: str) -> None:
        own = Path(folder) / f"rank{self._rank}"
        files = DiskFiles(own, self._memory, self._ended, functools.partial(own.mkdir, 0o700))
        self._orders |= {
            "write": files.write,
            "read": files.read,
            "delete": lambda number, keys: files.delete(keys),
            "give up": lambda number: files.give_up_reads(),
            "close": functools.partial(self._close, files),
        }

    def _close(self, files: DiskFiles, number: int) -> None:
        if files.close():
            self._lanes["write"].end(number)

    def _ended(self, job: DiskJob) -> None:
        self._lanes[job.kind].end(job.order, job.failure)
