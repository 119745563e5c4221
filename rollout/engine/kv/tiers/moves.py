"""The bookkeeping of copies of KV: which begin next, and which are still valid when they end. Touches no tensor.

A page of KV is on the device, on the host or on disk, or in several of these places. `known` says what moves from the
device to the host and on to disk, `fetches` what comes back; `offload` does both for preempted sequences. `page_mover`
and `disk` carry it out.
"""

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
