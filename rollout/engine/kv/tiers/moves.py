"""The bookkeeping of copies of KV: which begin next, whether they pay, and which are valid when they end. No tensors.

A page of KV is on the device, on the host or on disk, or in several of these places. `known` says what moves from the
device to the host and on to disk, `fetches` what comes back; `offload` does both for preempted sequences. `page_mover`
and `disk_pages` carry it out.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout.engine.sequence.sequence import Sequence


@dataclass(eq=False, slots=True)
class Move:
    """A page, or a state of linear attention, that is copied between the device and the host."""

    place: int  # on the device: a page of the pool, a row, or the place of a snapshot
    host_place: int  # on the host: a page, or the place of a state


class MoveBooks(NamedTuple):
    """One owner's moves of pages, or of states.

    `next_out` and `next_in` give moves that begin now, at most as many as they are asked for. `out_ended` and
    `in_ended` take moves whose copies have ended, and whether they failed; they return sequences that may be settled.
    """

    next_out: Callable[[int], Seq[Any]]
    out_ended: Callable[[Any, bool], list[Sequence]]
    next_in: Callable[[int], Seq[Any]]
    in_ended: Callable[[Any, bool], list[Sequence]]
    out_after_steps: bool = False  # copies to the host begin after the steps in flight; those back always do


#: The longest copy of a page, relative to its computation. Copies run during steps, and most of the measured time is
#: a wait for room beside their kernels; prompt steps replace other steps.
_WORTH = 8


class CopyCosts:
    """Says whether copying a page is worth more than computing it; True until both are measured.

    worth: the longest copy of a page, relative to its computation.
    """

    def __init__(self, page_size: int, worth: float = _WORTH) -> None:
        self.pays, self.worth = True, worth
        self._page_size = page_size
        self._copies: deque[float] = deque(maxlen=8)  # seconds a page; the first copies of a device are slow
        self._state_copies: deque[float] = deque(maxlen=8)  # seconds a state
        self._reads: deque[float] = deque(maxlen=8)  # seconds a page, from disk
        self._state_reads: deque[float] = deque(maxlen=8)
        self._tokens = self._seconds = 0.0  # tokens and time of prompt steps; recent steps weigh more

    def copied(self, pages: int, seconds: float) -> None:
        """Note the copy of a piece of this many pages."""
        self._copies.append(seconds / pages)
        self.pays = self._worth(self._copies, self._page_size)

    def states_copied(self, states: int, seconds: float) -> None:
        """Note the copy of a piece of this many states."""
        self._state_copies.append(seconds / states)

    def read(self, seconds: float, state: bool) -> None:
        """Note the read of a page, or of a state, from disk."""
        (self._state_reads if state else self._reads).append(seconds)

    @property
    def disk_pays(self) -> bool:
        """Whether reading a page from disk is worth more than computing it."""
        return self._worth(self._reads, self._page_size)

    def state_pays(self, tokens: int, on_disk: bool) -> bool:
        """Whether copying a state is worth more than computing these tokens; `on_disk`: it must be read first."""
        slowest = self._worth(self._state_reads, tokens) if on_disk else True
        return slowest and self.pays and self._worth(self._state_copies, tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """Note the time of a step of prompts."""
        self._tokens = 0.9 * self._tokens + tokens
        self._seconds = 0.9 * self._seconds + seconds
        self.pays = self._worth(self._copies, self._page_size)

    def _worth(self, copies: deque[float], tokens: int) -> bool:
        return not copies or not self._tokens or min(copies) < self.worth * tokens * self._seconds / self._tokens
