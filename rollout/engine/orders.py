"""Orders to sleep and to wake, service -> engine, and what a status says of a sleep. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give the device's memory back until `Wake`. Answered by `Done(token)` or `Failed`.

    Level 1 keeps the weights in host memory, level 2 drops them. None is what the settings say.
    """

    level: int
    token: int
    mode: Literal["keep", "abort"] | None = None  # what becomes of the requests that there are
    requests: Literal["wait", "refuse"] | None = None  # and of those that come meanwhile


@dataclass(frozen=True, slots=True)
class Wake:
    """Have the memory again and go on. Answered by `Done(token)`, or `Failed` and asleep as before."""

    token: int


@dataclass(frozen=True, slots=True)
class SleepStatus:
    """A worker that is asleep, or about to be."""

    level: int
    requests: Literal["wait", "refuse"]  # what becomes of those that come
    freed_bytes: int  # device memory that was given back; 0 until it is
    age_s: float  # since it was
