"""The bookkeeping of copies of KV: which begin next, and which are still valid when they end. Touches no tensor.

A page of KV is on the device, on the host or on disk, or in several of these places. `tier` says what moves from the
device to the host and on to disk, `fetches` what comes back; `offload` does both for preempted sequences. `page_mover`
and `disk` carry it out.
"""

from collections.abc import Callable, Set
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


class Copies:
    """Copies under way, by what they read. A copy is void when its source is given up before the end."""

    def __init__(self) -> None:
        self._of: dict[int, object] = {}

    def __contains__(self, source: int) -> bool:
        return source in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def sources(self) -> Set[int]:
        """The pages or places that are copied."""
        return self._of.keys()

    def begin(self, source: int, copy: object) -> None:
        """Begin a copy of this page or place; an earlier one is void."""
        self._of[source] = copy

    def end(self, source: int, copy: object) -> bool:
        """End the copy; False if it is void."""
        if self._of.get(source) is not copy:
            return False
        del self._of[source]
        return True

    def give_up(self, source: int) -> None:
        """Note that the content of the page or place changes, which makes its copy void."""
        self._of.pop(source, None)

    def give_up_all(self) -> None:
        """Make all copies under way void."""
        self._of.clear()
