"""What a follower copies besides steps and updates: adapters to their slots, KV to the host and back; and its sleeps.

Rank 0 waits for no copy: it asks whether all followers have reported its end. Copies of one kind are reported in their
order. What the device has begun is reported, too, so a copy that hangs is told from one that waits for its turn.

    WRITE beside     adapters stream   after the steps that were launched before it; steps that read the slot come later
    WRITE in use     compute stream    between two steps, as on rank 0
    MOVE             stream of the direction, after the steps that were launched before it
    MEMORY           here, while the device is quiet

Pieces of an update that rank 0 has dropped may still be on their way into staging memory that a sleep gives back. So an
order of a sleep waits for the thread of updates.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from rollout.engine.device.releasable import MemoryShortError, ReleasableMemory
from rollout.engine.device.streams import Event
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.kv.page_mover import CopyQueue
from rollout.engine.schedule.feature import find
from rollout.engine.step.execute import Executor
from rollout.ranks.adapters import AdapterCopies
from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.orders import ADAPTER, FORGET, MEMORY, MOVE, WRITE
from rollout.ranks.reports import Reports


class FollowerCopies:
    """Carries out orders to copy, and reports when the copies have ended."""

    def __init__(
        self,
        executor: Executor,
        adapters: AdapterCopies,
        updates: OrderedWork,
        memory: ReleasableMemory | None,
        reports: Reports,
        number: int,
    ) -> None:
        self._executor, self._adapters, self._memory = executor, adapters, memory
        self._updates = updates
        self._reports, self._number = reports, number
        self._queues: dict[str, CopyQueue] = {queue.name: queue for queue in executor.copy_queues}
        self._moved = dict.fromkeys(self._queues, 0)
        self._writes: deque[tuple[int, Event, Event]] = deque()  # number, start, end
        self._forgets: deque[tuple[int, int, int]] = deque()  # (after this write, ticket, adapter)
        self._written = self._ordered = 0

    def carry_out(self, kind: int, body: list[Any]) -> None:
        """Begin what is ordered. Raises RuntimeError for an unknown order."""
        if kind == ADAPTER:
            self._adapters.prepare(*body)
        elif kind == WRITE:
            self._write(*body)
        elif kind == FORGET:
            self._forgets.append((self._ordered, *body))
        elif kind == MOVE:
            self._move(*body)
        elif kind == MEMORY:
            self._change_memory(*body)
        else:
            raise RuntimeError(f"an order is of an unknown kind, {kind}")

    def report(self) -> bool:
        """Report the copies that have ended; true while others are under way. Raises RuntimeError if one failed."""
        moving = False
        for name, queue in self._queues.items():
            for piece in queue.finished():
                if piece.failure:
                    raise RuntimeError(f"KV cannot be moved: {piece.failure}")
                self._moved[name] += 1
                self._reports.set(self._number, name, self._moved[name])  # type: ignore[arg-type]
            if queue.under_way:
                moving = True
                begun = self._moved[name] + sum(piece.start.query() for piece in queue.under_way)
                self._reports.set(self._number, f"{name}_begun", begun)  # type: ignore[arg-type]
        for number, start, _ in self._writes:
            if start.query():
                self._reports.set(self._number, "writes_begun", number)
        while self._writes and self._writes[0][2].query():
            self._written = self._writes.popleft()[0]
            self._executor.check()
            self._reports.set(self._number, "wrote", self._written)
        while self._forgets and self._forgets[0][0] <= self._written:
            self._adapters.forget(*self._forgets.popleft()[1:])
        return moving or bool(self._writes)

    def _write(self, number: int, slot: int, adapter: int, beside: bool) -> None:
        executor, memory = self._executor, find(self._executor.step.features, AdapterMemory)
        assert memory is not None, "rank 0 has slots for adapters, and so has this rank"
        loads = executor.streams.beside[memory.name]
        stream, start, done = executor.compute, executor.device.event(), executor.device.event()
        if beside:
            launched = executor.device.event()
            stream.record(launched)
            loads.wait(launched)
            stream = loads
        stream.record(start)
        stream.run(functools.partial(memory.slots.write, slot, self._adapters.weights(adapter)))
        stream.record(done)
        self._writes.append((number, start, done))
        self._ordered = number

    def _move(self, queue: str, pages: list[int], host_pages: list[int]) -> None:
        self.report()  # a piece that rank 0 knows to have ended is free here, too
        self._queues[queue].start(pages, host_pages, None, self._executor.compute)

    def _change_memory(self, number: int, what: str) -> None:
        memory = self._memory
        assert memory is not None, "rank 0 can sleep, and so can this rank"
        self._updates.finish()
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
            self._reports.say(self._number, "memory", str(error))
            self._reports.set(self._number, "memory_failed", number)
        self._reports.set(self._number, "memory_done", number)

    def _freed(self, nbytes: int) -> None:
        before = self._reports.get("memory_freed")[self._number]
        self._reports.set(self._number, "memory_freed", before + nbytes)
