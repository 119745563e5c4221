"""`python -m tests.support.worker.faulty_worker FOLDER serve ...`: `rollout` with faults to order.

A file in FOLDER that is named after a fault makes it happen once:

    memory, cuda_memory, device   raised by a step on the compute stream
    hang                          a step on the compute stream waits until the file `hang_over` is there
    torn, commit                  raised on the loop's thread, between two columns of a token and after a commit
    submit                        raised while a request is taken
    books                         raised while the log line of a fault is put together
    copy                          raised while new weights are copied in
    service, receiver, metrics    end a thread
"""

import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollout.cli.main import run
from rollout.engine.inspect import Inspector
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.step.device_step import DeviceStep
from rollout.metrics.sinks import MetricsThread
from rollout.service.server import Server
from rollout.weights.staged_weights import StagedWeights
from rollout.weights.update_intake import UpdateIntake

FOLDER = Path(sys.argv[1])


class End(BaseException):
    """Ends a thread that goes on after any other exception."""


class TornColumn(array):
    """A column that refuses its next value."""

    def append(self, value: float) -> None:
        raise ValueError("torn")


def ordered(kind: str) -> bool:
    """True once for each order."""
    try:
        (FOLDER / kind).unlink()
    except FileNotFoundError:
        return False
    return True


def before(owner: type, method: str, act: Callable[..., Any]) -> None:
    """Have `act` called with the same arguments before each call of a method."""
    original = getattr(owner, method)

    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(owner, method, both)


def raiser(errors: dict[str, BaseException]) -> Callable[..., None]:
    """Raises what is ordered."""

    def act(*args: Any, **kwargs: Any) -> None:
        for kind, error in errors.items():
            if ordered(kind):
                raise error

    return act


def hang(*args: Any) -> None:
    """Wait for `hang_over`, if that is ordered."""
    if ordered("hang"):
        while not ordered("hang_over"):
            time.sleep(0.005)


def tear(self: Scheduler, *args: Any) -> None:
    """The second row of the step gets its token, but not all of its log-probs."""
    if len(self.roster.decoding) > 1 and ordered("torn"):
        seq = self.roster.decoding[1]
        seq.drawn.raw_logprobs = TornColumn("f", seq.drawn.raw_logprobs)


before(
    DeviceStep,
    "decode",
    raiser(
        {
            "memory": MemoryError("memory"),
            "cuda_memory": torch.OutOfMemoryError("cuda_memory"),
            "device": RuntimeError("device"),
        }
    ),
)
before(DeviceStep, "decode", hang)
before(Scheduler, "commit", tear)
before(Scheduler, "end_overdue", raiser({"commit": AssertionError("commit")}))
before(Scheduler, "submit", raiser({"submit": KeyError("submit")}))
before(Inspector, "running_requests", raiser({"books": RuntimeError("books")}))
before(StagedWeights, "copy_into", raiser({"copy": RuntimeError("copy")}))
before(Server, "_take_messages", raiser({"service": RuntimeError("service")}))
before(UpdateIntake, "poll_ms", raiser({"receiver": RuntimeError("receiver")}))
before(MetricsThread, "_each", raiser({"metrics": End("metrics")}))

if __name__ == "__main__":
    del sys.argv[1]
    run()
