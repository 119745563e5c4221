"""Masks of constrained rows: the forward runs now, the draw later.

    compute   ... draw(k-1) | forward(k)          wait | draw(k) | forward(k+1)
    host          launch k    commit(k-1), masks(k)

A row's mask depends on its last token, so it is made after the commit of the step before, while the forward of its own
step runs. The draw waits for the masks; the rows of the step that have no constraint are drawn with it.

Some matchers never return: clients send constraints. So matchers run in threads that can be abandoned, and the
completion whose matcher hangs ends as an error. A completion also ends when its masks take too long in sum: each token
earns it a tenth of `mask_s`, and it may overdraw by one `mask_s`.

Draws after tokens ahead (`plan.TokensAhead`) have masks, too: the matcher goes on along the tokens ahead and back
again. Masks after tokens ahead are made last, and no completion ends because of them. Tokens that cannot be followed,
such as tokens after a stop token, have no mask and are refused. A matcher that fails or is slow there starts anew with
the next mask, and its row has no more tokens ahead.

Before `min_tokens` a mask has no stop token, unless it has no other token. If a mask is empty where the completion
obeys its constraint, which happens only without stop tokens, the completion ends as `stop`.

Legend: R rows, C constrained rows of a step, W words of a mask.
"""

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from queue import Empty
from typing import NamedTuple

import torch

from rollout.constraints.matcher import WORD_BITS, Matcher, mask_of, mask_words
from rollout.engine.device.streams import Device
from rollout.engine.messages.to_service import Finish
from rollout.engine.schedule.plan import Plan, TokensAhead
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import RowNeeds
from rollout.process.deadline_thread import DeadlineCall, DeadlineThread

_CONSTRAIN = RowNeeds.CONSTRAIN.value  # flags of an enum are slow to test
#: Matchers that may hang, each with a thread and a core; after that every constrained completion ends.
MOST_LEFT_BEHIND = 4

_FAIR_PARTS = 8  # parts of `mask_s`: a completion that used less than one part does not fail when the time runs out
_TOKEN_PARTS = 10  # parts of `mask_s`: each token earns its completion one part
_FAILED = -1  # a failure, not a number of tokens: the matcher could not move forward or back
_SLOW = "the constraint takes too long to follow from here; make it simpler"
GIVEN_UP = "too many constraints have hung this worker; send it to another one"
_BROKEN = "a token was drawn that the constraint does not allow"
_DEAD_END = "the constraint allows no token of this model from here"


class StepMasks:
    """The masks of one step: a row of bits for each constrained row, and the indices of these rows in the step."""

    def __init__(self, device: Device, max_rows: int, vocab: int) -> None:
        words = mask_words(vocab)
        self._device = device
        self._host_RW = device.host_buffer((max_rows, words), torch.int32).fill_(-1)
        self._at_host_R = device.host_buffer((max_rows,), torch.int64)
        self._masks_RW = torch.zeros(max_rows, words, dtype=torch.int32, device=device.torch_device)
        self._at_R = torch.zeros(max_rows, dtype=torch.int64, device=device.torch_device)
        self._count = 0
        self._refused_host_R = device.host_buffer((max_rows,), torch.int64)
        self._refused_R = torch.zeros(max_rows, dtype=torch.int64, device=device.torch_device)
        self._refused_count = 0
        self.arrived = device.event()

    @property
    def at(self) -> torch.Tensor:
        """Indices of the constrained rows among the sampling rows, int64 [C], on the device."""
        return self._at_R[: self._count]

    @property
    def bits(self) -> torch.Tensor:
        """Their masks, int32 [C, W], on the device."""
        return self._masks_RW[: self._count]

    @property
    def refused(self) -> torch.Tensor:
        """Indices of the tokens ahead that are refused, int64, on the device."""
        return self._refused_R[: self._refused_count]

    @property
    def host(self) -> torch.Tensor:
        """The host buffer of masks, int32 [R, W]."""
        return self._host_RW

    def renew_host(self) -> None:
        """Take new memory with the same content: an abandoned thread may still write to the old memory."""
        fresh = self._device.host_buffer(tuple(self._host_RW.shape), torch.int32)
        fresh.copy_(self._host_RW)
        self._host_RW = fresh

    def set_rows(self, at: Seq[int], refused: Seq[int] = ()) -> None:
        """Mask i belongs to the drawing row `at[i]`; the tokens ahead at the indices `refused` are refused."""
        self._count, self._refused_count = len(at), len(refused)
        self._at_host_R[: len(at)] = torch.tensor(list(at), dtype=torch.int64)
        self._refused_host_R[: len(refused)] = torch.tensor(list(refused), dtype=torch.int64)

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        """The arguments of `set_rows`."""
        at, refused = self._at_host_R[: self._count], self._refused_host_R[: self._refused_count]
        return at.tolist(), refused.tolist()

    def copy(self) -> None:
        """Copy host to device; runs on the H2D stream."""
        self.bits.copy_(self._host_RW[: self._count], non_blocking=True)
        self.at.copy_(self._at_host_R[: self._count], non_blocking=True)
        if self._refused_count:
            self.refused.copy_(self._refused_host_R[: self._refused_count], non_blocking=True)


