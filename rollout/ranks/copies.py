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
from rollout.ranks.group_watch import LANES, LaneName
from rollout.ranks.ordered_work import OrderedWork
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
        self._executor, self._adapters, self._memory = executor, adapters, memory
        self._updates = updates
        self._reports, self._number = reports, number
        self._queues: dict[Any, CopyQueue] = {queue.name: queue for queue in executor.copy_queues}
        self._copies: dict[LaneName, deque[tuple[int, Event, Event]]] = {"adapter_copies": deque(), "swap": deque()}
        self._lanes = {lane: LaneReport(reports, number, lane) for lane in LANES}
        self._files: dict[Any, FollowerFiles] = {}
        lanes: dict[Any, LaneReport] = {**self._lanes}
        for name, mover in (("kv", executor.mover), ("state", executor.state_mover)):
            if mover is not None:
                write, read = f"{name}_write", f"{name}_read"
                files = FollowerFiles(mover.host_memory, 1 + number, lanes[write], lanes[read])
                self._files[write] = self._files[read] = files

    def carry_out(self, lane: LaneName, number: int, *fields: Any) -> None:
        """Begin an order. Raises RuntimeError for an unknown one."""
        if lane == "adapters":
            self._adapters.carry_out(number, *fields)
        elif lane == "adapter_copies":
            self._write(number, *fields)
        elif lane in self._queues:
            self._move(lane, number, *fields)
        elif lane == "sleep":
            self._change_memory(number, *fields)
        elif lane in self._files:
            self._files[lane].carry_out(number, *fields)
        else:
            raise RuntimeError(f"an order is for an unknown lane, {lane}")

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

    def _move(self, queue: LaneName, number: int, pages: list[int], host_pages: list[int]) -> None:
        self.report()  # a piece that rank 0 knows to have ended is free here, too
        self._queues[queue].start(pages, host_pages, number, self._executor.compute)

    def _change_memory(self, number: int, what: str) -> None:
        memory = self._memory
        self._updates.finish()
        failure = ""
        try:
            if what == "save":
                self._executor.finish()
                memory.save()
            elif what == "release":
                self._executor.finish()
                self._freed(memory.release())
            elif what == "restore":
                memory.restore()
            elif what == "fall_back":
                self._freed(memory.fall_back())
            else:
                memory.forget()
        except MemoryShortError as error:
            failure = str(error)
        self._lanes["sleep"].end(number, failure)

    def _freed(self, nbytes: int) -> None:
        self._reports.add(self._number, "memory_freed", nbytes)


class FollowerFiles:
    """Files of this rank's parts of pages, which `memory` has. Their threads acknowledge the orders."""

    def __init__(self, memory: HostMemory, rank: int, writes: LaneReport, reads: LaneReport) -> None:
        self._memory, self._rank = memory, rank
        self._lanes = {"write": writes, "read": reads}
        self._files: DiskFiles | None = None

    def carry_out(self, number: int, what: str, *fields: Any) -> None:
        """Begin an order of either lane. Raises RuntimeError for an unknown one."""
        if what == "open":
            (folder,) = fields
            own = Path(folder) / f"rank{self._rank}"
            self._files = DiskFiles(own, self._memory, self._ended, functools.partial(own.mkdir, 0o700))
            return
        assert self._files is not None, "a folder is opened first"
        if what == "write":
            self._files.write(number, *fields)
        elif what == "read":
            self._files.read(number, *fields)
        elif what == "delete":
            self._files.delete(*fields)
        elif what == "give up":
            self._files.give_up_reads()
        elif what == "close":
            if self._files.close():
                self._lanes["write"].end(number)
        else:
            raise RuntimeError(f"an order for files is unknown, {what}")

    def _ended(self, job: DiskJob) -> None:
        self._lanes[job.kind].end(job.order, job.failure)
