"""A worker of one rank and one of several, of the same model: what they generate must be the same."""

from __future__ import annotations

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
def start_pair(folder: Path, vocab: int, logs: Path, common: dict[str, Any], several: dict[str, Any]) -> Iterator[Pair]:
    """Start both workers with `common` flags, and the second one with those of `several` as well."""
    one = launch(folder, log=logs / "one", wait=False, **common)
    other = launch(folder, log=logs / "several", wait=False, **common | several)
    with one, other:
        for worker in (one, other):
            worker.wait_ready(240)
        yield Pair(folder, vocab, one, other)


def assert_equal(ours: Completion, theirs: Completion) -> None:
    """The same tokens, and log-probs that differ by rounding."""
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.finish_reason == theirs.finish_reason
    for name in ("logprobs", "raw_logprobs"):
        assert np.allclose(getattr(ours, name), getattr(theirs, name), rtol=0, atol=LOGPROB), name


def assert_all_equal(results: list[tuple[GenerateResult, GenerateResult]]) -> None:
    """The same for all completions of pairs of results."""
    for theirs, ours in results:
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert_equal(a, b)
