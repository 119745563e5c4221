"""A constraint whose tokens are known in advance, and time for masks that does not depend on the machine."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from rollout.constraints.marker import AfterMarker
from rollout.constraints.matcher import AllowList, Matcher
from rollout.constraints.thoughts import Budgeted
from rollout.engine.step import masks
from rollout.process.deadline_thread import DeadlineCall
from tests.support.engine.harness import VOCAB
from tests.support.worker.harness import until

X, Y, SIZE = list(range(10, 20)), list(range(20, 30)), list(range(30, 40))


class Cycle:
    """x, y, size, x, y, size, ...: token i is of list i modulo their number; a stop token after whole cycles."""

    free = foreseen = None

    def __init__(self, lists: list[list[int]], stop: int | None = None, vocab: int = VOCAB) -> None:
        self.lists, self.stop, self.vocab = lists, stop, vocab

    def start(self) -> CyclePlace:
        return CyclePlace(self)


class CyclePlace(Matcher):
    def __init__(self, cycle: Cycle) -> None:
        self.cycle, self.at = cycle, 0

    def allowed(self) -> list[int]:
        lists, stop = self.cycle.lists, self.cycle.stop
        may_stop = stop is not None and self.at > 0 and self.at % len(lists) == 0
        return [*lists[self.at % len(lists)], *([stop] if may_stop else [])]

    def accept(self, token: int) -> bool:
        fits = token in self.allowed()
        self.at += 1
        return fits

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        AllowList(tuple(self.allowed()), self.cycle.vocab).fill(masks_RW, row)

    def undo(self, tokens: int) -> None:
        self.at -= tokens

    @property
    def complete(self) -> bool:
        return self.at > 0 and self.at % len(self.cycle.lists) == 0


class AlwaysMasked(AfterMarker):
    """A constraint after a marker for which every token has a mask, also before the marker."""

    free = None


class AlwaysMaskedBudget(Budgeted):
    """A budget of thoughts for which every token has a mask."""

    free = foreseen = None


def only_hangs_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits of masks begin when a matcher sets its `hangs`: a thread may wait for a core for longer than one."""
    wait = masks.MaskBuilder._wait

    def hangs(portion: masks._Portion) -> bool:
        under_way = portion.seqs[portion.done : portion.done + 1]
        return any(getattr(seq.matcher, "hangs", False) for seq in under_way)

    def patient(builder, thread, portion, call, until_s) -> None:
        until(lambda: call.ended or hangs(portion), "a mask, or one that hangs")
        wait(builder, thread, portion, call, until_s)

    monkeypatch.setattr(masks.MaskBuilder, "_wait", patient)


class MaskTime:
    """The time by which masks of one thread are late. It passes in `sleep`, never beyond a wait of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self._until_s: float | None = None  # the loop waits
        self._changed = threading.Condition()
        monkeypatch.setattr(masks, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        result = DeadlineCall.result

        def waited(call: DeadlineCall, timeout_s: float) -> object:
            with self._changed:
                self._until_s = self.now_s + timeout_s
                while not call.ended and self.now_s < self._until_s:
                    self._changed.wait(0.001)
                self._until_s = None
            return result(call, 0.0)

        monkeypatch.setattr(DeadlineCall, "result", waited)

    def sleep(self, seconds: float) -> None:
        """Called by the thread that makes masks."""
        with self._changed:
            end_s = self.now_s + seconds
            while self.now_s < end_s:
                if self._until_s is not None:
                    self.now_s = max(self.now_s, min(end_s, self._until_s))
                self._changed.wait(0.001)
