"""Predicts the gain of pipelining from the parts of a decode step.

    blocking     f | s | b | f | s | b |          a step costs f + s + b: the device idles while the host works
    pipelined    f | s | f | s | f | s |          a step costs max(f + s, b): the host works meanwhile
                     b |   b |   b |

    speed-up = T_block / T_pipe x (1 - z)

f is the forward, s the sampling, b the work of the blocking loop while the device idles. z is the share of steps with
zombies only: rows whose sequence had ended before the step was committed. The model is from Moondream's "Popping the
GPU bubble". Times are seconds of one step.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a decode step, each measured on its own, seconds. Raises ValueError for a negative or empty one."""

    forward_s: float
    sampling_s: float
    bookkeeping_s: float

    def __post_init__(self) -> None:
        if min(self.forward_s, self.sampling_s, self.bookkeeping_s) < 0 or self.device_s <= 0:
            raise ValueError(
                f"the parts of a step must be times of at least 0, forward and sampling together above 0; got {self}"
            )

    @property
    def device_s(self) -> float:
        """Time of a step on the device, f + s."""
        return self.forward_s + self.sampling_s

    @property
    def blocking_s(self) -> float:
        """Period of the blocking loop, f + s + b."""
        return self.device_s + self.bookkeeping_s

    @property
    def pipelined_s(self) -> float:
        """Period of the pipeline, max(f + s, b)."""
        return max(self.device_s, self.bookkeeping_s)

    @property
    def idle_s(self) -> float:
        """Device time that a step of the pipeline loses to the host: 0 while b is hidden."""
        return self.pipelined_s - self.device_s

    def speedup(self, zombie_share: float = 0.0) -> float:
        """Tokens per second of the pipeline, relative to the blocking loop.

        Raises ValueError unless 0 <= zombie_share < 1.
        """
        if not 0 <= zombie_share < 1:
            raise ValueError(f"zombie_share must be in [0, 1), a share of the pipeline's steps; got {zombie_share}")
        return self.blocking_s / self.pipelined_s * (1 - zombie_share)


def zombie_share(tokens: float) -> float:
    """Share of the steps with zombies only, if all rows end by a stop token after `tokens` steps.

    The next step is launched before the stop token is known, so `tokens` steps cost one more. Rows that end by length,
    or while others go on, cost no step. Raises ValueError for less than one step.
    """
    if tokens < 1:
        raise ValueError(f"a row runs for at least one step; got {tokens}")
    return 1 / (tokens + 1)


def points(speedup: float) -> float:
    """A speed-up in percentage points over 1: 1.13 is 13.0."""
    return 100 * (speedup - 1)
