"""The inputs from which the parts of an engine are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rollout.config import Settings
from rollout.engine.adapters import AdapterRegistry
from rollout.engine.device.releasable import ReleasableMemory
from rollout.engine.device.streams import Device
from rollout.engine.step.streams import NO_ORDERS, Orders
from rollout.models.language_model import LanguageModel


class OrderSizes(NamedTuple):
    """The sizes of the largest step that is ordered of other ranks."""

    words: int  # int32 words of its upload
    rows: int
    mask_words: int  # int32 words of a mask
    tokens: int


#: Waits for the other ranks of a tensor group.
Lead = Callable[[OrderSizes], Orders]


def alone(sizes: OrderSizes) -> Orders:
    """The `Lead` of a worker of one rank."""
    return NO_ORDERS


@dataclass(frozen=True, slots=True)
class Site:
    """The inputs from which the parts of an engine are built, at the start and after each fault."""

    settings: Settings
    device: Device
    model: LanguageModel
    registry: AdapterRegistry | None
    memory: ReleasableMemory  # memory of this rank that a sleep releases
    lead: Lead = alone  # orders of the first rank to the others
    follows: bool = False  # this is not the first rank
