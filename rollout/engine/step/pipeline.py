"""The pipeline: two slots used in turn, steps in flight in launch order. No device code in here.

    depth 2    tick k    launch(k)              commit(k-1)     compute runs k while the host commits k-1
               tick k+1  launch(k+1)            commit(k)
    depth 1    tick k    launch(k) commit(k)                    the blocking loop: same code, same tokens

Rules:
- a slot is reserved from `acquire` until `retire`, which the engine calls after the commit has returned;
- steps retire in the order of their launch;
- at most `depth` steps are in flight.
"""

from collections import deque
from dataclasses import dataclass

from rollout.engine.schedule.plan import Plan
from rollout.engine.step.slot import Slot
from rollout.engine.upload import Header


@dataclass(slots=True)
class StepInFlight:
    """A launched step whose outputs the host has not taken yet."""

    plan: Plan
    header: Header  # header of the upload
    slot: Slot
    planned_at_s: float  # start of planning, `time.perf_counter()`
    plan_s: float  # host time of each phase, seconds
    launch_s: float


class Pipeline:
    """Knows the next slot and the oldest step."""

    def __init__(self, slots: list[Slot], depth: int) -> None:
        assert 1 <= depth <= len(slots)
        self.depth = depth
        self.free_slots = deque(slots)
        self._slots = len(slots)
        self._in_flight: deque[StepInFlight] = deque()

    @property
    def in_flight(self) -> int:
        """Steps launched and not retired."""
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """True when no further step may be launched before one retires."""
        return len(self._in_flight) >= self.depth

    def acquire(self) -> Slot:
        """Reserve the slot that has been free for longest."""
        assert not self.full, "a step retires before the next slot is taken"
        return self.free_slots.popleft()

    def push(self, step: StepInFlight) -> None:
        """Note that the step was launched in a slot from `acquire`."""
        self._in_flight.append(step)

    def steps(self) -> list[StepInFlight]:
        """The steps in flight, oldest first; may be called from any thread."""
        return list(self._in_flight)

    def oldest(self) -> StepInFlight:
        """The step to commit next; one is in flight."""
        return self._in_flight[0]

    def newest(self) -> StepInFlight:
        """The step launched last; it is in flight."""
        return self._in_flight[-1]

    def retire(self, step: StepInFlight) -> None:
        """Free the slot of `step`, whose commit has returned."""
        assert self._in_flight and self._in_flight[0] is step, "commits are FIFO"
        self._in_flight.popleft()
        self.free_slots.append(step.slot)

    def check_integrity(self) -> None:
        """Assert that no slot is in use."""
        assert not self._in_flight and len(self.free_slots) == self._slots, "a slot is in use"
