"""Masks of constrained rows: forward now, sample later.

    compute   ... draw(k-1) | forward(k)          wait | draw(k) | forward(k+1)
    host          launch k    commit(k-1), masks(k)

A row's mask depends on its last token, so it is made after the commit of the step before, while the forward of its own
step runs. The draw waits for the masks; the rows of the step that have no constraint are drawn with it.

Matchers are code over what a client sent, and some take for ever. So they run in a thread that can be left behind, and
the completion at which it got stuck ends as an error. So does one whose masks come, but take too much time one after
the other: at each token it may have a part of the time for a step, and beyond that the time for one step in all.

Legend: R rows, C constrained rows of a step, W words of a mask.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from queue import Empty

import torch

from rollout.constraints.matcher import mask_words
from rollout.deadline_thread import DeadlineCall, DeadlineThread
from rollout.engine.device.streams import Device
from rollout.engine.schedule.sequence import Sequence

#: Matchers that hang, each with a thread and a core; after that no constrained completion goes on.
MOST_LEFT_BEHIND = 4

_FAIR_PARTS = 8  # of the time for a step: a completion that had less of it is not blamed when it runs out
_TOKEN_PARTS = 10  # of the time for a step: what a completion may have at each token, to its end
_thread_s = time.thread_time  # of the thread that asks: what others had of the core meanwhile is not in it
_SLOW = "the constraint takes too long to follow from here; make it simpler"
_GIVEN_UP = "too many constraints have hung this worker; send it to another one"
_BROKEN = "a token was drawn that the constraint does not allow"
_DEAD_END = "the constraint allows no token of this model from here"


class StepMasks:
    """The masks of one step: a row of bits for each constrained row, and which rows of the step these are."""

    def __init__(self, device: Device, max_rows: int, vocab: int) -> None:
        words = mask_words(vocab)
        self._device = device
        self._host_RW = device.host_buffer((max_rows, words), torch.int32).fill_(-1)
        self._at_host_R = device.host_buffer((max_rows,), torch.int64)
        self._masks_RW = torch.zeros(max_rows, words, dtype=torch.int32, device=device.torch_device)
        self._at_R = torch.zeros(max_rows, dtype=torch.int64, device=device.torch_device)
        self._count = 0
        self.arrived = device.event()

    @property
    def at(self) -> torch.Tensor:
        """Places of the constrained rows among those that sample, int64 [C], on the device."""
        return self._at_R[: self._count]

    @property
    def bits(self) -> torch.Tensor:
        """Their masks, int32 [C, W], on the device."""
        return self._masks_RW[: self._count]

    @property
    def host(self) -> torch.Tensor:
        """Where masks are written, int32 [R, W]."""
        return self._host_RW

    def renew_host(self) -> None:
        """Other memory with the same content: somebody who was left behind may write to that of now."""
        fresh = self._device.host_buffer(tuple(self._host_RW.shape), torch.int32)
        fresh.copy_(self._host_RW)
        self._host_RW = fresh

    def set_rows(self, at: Seq[int]) -> None:
        """The first masks are those of the rows at these places."""
        self._count = len(at)
        self._at_host_R[: len(at)] = torch.tensor(list(at), dtype=torch.int64)

    def copy(self) -> None:
        """Copy host to device; runs on the H2D stream."""
        self.bits.copy_(self._host_RW[: self._count], non_blocking=True)
        self.at.copy_(self._at_host_R[: self._count], non_blocking=True)


@dataclass(slots=True)
class _Share:
    """The completions of one thread, and how far it has come."""

    places: list[int]  # rows of the masks
    seqs: list[Sequence]
    took_s: list[float] = field(default_factory=list)  # of those that are done
    spent_s: list[float] = field(default_factory=list)  # the same, without what others had of the core
    began_s: float = 0.0  # the one that is being done
    thread_s: float = 0.0  # of the thread, when it began
    reason: str = ""  # why that one failed
    stopped: bool = False  # begins no other one
    left_behind: bool = False  # nobody waits for it any more: it counts nothing
    lock: threading.Lock = field(default_factory=threading.Lock)  # of all of these

    @property
    def done(self) -> int:
        """How many are done, the first ones."""
        return len(self.took_s)

    def begin(self) -> bool:
        """Begin the next one, unless it is over."""
        with self.lock:
            self.began_s, self.thread_s = time.perf_counter(), _thread_s()
            return not self.stopped

    def end(self) -> None:
        """One more is done, if somebody still waits for it."""
        with self.lock:
            if not self.left_behind:
                self.took_s.append(time.perf_counter() - self.began_s)
                self.spent_s.append(_thread_s() - self.thread_s)

    def stop(self) -> float:
        """Have it begin no other one; when the one that is being done began."""
        with self.lock:
            self.stopped = True
            return self.began_s

    def leave_behind(self) -> None:
        """Wait for it no more."""
        with self.lock:
            self.left_behind = True

    def outcome(self, fair_s: float) -> tuple[list[int], dict[int, str]]:
        """What is left to do, and what failed, once it is over.

        Where time ran out among several, the slowest of those that were done fails, if it had more than its part of it.
        """
        if self.done == len(self.places):
            return [], {}
        if self.left_behind or self.reason:
            return self.places[self.done + 1 :], {self.places[self.done]: self.reason or _SLOW}
        slowest = max(range(self.done), key=self.took_s.__getitem__, default=None)
        if slowest is None or self.took_s[slowest] < fair_s:
            return self.places[self.done :], {}
        return self.places[self.done :], {self.places[slowest]: _SLOW}


def usual_threads() -> int:
    """Threads that make masks where nobody says how many: half the cores, 2 to 16."""
    return max(2, min(16, (os.cpu_count() or 2) // 2))


class MaskBuilder:
    """Writes masks, with some threads; for the loop's thread."""

    def __init__(self, timeout_s: float, threads: int) -> None:
        self._timeout_s = timeout_s
        self._threads = [DeadlineThread(f"masks-{i}") for i in range(threads)]
        self._owed_s: dict[Sequence, float] = {}  # what completions had beyond their part, where there is any

    @property
    def left_behind(self) -> int:
        """Threads that got stuck."""
        return sum(thread.left_behind for thread in self._threads)

    def build(self, seqs: list[Sequence], masks: StepMasks) -> list[tuple[Sequence, str]]:
        """Write the mask of `seqs[i]` to row i. Those that failed, and why; their rows allow everything."""
        failed: list[tuple[Sequence, str]] = []
        self._owed_s = {seq: owed_s for seq, owed_s in self._owed_s.items() if not seq.finalized}
        left = list(range(len(seqs)))
        while left:
            if self.left_behind >= MOST_LEFT_BEHIND:
                reasons = dict.fromkeys(left, _GIVEN_UP)
                left = []
            else:
                left, reasons = self._round(seqs, left, masks)
            for place, reason in reasons.items():
                masks.host[place] = -1
                failed.append((seqs[place], reason))
        return failed

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.close()

    def _round(self, seqs: list[Sequence], places: list[int], masks: StepMasks) -> tuple[list[int], dict[int, str]]:
        """Each thread writes its share, up to a failure: what is left to do, and what failed."""
        running = []
        for i, thread in enumerate(self._threads[: len(places)]):
            mine = places[i :: len(self._threads)]
            share = _Share(mine, [seqs[place] for place in mine])
            new_tokens = [list(seq.tokens[seq.matched :]) for seq in share.seqs]
            running.append((thread, share, thread.start(functools.partial(_fill, share, new_tokens, masks.host))))
        until_s = time.perf_counter() + self._timeout_s
        left: list[int] = []
        reasons: dict[int, str] = {}
        for thread, share, call in running:
            self._wait(thread, share, call, until_s)
            for seq in share.seqs[: share.done]:
                seq.matched = len(seq.tokens)
            places, failed = share.outcome(self._timeout_s / _FAIR_PARTS)
            left += places
            reasons |= failed | self._charge(share)
        if any(share.left_behind for _, share, _ in running):
            masks.renew_host()
        return left, reasons

    def _charge(self, share: _Share) -> dict[int, str]:
        """Note what those that are done took; which of them had too much by now."""
        failed: dict[int, str] = {}
        for place, seq, spent_s in zip(share.places, share.seqs, share.spent_s, strict=False):
            owed_s = self._owed_s.pop(seq, 0.0) + spent_s - self._timeout_s / _TOKEN_PARTS
            if owed_s > 0:
                self._owed_s[seq] = owed_s
            if owed_s > self._timeout_s:
                failed[place] = _SLOW
        return failed

    def _wait(self, thread: DeadlineThread, share: _Share, call: DeadlineCall[None], until_s: float) -> None:
        """Until `until_s`, and then for the one that is being done, which may take as long by itself."""
        try:
            call.result(max(0.0, until_s - time.perf_counter()))
        except Empty:
            began_s = share.stop()
            try:
                thread.wait(call, began_s + self._timeout_s - time.perf_counter())
            except TimeoutError:
                share.leave_behind()


def _fill(share: _Share, new_tokens: list[list[int]], host_RW: torch.Tensor) -> None:
    """All masks of a share, or those up to a completion that cannot go on."""
    for place, seq, tokens in zip(share.places, share.seqs, new_tokens, strict=True):
        if not share.begin():
            return
        share.reason = _follow(seq, tokens, host_RW, place)
        if share.reason:
            return
        share.end()


def _follow(seq: Sequence, tokens: list[int], host_RW: torch.Tensor, place: int) -> str:
    """Write one mask; why there is none, or nothing. Nobody else touches this matcher."""
    constraint = seq.group.request.constraint
    assert constraint is not None
    try:
        if seq.matcher is None:
            seq.matcher = constraint.start()  # here: a copy of a large grammar's place may take seconds
        if not all(map(seq.matcher.accept, tokens)):
            return _BROKEN
        seq.matcher.fill(host_RW, place)
    # What a client sent must not end the engine, whatever the matcher makes of it.
    except Exception as error:
        return f"the constraint cannot be followed from here: {error}"[:500]
    return "" if host_RW[place].any() else _DEAD_END
