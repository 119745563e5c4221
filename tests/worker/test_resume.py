"""Nothing generated is lost: workers and trainers die with SIGKILL, and completions are as if nothing had happened.

Kills come after a number of tokens, never after a time. A worker that comes back serves the same weights under another
version, so that the spans tell which life of it sampled a token.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.worker.harness import ONES, check, launch, subprocess_environment, token_ids
from tests.support.worker.journal_trainer import COMMON, REQUESTS, as_arrays
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion, GenerateResult
from trainer_bridge.client.resumed_call import ResumedCall, completion_seed

LONG = 16_384
STARTS = (17, 480)
FLAGS = {"max_rows": 8, "dtype": "float32"}


class MortalWorker:
    """A worker that dies at given counts of tokens, and comes back at the same endpoint with the next version."""

    def __init__(self, model: Path, folder: Path, kill_at: tuple[int, ...], **flags: Any) -> None:
        self._model, self._folder, self._flags = model, folder, {**FLAGS, **flags}
        self._kill_at = list(kill_at)
        self._tokens = self.lives = 0
        self.process = self._start()
        self.endpoint = ""

    def _start(self, **more: Any) -> WorkerProcess:
        log = self._folder / f"life-{self.lives}.log"
        return launch(self._model, log=log, wait=False, initial_version=self.lives, **more, **self._flags)

    def wait_ready(self) -> None:
        self.process.wait_ready(60)
        self.endpoint = self.process.endpoint

    def count(self, tokens: int) -> None:
        """Count tokens that have arrived."""
        self._tokens += tokens
        if self._kill_at and self._tokens >= self._kill_at[0]:
            self._kill_at.pop(0)
            self.restart()

    def restart(self) -> None:
        """SIGKILL, and another process at the same endpoint."""
        self.process.kill()
        self.lives += 1
        self.process = self._start(bind=self.endpoint)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Any]:
    workers: list[MortalWorker] = []

    def make(model: Path, *kill_at: int, **flags: Any) -> MortalWorker:
        folder = tmp_path / f"worker-{len(workers)}"
        folder.mkdir()
        workers.append(MortalWorker(model, folder, kill_at, **flags))
        return workers[-1]

    yield make
    for worker in workers:
        worker.process.kill()


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose every token is a throw of dice: more than a nat of entropy."""
    folder = tmp_path_factory.mktemp("dice")
    make_checkpoint("qwen3", folder, seed=3, max_position_embeddings=8192)
    return folder


def assert_same(disturbed: Completion, undisturbed: Completion) -> None:
    np.testing.assert_array_equal(disturbed.token_ids, undisturbed.token_ids)
    assert (disturbed.finish_reason, disturbed.seed) == (undisturbed.finish_reason, undisturbed.seed)
    for name in ("logprobs", "raw_logprobs", "drawn_logprobs"):
        ours, theirs = getattr(disturbed, name), getattr(undisturbed, name)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert sum(count for _, count in disturbed.versions) == len(disturbed)


@pytest.mark.nightly
def test_eight_completions_of_16k_tokens_survive_two_kills_of_their_worker(mortal: Any) -> None:
    dying = mortal(ONES, 3 * LONG, 6 * LONG, max_context_tokens=LONG + 64)
    fields = {"n": 4, "max_tokens": LONG, "temperature": 1.0, "stop": {"ignore_eos": True}}

    async def disturbed() -> list[tuple[GenerateResult, dict[int, list[int]]]]:
        async with AsyncRolloutClient(dying.endpoint, resume=True, timeout_s=150.0) as client:
            return await asyncio.gather(*(stream(client, start) for start in STARTS))

    async def stream(client: Any, start: int) -> tuple[GenerateResult, dict[int, list[int]]]:
        seen: dict[int, list[int]] = {index: [] for index in range(4)}
        chunks = await client.generate(token_ids(f"{start}:"), seed=start, **fields, stream="tokens")
        async for chunk in chunks:
            assert chunk.offset == len(seen[chunk.index]), "each token once, in order"
            seen[chunk.index] += chunk.token_ids.tolist()
            dying.count(len(chunk.token_ids))
        return chunks.result, seen

    dying.wait_ready()
    got = asyncio.run(disturbed())
    assert dying.lives == 2
    for start, (result, seen) in zip(STARTS, got, strict=True):
        for index, completion in enumerate(result.completions):
            assert len(completion) == LONG and seen[index] == completion.token_ids.tolist()
            assert completion.seed == completion_seed(start, index) and completion.finish_reason == "length"
            assert [version for version, _ in completion.versions] == [0, 1, 2]
            check(f"{start}:", completion, {0: 1, 1: 1, 2: 1})


