"""Engines that draft from recorded completions, with some of the drafts wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch

from rollout.engine.sequence.sequence import Sequence
from rollout.engine.speculation.drafter import DRAFTERS
from tests.support.engine.harness import VOCAB, Bench

Recorded = Mapping[tuple[str, int], Seq[int]]


class ReplayDrafter:
    """The recorded tokens, each wrong with probability `wrong`; some paths are short or missing."""

    def __init__(self, recorded: Recorded, wrong: float, seed: int = 0, ragged: bool = False) -> None:
        self.recorded, self.wrong, self.ragged = recorded, wrong, ragged
        self.rng = random.Random(seed)
        self.ends: list[tuple[str, int]] = []

    def path(self, key: Sequence, prompt: np.ndarray, tokens: Seq[int], want: int) -> list[int]:
        path = list(self.recorded.get((key.group.key[1], key.index), ()))[len(tokens) :][:want]
        path = [token if self.rng.random() >= self.wrong else (token + 1) % VOCAB for token in path]
        path += [self.rng.randrange(VOCAB) for _ in range(want - len(path))]  # after the end, too
        return path[: self.rng.randint(0, want)] if self.ragged else path

    def ended(self, key: Sequence) -> None:
        self.ends.append((key.group.key[1], key.index))


def drafting(
    monkeypatch: pytest.MonkeyPatch,
    model,
    recorded: Recorded,
    wrong: float,
    seed: int = 0,
    ragged: bool = False,
    **fields,
) -> tuple[Bench, ReplayDrafter]:
    """An engine that drafts by a `ReplayDrafter`; `fields` as for `Bench`."""
    drafter = ReplayDrafter(recorded, wrong, seed, ragged)
    monkeypatch.setitem(DRAFTERS, "suffix", lambda kept_tokens: drafter)
    return Bench(model, speculation="suffix", **fields), drafter


def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products computed one token at a time: torch's own depend on the number of tokens, in the last bits."""
    linear = torch.nn.functional.linear

    def each(x, weight, bias=None):
        rows = x.reshape(-1, x.shape[-1])
        out = torch.stack([linear(row[None], weight, bias)[0] for row in rows])
        return out.reshape(*x.shape[:-1], weight.shape[0])

    monkeypatch.setattr(torch.nn.functional, "linear", each)
