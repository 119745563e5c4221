"""The rules by which rank 0 finds that a rank of its group is lost. Plain data in, a sentence out; no processes here.

    its process has ended                                                     at once
    its process is stopped (also at the start), or its beat stands still      after `SILENT_S`
    a lane of a rank has something to do, and completes no part of it         after `stall_s`
    steps are enqueued, and no rank completes or enqueues one                 after `stall_s`

A **lane** is the work of one thread or stream of a rank, in order: orders, updates, adapters, copies one way. Each lane
is judged by itself, whether steps are ordered or not. Steps are not a lane: in a step the ranks wait for each other, so
they only stand still together.

A healthy group must not be ended, however slow it is:

- Only time that both sides have seen pass counts: the watching thread, and the beat of the rank. A machine that was
  stopped or is overloaded delays them, too.
- The beat is a thread of its own, so only a process that does not run at all is silent. It counts once a follower is
  ready: the imports and the loading before are seconds under Python's lock. Until then `start_watch.py` has the rules.
- No time counts while a rank compiles a kernel.
- Work that moves gigabytes (updates, swaps, sleeps) is done in parts, and each part that is done begins the time anew.
  So no order needs a longer limit than another.
- A copy that waits for its turn on the device is not begun, and does not count. A follower's main thread sees the ends
  of copies between two orders. So no time counts for copies while it carries out an order, and orders are a lane, too.
- A disk that hangs costs hits, or an update, but not the worker: orders of its lanes never count as begun.
- A rank on a CPU computes steps in a thread. While such a thread uses CPU time, the ranks are slow, not hung. So is a
  main thread.
- If all ranks have completed what they were given, the loop of rank 0 hangs. The watchdog of the worker finds that.
  A stopped rank 0 is found by the followers (`beat.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

#: Seconds between two beats of a follower.
BEAT_S = 0.25
#: Seconds after which a stopped or silent process is lost.
SILENT_S = 6.0
_LEAST_CPU = 0.05  # share of a core; above it the ranks compute
_CPU_EVERY_S = 1.0

#: Lanes besides the lane of the orders.
LaneName = Literal[
    "updates", "adapters", "adapter_copies", "kv_out", "kv_in", "state_out", "state_in", "swap", "sleep",
    "kv_write", "kv_read", "state_write", "state_read", "update_reads",
]  # fmt: skip
LANES: tuple[LaneName, ...] = get_args(LaneName)
#: Lanes of copies, reported by a follower's main thread.
COPY_LANES: tuple[LaneName, ...] = ("adapter_copies", "kv_out", "kv_in", "state_out", "state_in", "swap")


class LaneProgress(NamedTuple):
    """The progress of a lane."""

    busy: bool  # something is begun, and has not ended
    done: int  # grows with each order that ended, and with each part of a long one


_EMPTY = LaneProgress(False, 0)


@dataclass(frozen=True, slots=True)
class FollowerState:
    """A look at a follower at one moment."""

    pid: int
    status: int | None = None  # exit status, negative for a signal; None while it runs
    stopped: bool = False
    said: str = ""
    beat: int = 0
    ready: bool = True
    sequence: int = 0  # number of the last order that it has carried out
    launched: int = 0
    done: int = 0  # steps that are complete on its device
    lanes: Mapping[LaneName, LaneProgress] = field(default_factory=dict)  # without orders; a sleep is one of these
    looks: int = 0  # looks of its main thread for copies
    compiling: bool = False
    main_s: float | None = None  # CPU time of its main thread; None for a rank on a GPU
    compute_s: float | None = None  # CPU time of the thread that computes its steps, as above


@dataclass(frozen=True, slots=True)
class RanksState:
    """A look at a group at one moment."""

    followers: Sequence[FollowerState]
    ordered: int = 0  # sequence number of the last order; 0 before there are any
    done: int = 0  # steps that rank 0 has committed
    busy: bool = False  # a step of rank 0 is not complete on its device
    lanes: Mapping[LaneName, LaneProgress] = field(default_factory=dict)  # lanes of rank 0
    compiling: bool = False  # rank 0
    compute_s: float | None = None  # CPU time of the thread that computes its steps; None for a rank on a GPU


class StallClock:
    """Seconds for which something stands still."""

    def __init__(self) -> None:
        self.still_s = 0.0
        self._done: object = None
        self._cpu = (0.0, 0.0)  # `still_s` and the CPU time at the last question whether a rank computes

    def update(self, done: object, counts: bool, passed_s: float, cpu_s: float | None = None) -> float:
        """`done` changes with progress; time counts while `counts` is true. Returns the seconds without progress."""
        self.still_s += passed_s
        if done != self._done or not counts or self._computes(cpu_s):
            self._done, self.still_s, self._cpu = done, 0.0, (0.0, cpu_s or 0.0)
        return self.still_s

    def _computes(self, cpu_s: float | None) -> bool:
        """Whether CPU time was used since the last question, a second ago or more."""
        still_s, before_s = self._cpu
        if cpu_s is None or self.still_s - still_s < _CPU_EVERY_S:
            return False
        self._cpu = self.still_s, cpu_s
        return cpu_s - before_s > _LEAST_CPU * (self.still_s - still_s)


class RankWatch:
    """Judges one look after the other. `stall_s` None: a group without progress is never lost."""

    def __init__(self, followers: int, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._beats = [-1] * followers
        self.silent_s = [0.0] * followers  # seconds since each beat
        self._stopped_s = [0.0] * followers
        self._steps = StallClock()
        self._lanes: dict[tuple[int, str], StallClock] = {}
        self._looks = [-1] * followers

    def find_stall(self, seen: RanksState, passed_s: float) -> str:
        """Why the group is lost; empty if it is not. `passed_s` are the seconds since the last look."""
        lived_s = [passed_s]  # the seconds that each rank has seen pass
        for i, follower in enumerate(seen.followers):
            beats = follower.beat - self._beats[i]
            lived_s.append(min(beats * BEAT_S, 2 * passed_s) if self._beats[i] >= 0 else 0.0)
            if why := self._lost(i, follower, passed_s):
                return f"rank {i + 1} {why}{f': {follower.said}' if follower.said else ''}"
        compiles = seen.compiling or any(follower.compiling for follower in seen.followers)
        return self._hung_lane(seen, compiles, lived_s) or self._still(seen, compiles, passed_s)

    def _lost(self, i: int, seen: FollowerState, passed_s: float) -> str:
        beats = seen.beat != self._beats[i]
        self.silent_s[i] = 0.0 if beats else self.silent_s[i] + passed_s
        self._stopped_s[i] = self._stopped_s[i] + passed_s if seen.stopped and not beats else 0.0
        self._beats[i] = seen.beat
        if seen.status is not None:
            return f"was ended by signal {-seen.status}" if seen.status < 0 else f"ended with status {seen.status}"
        if self._stopped_s[i] > SILENT_S:
            return f"(process {seen.pid}) has hung for {self._stopped_s[i]:.0f} s: it is stopped"
        if seen.ready and self.silent_s[i] > SILENT_S:
            return f"(process {seen.pid}) has hung for {self.silent_s[i]:.0f} s"
        return ""

    def _hung_lane(self, seen: RanksState, compiles: bool, lived_s: list[float]) -> str:
        looks = [follower.looks for follower in seen.followers]
        looked = [True, *(now != before for now, before in zip(looks, self._looks, strict=True))]
        self._looks = looks
        ranks: list[tuple[Mapping[Any, LaneProgress], float | None]] = [(seen.lanes, None)]
        ranks += [({**f.lanes, "orders": _orders(seen.ordered, f)}, f.main_s) for f in seen.followers]
        for rank, (lanes, main_s) in enumerate(ranks):
            for name, lane in lanes.items():
                clock = self._lanes.setdefault((rank, name), StallClock())
                computes = main_s if name == "orders" else None
                passed_s = 0.0 if name in COPY_LANES and not looked[rank] else lived_s[rank]
                still_s = clock.update(lane.done, lane.busy and not compiles, passed_s, computes)
                if self._stall_s is not None and still_s > self._stall_s:
                    return f"rank {rank} has hung: it has completed nothing in its lane {name} for {still_s:.0f} s"
        return ""

    def _still(self, seen: RanksState, compiles: bool, passed_s: float) -> str:
        ranks = [seen.lanes, *(follower.lanes for follower in seen.followers)]
        swaps = [lanes.get("swap", _EMPTY).done for lanes in ranks]  # steps wait for them
        completed = (seen.done, *(number for f in seen.followers for number in (f.launched, f.done)), *swaps)
        waits = seen.busy or any(f.done < f.launched for f in seen.followers)
        used = [s for s in (seen.compute_s, *(f.compute_s for f in seen.followers)) if s is not None]
        still_s = self._steps.update(completed, waits and not compiles, passed_s, sum(used) if used else None)
        if self._stall_s is None or still_s <= self._stall_s:
            return ""
        late = [i for i, f in enumerate(seen.followers, 1) if f.sequence < seen.ordered]
        late = late or [0] * seen.busy + [i for i, f in enumerate(seen.followers, 1) if f.done < f.launched]
        named = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return f"no rank has completed anything for {still_s:.0f} s; {named} {'have' if late[1:] else 'has'} hung"


def _orders(ordered: int, seen: FollowerState) -> LaneProgress:
    """The lane of a follower's main thread: it may wait for steps on its device, and steps may wait for other ranks."""
    sleeps, updates = (seen.lanes.get(name, _EMPTY).done for name in ("sleep", "updates"))  # a sleep waits for updates
    return LaneProgress(seen.sequence < ordered and seen.done >= seen.launched, seen.sequence + sleeps + updates)
