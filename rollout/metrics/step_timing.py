"""When one step, or one swap of the weights, happened: plain data that the loop hands to the meter."""

from dataclasses import dataclass

#: (begin, end), seconds.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One committed step.

    Phases of the host are durations in seconds. Everything on the device is an interval on the meter's clock.
    """

    kind: str  # "decode" or "prefill"
    rows: int  # rows of the step, zombies included
    zombie_rows: int
    tokens: int  # tokens kept
    plan_s: float
    launch_s: float
    commit_s: float
    start_s: float  # the compute stream began the step
    end_s: float
    version: int  # weights version of the step
    h2d: Interval | None = None
    d2h: Interval | None = None
    planned_at_s: float | None = None  # the host began to plan
    committed_at_s: float | None = None  # the host began to commit
    finalized_at_s: float | None = None  # everything that the commit produced was handed over
    idle_after: bool = False  # at that moment there was nothing to launch
    input_tokens: int = 0
    max_context: int = 0  # longest context of a row, tokens
    mask_wait: Interval | None = None  # the device waited for masks between forward and draw

    @property
    def ran_s(self) -> float:
        """Seconds for which the compute stream ran the step."""
        return sum(end_s - start_s for start_s, end_s in self.busy)

    @property
    def busy(self) -> tuple[Interval, ...]:
        """The intervals in which the compute stream ran the step: two if the step waited for masks, otherwise one."""
        if self.mask_wait is None:
            return ((self.start_s, self.end_s),)
        return (self.start_s, self.mask_wait[0]), (self.mask_wait[1], self.end_s)


@dataclass(frozen=True, slots=True)
class SwapTiming:
    """One swap of the weights: the new version, and the interval in which the compute stream was held."""

    version: int
    start_s: float
    end_s: float
