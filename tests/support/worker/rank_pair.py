"""A worker of one rank and one of several, of the same model: what they generate must be the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.worker.harness import launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion, GenerateResult

LOGPROB = 1e-4


@dataclass(frozen=True)
class Pair:
    """One worker of one rank, and one of several, of the same model."""

    folder: Path
    vocab: int
    one: WorkerProcess
    several: WorkerProcess
    exact: bool = True  # sums are those of float32: tokens are equal
    tolerance: float = LOGPROB

    def check(self, results: list[tuple[GenerateResult, GenerateResult]]) -> None:
        """Assert that pairs of results are the same, as far as their arithmetic allows."""
        pairs = [pair for theirs, ours in results for pair in zip(ours.completions, theirs.completions, strict=True)]
        common = [self.check_one(a, b) for a, b in pairs]
        assert sum(count >= 4 for count in common) * 2 >= len(common), common

    def check_one(self, ours: Completion, theirs: Completion) -> int:
        """Assert the same of two completions; the tokens that are equal. On a GPU rounding may turn a near tie."""
        assert len(ours) == len(theirs)
        if self.exact:
            assert_equal(ours, theirs, self.tolerance)
            return len(ours)
        same = ours.token_ids == theirs.token_ids
        common = len(same) if same.all() else int(same.argmin())
        assert common >= 1
        assert np.allclose(ours.raw_logprobs[:common], theirs.raw_logprobs[:common], rtol=0, atol=self.tolerance)
        return common

    def each(self, call: Callable[[RolloutClient], Any]) -> tuple[Any, Any]:
        """What `call` returns with a client of each worker."""
        found = []
        for worker in (self.one, self.several):
            with RolloutClient(worker.endpoint, timeout_s=120) as client:
                found.append(call(client))
        return found[0], found[1]

    def both(self, requests: list[dict[str, Any]]) -> list[tuple[GenerateResult, GenerateResult]]:
        """The results of the same requests on both workers."""
        return list(zip(*self.each(lambda client: client.generate_many(requests)), strict=True))

    def prompt(self, length: int, seed: int) -> list[int]:
        """A random prompt without special tokens."""
        return np.random.default_rng(seed).integers(3, self.vocab, length).tolist()


@contextmanager
def start_pair(
    folder: Path, vocab: int, logs: Path, common: dict[str, Any], several: dict[str, Any], **arithmetic: Any
) -> Iterator[Pair]:
    """Start both workers with `common` flags, and the second one with those of `several` as well.

    `arithmetic` are the last fields of `Pair`.
    """
    one = launch(folder, log=logs / "one", wait=False, **common)
    other = launch(folder, log=logs / "several", wait=False, **common | several)
    with one, other:
        for worker in (one, other):
            worker.wait_ready(240)
        yield Pair(folder, vocab, one, other, **arithmetic)


def assert_equal(ours: Completion, theirs: Completion, tolerance: float = LOGPROB) -> None:
    """The same tokens, and log-probs that differ by rounding."""
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.finish_reason == theirs.finish_reason
    for name in ("logprobs", "raw_logprobs"):
        assert np.allclose(getattr(ours, name), getattr(theirs, name), rtol=0, atol=tolerance), name


def assert_all_equal(results: list[tuple[GenerateResult, GenerateResult]]) -> None:
    """The same for all completions of pairs of results."""
    for theirs, ours in results:
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert_equal(a, b)
