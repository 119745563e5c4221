"""The beat of a follower: a thread that reports that the process lives, and how far its device is.

    every quarter of a second    done, parts, fault, beat    in this order: a new beat means that the others are new

The beat has its own thread, so a long launch, a compilation or a large update does not silence it: if the beat stands
still, the whole process does. The other numbers tell whether the loop and the device go on (`rank_watch.py`).

A follower whose flag is set (`PeerBuffers.fault`), or whose device fails, ends here, also while its loop waits for the
device. It also kills rank 0 if that process is stopped for `SILENT_S`: its clients would wait, and no other
process can tell them. A supervisor then starts the group again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence

import torch
from rollout_kernels.parallel.peer_buffers import PeerBuffers

from rollout.engine.device.releasable import ReleasableMemory
from rollout.engine.device.streams import Device
from rollout.engine.step.slot import Slot
from rollout.process.compiling import compiling
from rollout.process.watchdog import ObservedTime
from rollout.ranks.rank_watch import BEAT_S, SILENT_S
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.thread_stat import is_stopped
from rollout.weights.staged_weights import SwapCopies

log = logging.getLogger(__name__)

_FAILED = 1


class Beat:
    """Beats from its construction on; looks at the device from `serve` on.

    `rank_0` is the process that is killed if it is stopped; None: none is.
    """

    def __init__(self, reports: RankReports, number: int, rank_0: int | None = None) -> None:
        self._reports, self._number, self._rank_0 = reports, number, rank_0
        self._swap, self._sleep = LaneReport(reports, number, "swap"), LaneReport(reports, number, "sleep")
        self._progress: DeviceProgress | None = None
        threading.Thread(target=self._run, name="beat", daemon=True).start()

    def serve(self, progress: DeviceProgress) -> None:
        """Report this progress, too. No step is captured any more: CUDA forbids questions during a capture."""
        self._progress = progress

    def _run(self) -> None:
        pause, reports, me = threading.Event(), self._reports, self._number
        stopped_s, observed = 0.0, ObservedTime(BEAT_S)
        while not pause.wait(BEAT_S):
            passed_s = observed.passed_s()
            stopped_s = stopped_s + passed_s if self._rank_0_is_stopped() else 0.0
            if stopped_s > SILENT_S:
                self._end_rank_0()
            try:
                reports.set(me, "compiling", compiling())
                if self._progress is not None:
                    self._look(self._progress)
            # The loop may wait for a device that is lost: the other ranks must know.
            except Exception as error:
                self._end(f"{type(error).__name__}: {error}")
            reports.add(me, "beat")

    def _look(self, progress: DeviceProgress) -> None:
        self._reports.set(self._number, "done", progress.done())
        self._swap.advance_to(progress.swap_parts())
        self._sleep.advance_to(progress.memory_parts())
        if (lost := progress.lost_rank()) is not None:
            self._reports.set(self._number, "fault", 1 + lost)
            self._end(f"rank {lost} did not send its part of a sum in time, or sent a wrong part")

    def _rank_0_is_stopped(self) -> bool:
        return self._rank_0 is not None and is_stopped(self._rank_0)

    def _end_rank_0(self) -> None:
        assert self._rank_0 is not None
        log.critical("rank 0 (process %d) has been stopped for %g s: it is killed", self._rank_0, SILENT_S)
        os.kill(self._rank_0, signal.SIGKILL)
        os._exit(_FAILED)

    def _end(self, reason: str) -> None:
        self._reports.set_text(self._number, "end", reason)
        log.critical("this rank ends: %s", reason)
        os._exit(_FAILED)


class DeviceProgress:
    """The progress of this process's device. `done` and `lost_rank` belong to one thread; they wait for nothing."""

    def __init__(
        self,
        device: Device,
        slots: Sequence[Slot],
        peers: PeerBuffers | None,
        memory: ReleasableMemory | None = None,
        swaps: SwapCopies | None = None,
    ) -> None:
        self._device, self._slots, self._peers, self._memory = device, tuple(slots), peers, memory
        self._swaps = swaps or SwapCopies()
        self.enqueued = 0  # steps whose end is enqueued; counted by the loop
        self._done = 0
        self._copy: _FlagCopy | None = None

    def done(self) -> int:
        """Steps that are complete on the device."""
        enqueued = self.enqueued  # first: a step that is enqueued meanwhile makes the result smaller, not larger
        running = sum(not slot.end.query() for slot in self._slots)
        self._done = max(self._done, enqueued - running)
        return self._done

    def swap_parts(self) -> int:
        """Parts of swaps that are done."""
        return self._swaps.parts_done()

    def memory_parts(self) -> int:
        """Parts of sleeps and wakes that are done."""
        return 0 if self._memory is None else self._memory.parts

    def lost_rank(self) -> int | None:
        """The rank whose part a kernel of this device did not get in time, or None; as of the last call."""
        if self._peers is None:
            return None
        if self._copy is None:
            self._copy = _FlagCopy(self._device, self._peers.fault)
        return self._copy.read()


class _FlagCopy:
    """Copies the flag to the host again and again, on a stream of its own."""

    def __init__(self, device: Device, fault: torch.Tensor) -> None:
        if fault.is_cuda:
            torch.cuda.set_device(fault.device)  # the device of this thread
        self._stream, self._copied = device.stream("flag"), device.event()
        self._fault, self._host = fault, device.host_buffer((1,), torch.int32)
        self._begin()

    def read(self) -> int | None:
        """The rank in the last finished copy, or None; begins the next copy."""
        if not self._copied.query():
            return None
        fault = int(self._host)
        self._begin()
        return fault - 1 if fault else None

    def _begin(self) -> None:
        self._stream.run(lambda: self._host.copy_(self._fault, non_blocking=True))
        self._stream.record(self._copied)
