"""A constraint whose tokens are known in advance, and time for masks that does not depend on the machine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import torch

from rollout.constraints.marker import AfterMarker
from rollout.constraints.matcher import AllowList, Matcher
from rollout.constraints.thoughts import BudgetedConstraint
from rollout.engine.step.masks import MaskBuilder, MaskClock, usual_threads
from rollout.process.deadline_thread import DeadlineCall, DeadlineThread
from tests.support.engine.harness import VOCAB, Bench
from tests.support.worker.harness import until

X, Y, SIZE = list(range(10, 20)), list(range(20, 30)), list(range(30, 40))


class Cycle:
    """x, y, size, x, y, size, ...: token i is of list i modulo their number; a stop token after whole cycles."""

    free = foreseen = None

    def __init__(self, lists: list[list[int]], stop: int | None = None, vocab: int = VOCAB, at: int = 0) -> None:
        self.lists, self.stop, self.vocab, self.first = lists, stop, vocab, at

    def start(self) -> CyclePlace:
        return CyclePlace(self)

    def filling(self, place: CyclePlace) -> None:
        """Called before each mask."""


class CyclePlace(Matcher):
    def __init__(self, cycle: Cycle) -> None:
        self.cycle, self.at = cycle, cycle.first

    def allowed(self) -> list[int]:
        lists, stop = self.cycle.lists, self.cycle.stop
        may_stop = stop is not None and self.at > 0 and self.at % len(lists) == 0
        return [*lists[self.at % len(lists)], *([stop] if may_stop else [])]

    def accept(self, token: int) -> bool:
        fits = token in self.allowed()
        self.at += 1
        return fits

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        self.cycle.filling(self)
        AllowList(tuple(self.allowed()), self.cycle.vocab).fill(masks_RW, row)

    def undo(self, tokens: int) -> None:
        self.at -= tokens

    @property
    def complete(self) -> bool:
        return self.at > 0 and self.at % len(self.cycle.lists) == 0


class AlwaysMasked(AfterMarker):
    """A constraint after a marker for which every token has a mask, also before the marker."""

    free = None


class AlwaysMaskedBudget(BudgetedConstraint):
    """A budget of thoughts for which every token has a mask."""

    free = foreseen = None


class _PatientCall(DeadlineCall):
    """Its time limit begins when the matcher under way sets its `hangs`."""

    def result(self, timeout_s: float) -> object:
        began_s = time.perf_counter()
        until(lambda: self.ended or self._hangs(), "a mask, or one that hangs")
        return super().result(max(0.0, timeout_s - (time.perf_counter() - began_s)))

    def _hangs(self) -> bool:
        portion = self.work.args[0]  # type: ignore[attr-defined]
        under_way = portion.seqs[portion.done : portion.done + 1]
        return any(getattr(seq.constraint.matcher, "hangs", False) for seq in under_way)


def threads_of(call: Callable[..., DeadlineCall]) -> Callable[[str], DeadlineThread]:
    """Makes threads whose work is `call(work)`."""
    return functools.partial(DeadlineThread, make_call=call)


def only_hangs_are_late(bench: Bench, clock: MaskClock | None = None, threads: int | None = None) -> None:
    """Time limits of masks begin when a matcher sets its `hangs`: a thread may wait for a core for longer than one."""
    of = clock or MaskClock(), threads_of(_PatientCall)
    bench.engine.masks = MaskBuilder(bench.settings.engine.mask_s, threads or usual_threads(), *of)


class MaskTime:
    """The time by which masks of one thread are late. It passes in `sleep`, never beyond a wait of the loop."""

    def __init__(self, bench: Bench, timeout_s: float) -> None:
        self.now_s = 0.0
        self._until_s: float | None = None  # the loop waits
        self._changed = threading.Condition()
        clock, threads = MaskClock(now_s=lambda: self.now_s), threads_of(functools.partial(_TimedCall, self))
        bench.engine.masks = MaskBuilder(timeout_s, 1, clock, threads)

    def sleep(self, seconds: float) -> None:
        """Called by the thread that makes masks."""
        with self._changed:
            end_s = self.now_s + seconds
            while self.now_s < end_s:
                if self._until_s is not None:
                    self.now_s = max(self.now_s, min(end_s, self._until_s))
                self._changed.wait(0.001)

    def wait(self, call: DeadlineCall, timeout_s: float) -> None:
        """Called by the loop."""
        with self._changed:
            self._until_s = self.now_s + timeout_s
            while not call.ended and self.now_s < self._until_s:
                self._changed.wait(0.001)
            self._until_s = None


class _TimedCall(DeadlineCall):
    """Its time limit is one of a `MaskTime`."""

    def __init__(self, time: MaskTime, work: Callable[[], object]) -> None:
        super().__init__(work)
        self.time = time

    def result(self, timeout_s: float) -> object:
        self.time.wait(self, timeout_s)
        return super().result(0.0)