class BuiltMasks(NamedTuple):
    """The masks of a step: mask i belongs to the drawing row `at[i]`."""

    at: list[int]
    refused: list[int]  # indices of tokens ahead without a mask
    ended: list[tuple[Sequence, Finish]]  # completions that end, and the reasons


class RowAhead(NamedTuple):
    """The masks after a row's tokens ahead: the one after token i goes to row `first + i`."""

    of: TokensAhead
    own: int  # index of the mask of the row itself
    first: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class MaskClock:
    """The clocks that measure masks, seconds."""

    now_s: Callable[[], float] = time.perf_counter
    spent_s: Callable[[], float] = time.thread_time  # CPU time of the calling thread, so that others do not count


@dataclass(slots=True)
class _Portion:
    """The completions of one thread, and its progress."""

    indices: list[int]  # numbers of the masks
    seqs: list[Sequence]
    clock: MaskClock
    took_s: list[float] = field(default_factory=list)  # wall time of each finished mask
    spent_s: list[float] = field(default_factory=list)  # CPU time of each finished mask
    began_s: float = math.inf  # start of the mask under way, if there is one
    thread_s: float = 0.0  # CPU time of the thread at its start
    finish: Finish | None = None  # the completion's end that the mask under way found
    followed: list[int] = field(default_factory=list)  # tokens ahead with a mask, of each row that is done
    stopped: bool = False  # no other mask is begun
    left_behind: bool = False  # abandoned: its results do not count
    lock: threading.Lock = field(default_factory=threading.Lock)  # protects all fields above

    @property
    def done(self) -> int:
        """Masks that are done, from the first on."""
        return len(self.took_s)

    def begin(self) -> bool:
        """Begin the next mask; False if the portion was stopped."""
        with self.lock:
            self.began_s, self.thread_s = self.clock.now_s(), self.clock.spent_s()
            return not self.stopped

    def end(self) -> None:
        """Note that a mask is done, unless the portion was abandoned."""
        with self.lock:
            if not self.left_behind:
                self.took_s.append(self.clock.now_s() - self.began_s)
                self.spent_s.append(self.clock.spent_s() - self.thread_s)
                self.began_s = math.inf

    def stop(self) -> float:
        """Let no other mask begin; returns the start of the mask under way, or now if the thread waits for a core."""
        with self.lock:
            self.stopped = True
            return min(self.began_s, self.clock.now_s())

    def leave_behind(self) -> None:
        with self.lock:
            self.left_behind = True

    def outcome(self, fair_s: float) -> tuple[list[int], dict[int, Finish]]:
        """Once the portion is over: the masks left to do, and how the completions of others end.

        If time ran out after several masks, the slowest of them fails, provided it used more than its part.
        """
        if self.done == len(self.indices):
            return [], {}
        if self.left_behind or self.finish is not None:
            return self.indices[self.done + 1 :], {self.indices[self.done]: self.finish or _failed(_SLOW)}
        slowest = max(range(self.done), key=self.took_s.__getitem__, default=None)
        if slowest is None or self.took_s[slowest] < fair_s:
            return self.indices[self.done :], {}
        return self.indices[self.done :], {self.indices[slowest]: _failed(_SLOW)}