@pytest.mark.nightly
@pytest.mark.parametrize("speculation", ["ngram", *nightly("suffix")])
def test_random_draws_go_on_as_if_no_worker_had_died(
    dice: Path, mortal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: str
) -> None:
    """The first worker draws a token a step; the second verifies drafts, and also draws more than one."""
    tokens, metrics = 300, tmp_path / "metrics.jsonl"
    drafts = {"speculation": speculation, "jsonl": metrics, "interval_s": 0.1}
    first, second = mortal(dice, 8 * tokens // 4), mortal(dice, 8 * tokens * 5 // 8, **drafts)
    first.wait_ready(), second.wait_ready()
    common = {"max_tokens": tokens, "stop": {"ignore_eos": True}, "stream_every": 16}
    asked: list[dict[str, Any]] = [
        {"prompt": [5, 6, 7], "n": 3, "seed": 1},
        {"prompt": [5, 6], "n": 2, "top_p": 0.8, "top_k": 20, "frequency_penalty": 0.01, "seed": 2},
        {"prompt": [9] * 40, "repetition_penalty": 1.1, "temperature": 0.7, "seed": 3},
        {"prompt": [9, 8], "logit_bias": {7: 2.0}, "presence_penalty": 0.5, "seed": 4},
    ]
    with RolloutClient(first.endpoint, timeout_s=60.0) as client:
        asked.append({"prompt": [3], "continue_from": client.generate([3], max_tokens=150, seed=5).completions[0]})
        wanted = client.generate_many(asked, **common)

    take = ResumedCall.take

    def counted(self: ResumedCall, part: Any, chunk: Any) -> Any:
        taken = take(self, part, chunk)
        for worker in (first, second):
            worker.count(len(taken.token_ids))
        return taken

    monkeypatch.setattr(ResumedCall, "take", counted)
    with RolloutClient([first.endpoint, second.endpoint], resume=True, timeout_s=100.0) as client:
        got = client.generate_many(asked, **common)
    assert (first.lives, second.lives) == (1, 1) and sum(result.resumes for result in got) >= 6
    for ours, theirs in zip(got, wanted, strict=True):
        for one, other in zip(ours.completions, theirs.completions, strict=True):
            assert_same(one, other)
            assert len(one) == tokens
    assert max(json.loads(line).get("speculation/accepted", 0) for line in metrics.read_text().splitlines()) > 20


def test_forks_go_on_when_the_worker_of_their_sources_is_killed(
    worker: WorkerProcess, client: RolloutClient, mortal: Any
) -> None:
    """In the middle of a fork, and before another one of the same source; one source has ended, one runs."""
    dying = mortal(ONES, **{"max_context_tokens": 4096})
    dying.wait_ready()
    sampled = {"temperature": 1.0, "stop": {"ignore_eos": True}}
    asked = {"n": 2, "max_tokens": 400, "seed": 9, **sampled}
    prompt, further = token_ids("17: 18 19"), token_ids(" 41:")
    with RolloutClient([dying.endpoint, worker.endpoint], resume=True, timeout_s=100.0) as both:
        first = {"endpoint": dying.endpoint, "seed": 3, **sampled}
        ended = both.generate(prompt, **first, max_tokens=60, request_id="ended")
        runs = both.generate(prompt, **first, max_tokens=1500, request_id="runs", stream="tokens")
        said = {"ended": [*prompt, *ended.completions[0].token_ids], "runs": [*prompt, *next(runs).token_ids]}
        forks = {name: {"request": name, "offset": len(said[name])} for name in said}
        begun = [both.generate(further, fork=fork, **asked, stream="tokens", stream_every=8) for fork in forks.values()]
        for branch in begun:
            next(branch)
        dying.process.kill()
        results = [branch.wait() for branch in begun]
        later = [both.generate(further, fork=fork, **asked) for fork in forks.values()]
        runs.close()
    for name, result, again in zip(said, results, later, strict=True):
        alone = client.generate([*said[name], *further], **asked)
        assert result.resumes and result.prompt_tokens == again.prompt_tokens == alone.prompt_tokens
        for each in zip(result.completions, again.completions, alone.completions, strict=True):
            assert len({tuple(completion.token_ids.tolist()) for completion in each}) == 1


def test_a_member_of_a_group_that_had_not_begun_is_drawn_as_in_the_group(client: RolloutClient) -> None:
    fields = {"max_tokens": 40, "temperature": 60.0, "stop": {"ignore_eos": True}}
    group = client.generate(token_ids("7:"), n=3, seed=9, **fields)
    assert len({tuple(member.token_ids.tolist()) for member in group.completions}) == 3
    for member in group.completions:
        seed = completion_seed(9, member.index)
        alone = client.generate(token_ids("7:"), continue_from={"token_ids": [], "seed": seed}, **fields)
        assert_same(alone.completions[0], member)


@pytest.mark.nightly
def test_a_trainer_that_is_killed_twice_gets_everything_from_its_journal(
    dice: Path, mortal: Any, tmp_path: Path
) -> None:
    worker = mortal(dice)
    worker.wait_ready()
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        wanted = as_arrays(client.generate_many(REQUESTS, **COMMON))

    def train(kill_at: int) -> int:
        script = [sys.executable, "-m", "tests.support.worker.journal_trainer", worker.endpoint]
        arguments = [tmp_path / "journal", tmp_path / "out.npz", str(kill_at)]
        return subprocess.run([*script, *arguments], env=subprocess_environment(), timeout=100).returncode

    assert train(120) == -9
    torn = (tmp_path / "journal").stat().st_size
    worker.restart()  # and its worker, too
    assert train(90) == -9
    assert (tmp_path / "journal").stat().st_size > torn and not (tmp_path / "out.npz").exists()
    assert train(0) == 0
    with np.load(tmp_path / "out.npz") as got:
        assert sorted(got) == sorted(wanted)
        for name, values in wanted.items():
            if name.endswith("versions"):
                assert got[name][:, 1].sum() == values[:, 1].sum() and len(got[name]) == 2
            elif name.endswith("token_ids"):
                np.testing.assert_array_equal(got[name], values)
            else:
                np.testing.assert_allclose(got[name], values, atol=1e-3)
    worker.process.kill()
    with RolloutClient(worker.endpoint, journal=tmp_path / "journal", timeout_s=10.0) as client:
        assert client.journaled() == {request["request_id"]: True for request in REQUESTS}
        again = as_arrays(client.generate_many(REQUESTS, **COMMON))
        np.testing.assert_array_equal(again["1.2.token_ids"], wanted["1.2.token_ids"])
