"""A head that is trained here, from its checkpoint to a worker and over the bridge: how often it is right shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts import train_draft_head
from tests.support.worker.harness import ONES, check, launch, tensors, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected

UPDATES = 90  # a few seconds; whole numbers are learnt after some hundred
PROMPTS = ("17:", "980:", "15 16 17:")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random head and of one that was trained for the model that counts in ones."""
    folder, threads = tmp_path_factory.mktemp("heads"), torch.get_num_threads()
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(ONES).eval()
    for name, updates in (("random", 0), ("trained", UPDATES)):
        head = train_draft_head.train(target, 1, updates, quiet=True)
        train_draft_head.save(head, target, folder / name)
    torch.set_num_threads(threads)
    return folder / "random", folder / "trained"


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def worker(heads: tuple[Path, Path], tmp_path: Path, metrics: Path) -> Iterator[WorkerProcess]:
    """A worker with the random head."""
    flags = {"max_rows": 8, "max_context_tokens": 2048, "jsonl": metrics, "interval_s": 0.1}
    drafts = {"speculation": "heads", "speculation_model": heads[0]}
    with launch(ONES, log=tmp_path / "worker.log", **flags, **drafts) as worker:
        yield worker


def counted(metrics: Path) -> dict[str, float]:
    """The last record, once the worker has written one that began after this call."""

    def lines() -> list[str]:
        return metrics.read_text().splitlines(keepends=True) if metrics.exists() else []

    before = len(lines())
    until(lambda: len([line for line in lines() if line.endswith("\n")]) > before + 1, "metrics")
    return json.loads([line for line in lines() if line.endswith("\n")][-1])


def accepted_pct(client: RolloutClient, metrics: Path, steps: dict[int, int]) -> float:
    """The share of drafts that were right in some completions, whose tokens are checked."""
    before = counted(metrics)
    for seed, prompt in enumerate(PROMPTS):
        result = client.generate(prompt, n=2, max_tokens=150, sampling={"temperature": 1.0, "seed": seed})
        for completion in result.completions:
            check(prompt, completion, steps)
    after = counted(metrics)
    drafted, accepted = (
        after[f"speculation/{name}"] - before[f"speculation/{name}"] for name in ("drafted", "accepted")
    )
    assert drafted > 100
    return 100 * accepted / drafted


def test_a_head_gets_better_by_an_update_and_may_be_left_out(heads, worker, metrics) -> None:
    steps = {0: 1}
    trained = {f"draft.{name}": tensor for name, tensor in load_file(heads[1] / "model.safetensors").items()}
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client, WeightPublisher(worker.endpoint) as publisher:
        random = accepted_pct(client, metrics, steps)
        assert random < 40

        publisher.publish(tensors(1) | trained, version=1).applied(60)
        steps[1] = 1
        better = accepted_pct(client, metrics, steps)
        assert better > max(65, random + 25), (random, better)

        wrong = trained | {"draft.fc.weight": torch.zeros(3, 5)}
        with pytest.raises(WeightsRejected, match=r"draft\.fc\.weight"):
            publisher.publish(tensors(2) | wrong, version=2).applied(60)

        # The other model counts in twos, and the head still guesses ones: slower, and no token is wrong.
        publisher.publish(tensors(2), version=2).applied(60)
        steps[2] = 2
        assert accepted_pct(client, metrics, steps) < better
        assert counted(metrics)["speculation/accepted_pct/age_1"] > 0

        publisher.publish(tensors(1), version=3).applied(60)
        steps[3] = 1
        assert accepted_pct(client, metrics, steps) == pytest.approx(better, abs=5), "the head was kept"
