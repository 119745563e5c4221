"""A constraint whose tokens are known in advance."""

from __future__ import annotations

import torch

from rollout.constraints.matcher import AllowList
from tests.support.engine.harness import VOCAB

X, Y, SIZE = list(range(10, 20)), list(range(20, 30)), list(range(30, 40))


class Cycle:
    """x, y, size, x, y, size, ...: token i is of list i modulo their number; a stop token after whole cycles."""

    def __init__(self, lists: list[list[int]], stop: int | None = None, vocab: int = VOCAB) -> None:
        self.lists, self.stop, self.vocab = lists, stop, vocab

    def start(self) -> CyclePlace:
        return CyclePlace(self)


class CyclePlace:
    def __init__(self, cycle: Cycle) -> None:
        self.cycle, self.at = cycle, 0

    def allowed(self) -> list[int]:
        lists, stop = self.cycle.lists, self.cycle.stop
        may_stop = stop is not None and self.at > 0 and self.at % len(lists) == 0
        return [*lists[self.at % len(lists)], *([stop] if may_stop else [])]

    def accept(self, token: int) -> bool:
        fits = token in self.allowed()
        self.at += 1
        return fits

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        AllowList(tuple(self.allowed()), self.cycle.vocab).fill(masks_RW, row)

    def undo(self, tokens: int) -> None:
        self.at -= tokens