def usual_threads() -> int:
    """Threads that make masks by default: half the cores, 2 to 16."""
    return max(2, min(16, (os.cpu_count() or 2) // 2))


class MaskBuilder:
    """Writes masks in several threads; called by the loop."""

    def __init__(
        self,
        timeout_s: float,
        threads: int,
        clock: MaskClock = MaskClock(),
        make_thread: Callable[[str], DeadlineThread] = DeadlineThread,
    ) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._threads = [make_thread(f"masks-{i}") for i in range(threads)]
        self._owed_s: dict[Sequence, float] = {}  # time that completions used beyond their part

    @property
    def left_behind(self) -> int:
        """Number of threads that hang."""
        return sum(thread.left_behind for thread in self._threads)

    def of_step(self, plan: Plan, masks: StepMasks) -> BuiltMasks:
        """Write the masks of a step whose earlier steps are committed."""
        draw_index, at, seqs = 0, [], []
        for seq, _, _, draws, _ in plan.spans:
            if draws and seq.need_bits & _CONSTRAIN and not (seq.finalized or seq.void):
                at.append(draw_index)
                seqs.append(seq)
            draw_index += draws
        ended = self.build(seqs, masks)
        if not plan.ahead:
            return BuiltMasks(at, [], ended)
        own, hopeless = {seq: i for i, seq in enumerate(seqs)}, {seq for seq, _ in ended}
        rows: list[RowAhead] = []
        for ahead in plan.ahead:
            if ahead.seq in own and ahead.seq not in hopeless:
                rows.append(RowAhead(ahead, own[ahead.seq], len(at), ahead.tokens()))
                at += range(ahead.draw_index + 1, ahead.draw_index + 1 + ahead.length)
        refused: list[int] = []
        for row, followed in zip(rows, self.build_ahead(rows, masks), strict=True):
            masks.host[row.first + followed : row.first + row.of.length] = -1
            refused += range(row.of.draw_index + 1 + followed, row.of.draw_index + 1 + row.of.length)
        return BuiltMasks(at, refused, ended)

    def build(self, seqs: list[Sequence], masks: StepMasks) -> list[tuple[Sequence, Finish]]:
        """Write the mask of `seqs[i]` to row i. Returns the sequences that end instead; their rows allow everything."""
        ended: list[tuple[Sequence, Finish]] = []
        self._owed_s = {seq: owed_s for seq, owed_s in self._owed_s.items() if not seq.finalized}
        left = list(range(len(seqs)))
        while left:
            if self.left_behind >= MOST_LEFT_BEHIND:
                finishes = dict.fromkeys(left, _failed(GIVEN_UP))
                left = []
            else:
                left, finishes = self._round(seqs, left, masks)
            for index, finish in finishes.items():
                masks.host[index] = -1
                ended.append((seqs[index], finish))
        return ended

    def build_ahead(self, rows: list[RowAhead], masks: StepMasks) -> list[int]:
        """Write the masks after tokens ahead. Returns the number of these with a mask, of each row."""
        followed = [0] * len(rows)
        if self.left_behind >= MOST_LEFT_BEHIND:
            return followed
        limit_s = self.timeout_s / _TOKEN_PARTS
        running = []
        for i, thread in enumerate(self._threads[: len(rows)]):
            indices = list(range(i, len(rows), len(self._threads)))
            portion = _Portion(indices, [rows[index].of.seq for index in indices], self._clock)
            work = functools.partial(_fill_ahead, portion, rows, masks.host, limit_s)
            running.append((thread, portion, thread.start(work)))
        until_s = self._clock.now_s() + limit_s
        for thread, portion, call in running:
            self._wait(thread, portion, call, until_s)
            for index, count, took_s in zip(portion.indices, portion.followed, portion.took_s, strict=False):
                followed[index] = max(count, 0)
                if took_s > limit_s:
                    rows[index].of.stop()
                if count == _FAILED:
                    _start_anew(rows[index].of)
            if portion.left_behind and portion.done < len(portion.seqs):
                _start_anew(rows[portion.indices[portion.done]].of)
        if any(portion.left_behind for _, portion, _ in running):
            masks.renew_host()
        return followed

    def close(self) -> None:
        for thread in self._threads:
            thread.close()

    def _round(self, seqs: list[Sequence], indices: list[int], masks: StepMasks) -> tuple[list[int], dict[int, Finish]]:
        """Each thread writes its portion, up to an end. Returns the masks left to do, and the ends."""
        running = []
        for i, thread in enumerate(self._threads[: len(indices)]):
            mine = indices[i :: len(self._threads)]
            portion = _Portion(mine, [seqs[index] for index in mine], self._clock)
            new_tokens = [list(seq.tokens[seq.constraint.matched :]) for seq in portion.seqs]
            running.append((thread, portion, thread.start(functools.partial(_fill, portion, new_tokens, masks.host))))
        until_s = self._clock.now_s() + self.timeout_s
        left: list[int] = []
        finishes: dict[int, Finish] = {}
        for thread, portion, call in running:
            self._wait(thread, portion, call, until_s)
            for seq in portion.seqs[: portion.done]:
                seq.constraint.matched = len(seq.tokens)
            indices, ended = portion.outcome(self.timeout_s / _FAIR_PARTS)
            left += indices
            finishes |= ended | self._charge(portion)
        if any(portion.left_behind for _, portion, _ in running):
            masks.renew_host()
        return left, finishes

    def _charge(self, portion: _Portion) -> dict[int, Finish]:
        """Charge the masks that are done to their completions; returns the completions over their limit."""
        failed: dict[int, Finish] = {}
        for index, seq, spent_s in zip(portion.indices, portion.seqs, portion.spent_s, strict=False):
            owed_s = self._owed_s.pop(seq, 0.0) + spent_s - self.timeout_s / _TOKEN_PARTS
            if owed_s > 0:
                self._owed_s[seq] = owed_s
            if owed_s > self.timeout_s:
                failed[index] = _failed(_SLOW)
        return failed

    def _wait(self, thread: DeadlineThread, portion: _Portion, call: DeadlineCall[None], until_s: float) -> None:
        """Wait until `until_s`, then for the mask under way, which may take the full time itself."""
        try:
            call.result(max(0.0, until_s - self._clock.now_s()))
        except Empty:
            began_s = portion.stop()
            try:
                thread.wait(call, began_s + self.timeout_s - self._clock.now_s())
            except TimeoutError:
                portion.leave_behind()


def _fill(portion: _Portion, new_tokens: list[list[int]], host_RW: torch.Tensor) -> None:
    """Write the masks of a portion, up to the first completion that does not go on."""
    for index, seq, tokens in zip(portion.indices, portion.seqs, new_tokens, strict=True):
        if not portion.begin():
            return
        portion.finish = _follow(seq, tokens, host_RW, index)
        if portion.finish is not None:
            return
        portion.end()


def _start_anew(ahead: TokensAhead) -> None:
    """Replace a matcher whose position is not known: a new one follows all tokens of the row, and none ahead."""
    ahead.seq.constraint.matcher, ahead.seq.constraint.matched = None, ahead.seq.drawn.known
    ahead.stop()


def _fill_ahead(portion: _Portion, rows: Seq[RowAhead], host_RW: torch.Tensor, limit_s: float) -> None:
    """Write the masks after the tokens ahead of a portion."""
    for index in portion.indices:
        if not portion.begin():
            return
        # A client's constraint must not end the engine, whatever the matcher does with it.
        try:
            count = _follow_ahead(rows[index], host_RW, portion.clock.now_s() + limit_s, portion.clock)
        except Exception:
            count = _FAILED
        portion.followed.append(count)
        portion.end()


def _follow_ahead(row: RowAhead, host_RW: torch.Tensor, until_s: float, clock: MaskClock) -> int:
    """Write the masks after a row's tokens ahead, up to one that ends it, is barred or is late; returns how many."""
    seq, matcher, before, followed, went = row.of.seq, row.of.seq.constraint.matcher, row.own, 0, 0
    assert matcher is not None, "the mask of the row itself is made first"
    for token in row.tokens:
        index = row.first + followed
        # A token that ends the completion, or cannot be drawn, has none after it.
        if token in seq.group.stop_ids or not _allows(host_RW, before, token) or clock.now_s() > until_s:
            break
        if not matcher.accept(token):
            return _FAILED
        went += 1
        if not _fill_row(seq, matcher, len(seq.tokens) + went, host_RW, index):
            break
        followed, before = followed + 1, index
    if went:
        matcher.undo(went)
    return followed


def _allows(host_RW: torch.Tensor, row: int, token: int) -> bool:
    return bool(int(host_RW[row, token // WORD_BITS]) >> token % WORD_BITS & 1)


def _follow(seq: Sequence, tokens: list[int], host_RW: torch.Tensor, index: int) -> Finish | None:
    """Write one mask. Returns how the completion ends if it does not go on. No other thread touches this matcher."""
    try:
        if seq.constraint.matcher is None:
            seq.constraint.matcher = (
                seq.group.request.constraint.start()
            )  # started in this thread: copying the state of a large grammar may take seconds
        if not seq.constraint.matcher.follow(tokens):
            return _failed(_BROKEN)
        if _fill_row(seq, seq.constraint.matcher, len(seq.tokens), host_RW, index):
            return None
        return Finish("stop") if seq.constraint.matcher.complete else _failed(_DEAD_END)
    # A client's constraint must not end the engine, whatever the matcher does with it.
    except Exception as error:
        return _failed(f"the constraint cannot be followed from here: {error}"[:500])


def _fill_row(seq: Sequence, matcher: Matcher, token: int, host_RW: torch.Tensor, index: int) -> bool:
    """Write the mask of a completion's token `token`; False if it allows none."""
    matcher.fill(host_RW, index)
    if token < seq.group.request.stop.min_tokens:
        row_W = host_RW[index]
        others_W = row_W & ~mask_of(seq.group.stop_ids, len(row_W) * WORD_BITS)
        if others_W.any():
            row_W.copy_(others_W)
    return bool(host_RW[index].any())


def _failed(error: str) -> Finish:
    return Finish("error", error=error)
