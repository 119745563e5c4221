"""Shared by tests of sleep: memory that detects writes while it is released, and commands with their answers."""

import torch

from rollout.engine.device.streams import CpuDevice
from rollout.engine.messages.to_engine import Pause, Resume, Sleep, WakeUp
from rollout.engine.messages.to_service import Done, Failed
from tests.support.engine.harness import Bench
from tests.support.engine.strict_pages import StrictPages

_TOKEN = 1000
SAMPLED = {"temperature": 1.0, "seed": 11}
PENALIZED = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5}


class SomeHost(CpuDevice):
    """A host with as much free memory as the test says, which may refuse to give any or fail in its wait."""

    free: int | None = None
    refuses = broken = False

    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError("CUDA error: out of memory")
        return super().host_buffer(shape, dtype)

    def synchronize(self) -> None:
        if self.broken:
            raise ZeroDivisionError


class Sleeping(Bench):
    """An engine that can sleep."""

    def __init__(self, model, device=None, receiver=None, **engine: object) -> None:
        super().__init__(model, device, receiver, **{"sleep": True, **engine})

    @property
    def sleeper(self):
        return self.engine.sleeper

    @property
    def pages(self) -> StrictPages:
        return self.sleeper.memory.backing

    def order(self, order: type[Sleep] | type[WakeUp], *fields, **more) -> int:
        """Put an order into the inbox; its token."""
        global _TOKEN
        _TOKEN += 1
        self.engine.inbox.put(order(*fields, token=_TOKEN, **more))
        return _TOKEN

    def pause(self, ticks: int = 3) -> None:
        """Pause with all rows kept, and resume after some ticks."""
        self.engine.inbox.put(Pause("keep", 1))
        for _ in range(ticks):
            self.engine.tick()
        self.engine.inbox.put(Resume(2))

    def answer(self, token: int) -> Done | Failed | None:
        found = [event for event in self.events if isinstance(event, (Done, Failed)) and event.token == token]
        assert len(found) <= 1
        return found[0] if found else None

    def obeyed(self, token: int, most: int = 500) -> Done | Failed:
        """Tick until an order is answered."""
        for _ in range(most):
            self.engine.tick()
            if (answer := self.answer(token)) is not None:
                return answer
        raise AssertionError("the order is not answered")

    def sleep(self, level: int = 1, **fields) -> Done | Failed:
        return self.obeyed(self.order(Sleep, level, **fields))

    def wake(self) -> Done | Failed:
        return self.obeyed(self.order(WakeUp))


def submit_some(bench: Sleeping, prompt_of) -> None:
    """Completions of each kind, more than there are rows."""
    bench.submit("greedy", prompt_of(13), 40)
    bench.submit("sampled", prompt_of(70, 1), 30, sampling=SAMPLED, n=3)
    bench.submit("penalized", prompt_of(5, 2), 35, sampling=PENALIZED)
    bench.submit("stops", prompt_of(9, 3), 30, sampling={"temperature": 1.0, "seed": 3}, stop={"token_ids": (5, 9)})
    for i in range(6):
        bench.submit(f"more{i}", prompt_of(20 + i, i), 20, sampling={"temperature": 1.0, "seed": i})


def outcome(bench: Sleeping) -> dict:
    """Tokens and end of every completion."""
    return {at: (done.token_ids, done.finish.reason) for at, done in bench.completions.items()}
