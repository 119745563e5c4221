"""The progress of each rank's start, and the rules by which rank 0 finds a start that hangs. No processes here.

    importing --> connecting --> loading weights --> preparing steps --> ready
                  waits for all  waits for none      waits for all

Each rank reports its stage, and how many parts of it are done: values of weights, captured steps. In most stages the
ranks wait for each other, so a rank with more progress may stand still. The ranks with the least progress wait for no
other rank: if all of them are idle for the limit, they have hung. While weights are loaded no rank waits, so each rank
is judged by itself.

A slow rank must not be taken for one that hangs. So no time counts while a rank

- does a part, or its main thread reads bytes of files
- waits for a disk: its main thread is in the kernel and cannot be interrupted, as in a page fault of a mapped file
- compiles a kernel
- uses CPU time. On a GPU a thread also uses time while it waits for the device, so from there on only time in the
  kernel counts, as for memory that is pinned

On a GPU a rank may compute on its CPU, or wait for threads of its driver, without any of these signs. So the limit (15
times `engine.rank_stall_s`) is long: no client waits for tokens yet, and a start that is ended begins anew.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollout.ranks.rank_watch import StallClock

STAGES = ("importing", "connecting", "loading weights", "preparing steps", "ready")
IMPORTING, CONNECTING, LOADING, PREPARING, READY = range(5)


class StartPosition(NamedTuple):
    """The progress of a rank. Positions of ranks can be compared."""

    stage: int = IMPORTING
    known: bool = False  # it knows how many parts its stage has
    done: int = 0  # parts


class StartState(NamedTuple):
    """A look at a rank at one moment of its start."""

    position: StartPosition = StartPosition()
    total: int = 0  # parts of its stage; 0: not known
    read_bytes: int = 0  # bytes that its main thread has read
    waits_for_disk: bool = False
    cpu_s: float = 0.0  # CPU time of its main thread that shows that it does something


class StartProgress:
    """Reports how far this rank is. `report` is given stage, parts done and parts in all."""

    def __init__(self, report: Callable[[int, int, int], None]) -> None:
        self._report, self.stage = report, IMPORTING

    def enter(self, stage: int) -> None:
        self.stage = stage
        self._report(stage, 0, 0)

    def advance(self, done: int, total: int) -> None:
        """Report that `done` parts of the stage are done (`rollout.process.progress.Advance`)."""
        self._report(self.stage, done, total)


class StartWatch:
    """Judges one look after the other. `limit_s` None: a rank never hangs."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._least = StallClock()
        self._loading: dict[int, StallClock] = {}

    def find_stall(self, ranks: Sequence[StartState], compiles: bool, passed_s: float) -> str:
        """Which rank hangs, and where; empty if none does. `passed_s` are the seconds since the last look."""
        if self._limit_s is None:
            return ""
        for rank, seen in enumerate(ranks):
            clock = self._loading.setdefault(rank, StallClock())
            loads = seen.position.stage == LOADING and 0 < seen.position.done < seen.total
            still_s = self._still_s(clock, [seen], loads and not compiles, passed_s)
            if still_s > self._limit_s:
                return _sentence([rank], seen, still_s)
        position = min(seen.position for seen in ranks)
        least = [rank for rank, seen in enumerate(ranks) if seen.position == position]
        judged = [ranks[rank] for rank in least]
        still_s = self._still_s(self._least, judged, not compiles, passed_s, least)
        return _sentence(least, judged[0], still_s) if still_s > self._limit_s else ""

    def _still_s(
        self, clock: StallClock, judged: list[StartState], counts: bool, passed_s: float, key: object = None
    ) -> float:
        counts = counts and not any(seen.waits_for_disk for seen in judged)
        done = key, [(seen.position, seen.read_bytes) for seen in judged]
        return clock.update(done, counts, passed_s, sum(seen.cpu_s for seen in judged))


def _sentence(ranks: list[int], seen: StartState, still_s: float) -> str:
    named, stage = ", ".join(map(str, ranks)), STAGES[seen.position.stage]
    hung = f"ranks {named} have hung" if ranks[1:] else f"rank {named} has hung"
    share = ""
    if seen.total:
        share = f" at {100 * seen.position.done // seen.total} % ({seen.position.done:,} of {seen.total:,})"
    return f"{hung} at the start: nothing is done in the stage {stage!r}{share} for {still_s:.0f} s"
