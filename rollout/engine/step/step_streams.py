"""The streams of an engine's steps, and the orders that tell other ranks what they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollout.engine.device.rank_orders import NoRankOrders, RankOrders
from rollout.engine.device.streams import Device, DeviceStream
from rollout.engine.step.masks import StepMasks
from rollout.engine.upload import StepOutput, Upload


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one engine's steps."""

    h2d: DeviceStream
    compute: DeviceStream
    d2h: DeviceStream
    beside: Mapping[str, DeviceStream]  # streams of features, by name, for work in parallel to the steps

    @classmethod
    def make(cls, device: Device, beside: Iterable[str] = ()) -> Streams:
        h2d, compute, d2h = device.stream("h2d"), device.stream("compute"), device.stream("d2h")
        return cls(h2d, compute, d2h, {name: device.stream(name) for name in beside})

    def all(self) -> list[DeviceStream]:
        """All streams of this engine."""
        return [self.h2d, self.compute, self.d2h, *self.beside.values()]

    def close(self) -> None:
        """Finish what is enqueued and end the streams."""
        for stream in self.all():
            stream.close()


class Orders(RankOrders, Protocol):
    """Tells the other ranks of a tensor group, in order, what this rank enqueues on its compute stream."""

    def step(self, upload: Upload) -> None:
        """The next step."""

    def draw(self, masks: StepMasks) -> None:
        """The draw of the last step, whose masks are written."""

    def swap(self, version: int) -> None:
        """The copy of the update that all ranks have prepared; `version` is the version of later steps."""

    def confirm(self, output: StepOutput) -> None:
        """Raise if another rank knows that these outputs may be wrong."""


class NoOrders(NoRankOrders):
    """The orders of a worker of one rank: there is no rank to take them."""

    def step(self, upload: Upload) -> None:
        """No-op."""

    def draw(self, masks: StepMasks) -> None:
        """No-op."""

    def swap(self, version: int) -> None:
        """No-op."""

    def confirm(self, output: StepOutput) -> None:
        """No-op: there is no other rank."""


NO_ORDERS = NoOrders()
