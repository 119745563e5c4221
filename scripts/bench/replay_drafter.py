"""A drafter for benchmarks: the tokens of a recorded run, some of them wrong.

A drafter whose tokens are right with probability p, each on its own, has k drafts accepted with probability p^k. So a
verify step yields AL = 1 + p + p^2 + ... + p^k tokens on average: the accepted length, the step's own token included.
"""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, cast

import numpy as np
import torch

from rollout.engine.features.drafts.drafter import DeviceDrafter
from rollout.engine.sequence.sequence import Sequence, row_seed
from rollout.engine.step.row_state import LENGTH, PROMPT, SEED
from rollout.engine.upload import StepInput


def accepted_length(p: float, k: int) -> float:
    """AL of k drafts that are right with probability `p` each."""
    return float(sum(p**j for j in range(k + 1)))


def chance_of(length: float, k: int) -> float:
    """The probability `p` at which k drafts have this AL. Raises ValueError if no probability has."""
    if not 1 <= length <= k + 1:
        raise ValueError(f"{k} drafts have an accepted length of 1 to {k + 1}, not {length}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_length(middle, k) < length else (low, middle)
    return low


class ReplayDrafter:
    """Drafts from the recorded tokens of requests, by their names; a `HostDrafter`.

    Args:
        recorded: tokens of each request's first completion.
        p: probability that a token is right. Which tokens are wrong is a matter of `seed`.
        vocab: token ids.
        diverges: after a wrong token the rest of a path is wrong as well, as with a drafter that goes on from its own
            draft. Drafts of a step in flight that are refused then cost those of the next step, too.
    """

    def __init__(
        self, recorded: Mapping[str, Seq[int]], p: float, vocab: int, seed: int = 0, diverges: bool = False
    ) -> None:
        self._drafts: dict[str, list[int]] = {}
        self._lost: dict[str, list[int]] = {}
        self._wrong_at: dict[str, list[int]] = {}
        self._diverges = diverges
        for i, (name, tokens) in enumerate(recorded.items()):
            right = np.asarray(tokens, dtype=np.int64)
            other = (right + 1) % vocab
            is_wrong = np.random.default_rng([seed, i]).random(len(right)) >= p
            self._drafts[name] = np.where(is_wrong, other, right).tolist()
            self._lost[name] = other.tolist()
            # The first wrong token at or after each position.
            at = np.where(is_wrong, np.arange(len(right)), len(right))
            self._wrong_at[name] = np.minimum.accumulate(at[::-1])[::-1].tolist()

    def path(self, key: Hashable, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        """As `HostDrafter.path`; the key is the engine's sequence."""
        name, begin = cast(Sequence, key).group.key[1], len(tokens)
        drafts = self._drafts.get(name, [])
        path = drafts[begin : begin + want]
        if self._diverges and path:
            right = self._wrong_at[name][begin] - begin
            path[right:] = self._lost[name][begin + right : begin + len(path)]
        return path

    def source(self, key: Hashable) -> int | None:
        """As `HostDrafter.source`."""
        return None

    def ended(self, key: Hashable) -> None:
        """As `HostDrafter.ended`."""


class ReplayOnDevice:
    """Puts recorded tokens in the place of the drafts of the device. Steps take the time of the drafter there.

    Args:
        drafter: of an engine whose requests have the seeds 0, 1, ... and one completion each.
        recorded: tokens of the requests, in this order.
        p: as `ReplayDrafter`.
        vocab: token ids.
    """

    def __init__(self, drafter: DeviceDrafter, recorded: Seq[Seq[int]], p: float, vocab: int) -> None:
        self._drafter, self._run = drafter, drafter.run
        device, most = drafter.rows.ints.device, drafter.most
        rows, length = [], max(map(len, recorded)) + most
        for i, tokens in enumerate(recorded):
            right = np.asarray([*tokens, *[0] * (length - len(tokens))], dtype=np.int64)
            wrong = np.random.default_rng([0, i]).random(len(right)) >= p
            rows.append(np.where(wrong, (right + 1) % vocab, right))
        seeds = np.array([row_seed(i, 0) for i in range(len(recorded))], dtype=np.int64)
        order = np.argsort(seeds)
        self._seeds_N = torch.from_numpy(seeds[order]).to(device)
        self._tokens_NL = torch.from_numpy(np.stack([rows[i] for i in order])).to(device)
        self._ahead_G = torch.arange(1, most + 1, device=device)

    def __enter__(self) -> None:
        self._drafter.run = self._replay  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        self._drafter.run = self._run  # type: ignore[method-assign]

    def _replay(self, step: StepInput, output_4R: torch.Tensor, accepted_B: torch.Tensor, *how: Any) -> Any:
        drafted = self._run(step, output_4R, accepted_B, *how)
        if drafted is not None:
            ints_RI, (requests, length) = self._drafter.rows.ints, self._tokens_NL.shape
            request_R = torch.searchsorted(self._seeds_N, ints_RI[:, SEED].contiguous()).clamp_(max=requests - 1)
            at_RG = (ints_RI[:, LENGTH] - ints_RI[:, PROMPT])[:, None] + self._ahead_G
            self._drafter.next_RG.copy_(self._tokens_NL[request_R[:, None], at_RG.clamp_(0, length - 1)])
        return drafted
