"""The rules by which rank 0 finds that a rank of its group is lost. Plain data in, a sentence out; no processes here.

    its process has ended                                                     at once
    its process is stopped (also at the start), or its beat stands still      after `SILENT_S`
    something is ordered or enqueued, and no rank completes anything          after `stall_s`, or after ten times that

What counts as completed: an order that a follower has carried out, a step that is done on the device of a rank.

A healthy group must not be ended, however slow it is:

- Time counts as far as the watching thread has seen it pass: a machine that was stopped or is overloaded delays both
  sides.
- The beat is a thread of its own, so only a process that does not run at all is silent. It counts once a follower is
  ready: the imports and the loading before are seconds under Python's lock.
- Without progress no time counts while a rank compiles a kernel.
- Orders other than steps and draws (updates, swaps) move gigabytes: while one is not complete, the time is ten times as
  long. A stopped process is found in `SILENT_S` also then.
- Ranks on a CPU compute with the processes' own time. While they use some, they are slow, not hung.
- If all ranks have completed what they were given, the loop of rank 0 hangs. The watchdog of the worker finds that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Seconds after which a stopped or silent process is lost.
SILENT_S = 6.0
_SLOW_TIMES = 10
_LEAST_CPU = 0.05  # of one core, by all ranks together: they compute
_CPU_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class FollowerLook:
    """What is seen of a follower at one moment."""

    pid: int
    status: int | None = None  # exit status, negative for a signal; None while it runs
    stopped: bool = False
    said: str = ""
    beat: int = 0
    ready: bool = True
    sequence: int = 0  # of the last order that it has carried out
    launched: int = 0
    done: int = 0  # steps that are complete on its device
    slow: bool = False  # it works on an order that may take long
    compiling: bool = False


@dataclass(frozen=True, slots=True)
class GroupLook:
    """What is seen of a group at one moment."""

    followers: Sequence[FollowerLook]
    ordered: int = 0  # sequence number of the last order; 0 before there are any
    done: int = 0  # steps that rank 0 has committed
    busy: bool = False  # a step of rank 0 is not complete on its device
    slow: bool = False  # rank 0 works on something that may take long
    compiling: bool = False  # rank 0
    cpu_s: float | None = None  # that the ranks have used; None for ranks on GPUs


class GroupWatch:
    """Judges one look after the other. `stall_s` None: a group without progress is never lost."""

    def __init__(self, followers: int, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._beats = [-1] * followers
        self.silent_s = [0.0] * followers  # seconds since each beat
        self._stopped_s = [0.0] * followers
        self._completed: tuple[int, ...] = ()
        self._still_s = 0.0
        self._cpu = (0.0, 0.0)  # `_still_s` and the seconds of CPU time at the last question whether ranks compute

    def look(self, seen: GroupLook, passed_s: float) -> str:
        """Why the group is lost; empty if it is not. `passed_s` are the seconds since the last look."""
        for rank, follower in enumerate(seen.followers, 1):
            if why := self._lost(rank, follower, passed_s):
                return f"rank {rank} {why}{f': {follower.said}' if follower.said else ''}"
        return self._still(seen, passed_s)

    def _lost(self, rank: int, seen: FollowerLook, passed_s: float) -> str:
        i = rank - 1
        self.silent_s[i] = 0.0 if seen.beat != self._beats[i] else self.silent_s[i] + passed_s
        self._stopped_s[i] = self._stopped_s[i] + passed_s if seen.stopped else 0.0
        self._beats[i] = seen.beat
        if seen.status is not None:
            return f"was ended by signal {-seen.status}" if seen.status < 0 else f"ended with status {seen.status}"
        if self._stopped_s[i] > SILENT_S:
            return f"(process {seen.pid}) has hung for {self._stopped_s[i]:.0f} s: it is stopped"
        if seen.ready and self.silent_s[i] > SILENT_S:
            return f"(process {seen.pid}) has hung for {self.silent_s[i]:.0f} s"
        return ""

    def _still(self, seen: GroupLook, passed_s: float) -> str:
        completed = (seen.done, *(number for f in seen.followers for number in (f.sequence, f.done)))
        behind = [i for i, f in enumerate(seen.followers, 1) if f.sequence < seen.ordered or f.done < f.launched]
        compiles = seen.compiling or any(follower.compiling for follower in seen.followers)
        waits = seen.ordered > 0 and (bool(behind) or seen.busy)
        self._still_s += passed_s
        if completed != self._completed or not waits or compiles or self._computes(seen.cpu_s):
            self._completed, self._still_s, self._cpu = completed, 0.0, (0.0, seen.cpu_s or 0.0)
            return ""
        slow = seen.slow or any(follower.slow for follower in seen.followers)
        if self._stall_s is None or self._still_s <= self._stall_s * (_SLOW_TIMES if slow else 1):
            return ""
        late = [i for i in behind if seen.followers[i - 1].sequence < seen.ordered]
        late = late or ([0] if seen.busy else []) + behind
        named = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return f"no rank has completed anything for {self._still_s:.0f} s; {named} {'have' if late[1:] else 'has'} hung"

    def _computes(self, cpu_s: float | None) -> bool:
        """Whether the ranks have computed since the last question, a second ago or more."""
        still_s, before_s = self._cpu
        if cpu_s is None or self._still_s - still_s < _CPU_EVERY_S:
            return False
        self._cpu = self._still_s, cpu_s
        return cpu_s - before_s > _LEAST_CPU * (self._still_s - still_s)
