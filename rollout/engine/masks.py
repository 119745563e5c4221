"""Masks of constrained rows: forward now, sample later.

    compute   ... draw(k-1) | forward(k)          wait | draw(k) | forward(k+1)
    host          launch k    commit(k-1), masks(k)

A row's mask depends on its last token, so it is made after the commit of the step before, while the forward of its own
step runs. The draw waits for the masks; the rows of the step that have no constraint are drawn with it.

Matchers are code over what a client sent, and some take for ever. So they run in a thread that can be left behind, and
the completion at which it got stuck ends as an error.

Legend: R rows, C constrained rows of a step, W words of a mask.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from rollout.constraints.matcher import mask_words
from rollout.deadline_thread import DeadlineThread
from rollout.engine.device import Device
from rollout.engine.sequence import Sequence

#: Matchers that hang, each with a thread and a core; after that no constrained completion goes on.
MOST_LEFT_BEHIND = 4

_SLOW = "the constraint takes too long to follow from here; make it simpler"
_GIVEN_UP = "too many constraints have hung this worker; send it to another one"
_BROKEN = "a token was drawn that the constraint does not allow"


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

    def hold(self, at: Seq[int]) -> None:
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
    done: int = 0
    left_behind: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the two above

    def leave_behind(self) -> None:
        """Nobody waits for it any more: it counts nothing and touches no other completion from now on."""
        with self.lock:
            self.left_behind = True

    def one_done(self) -> bool:
        """One more is done; False if nobody waits for the rest."""
        with self.lock:
            self.done += not self.left_behind
            return not self.left_behind


class MaskBuilder:
    """Writes masks, with some threads; for the loop's thread."""

    def __init__(self, timeout_s: float, threads: int) -> None:
        self._timeout_s = timeout_s
        self._threads = [DeadlineThread(f"masks-{i}") for i in range(threads)]

    @property
    def left_behind(self) -> int:
        """Threads that got stuck."""
        return sum(thread.left_behind for thread in self._threads)

    def build(self, seqs: list[Sequence], masks: StepMasks) -> list[tuple[Sequence, str]]:
        """Write the mask of `seqs[i]` to row i. Those that failed, and why; their rows allow everything."""
        failed: list[tuple[Sequence, str]] = []
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
            try:
                thread.wait(call, until_s - time.perf_counter())
            except TimeoutError:
                share.leave_behind()
            for seq in share.seqs[: share.done]:
                seq.matched = len(seq.tokens)
            if share.done < len(share.places):
                reasons[share.places[share.done]] = _SLOW if share.left_behind else _BROKEN
                left += share.places[share.done + 1 :]
        if any(share.left_behind for _, share, _ in running):
            masks.renew_host()
        return left, reasons


def _fill(share: _Share, new_tokens: list[list[int]], host_RW: torch.Tensor) -> None:
    """All masks of a share, or those up to a completion whose tokens do not fit its constraint."""
    for place, seq, tokens in zip(share.places, share.seqs, new_tokens, strict=True):
        assert seq.matcher is not None
        if not all(map(seq.matcher.accept, tokens)):
            return
        seq.matcher.fill(host_RW, place)
        if not share.one_done():
            return
