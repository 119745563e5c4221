"""A head that is trained here, from its checkpoint to a worker and over the bridge: how often it is right shows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.check import draft_model
from tests.support.worker.harness import ONES, launch, tensors
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected

UPDATES, TOKENS = 90, 150  # a few seconds each; more updates are right more often


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a random head and of one for the model that counts in ones."""
    folder, threads = tmp_path_factory.mktemp("heads"), torch.get_num_threads()
    torch.set_num_threads(1)
    found = {
        name: draft_model.train_head(folder / name, "ones", updates, quiet=True)
        for name, updates in (("random", 0), ("ones", UPDATES))
    }
    torch.set_num_threads(threads)
    return found


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def worker(heads: dict[str, Path], tmp_path: Path, metrics: Path) -> Iterator[WorkerProcess]:
    """A worker with the random head."""
    flags = {**draft_model.SETTINGS, "speculation_model": heads["random"], "jsonl": metrics}
    with launch(ONES, log=tmp_path / "worker.log", **flags) as worker:
        yield worker


@pytest.mark.nightly
def test_acceptance_follows_the_head_of_an_update(heads, worker, metrics) -> None:
    """No token is ever wrong, and updates without a head keep it: it is stale for the second, and fits the third."""
    changes = draft_model.Change(1, "ones"), draft_model.Change(2, None), draft_model.Change(1, None)
    phases = draft_model.observe(worker, metrics, heads, TOKENS, changes)
    assert draft_model.follows(phases, least_pct=60), phases
    assert all(phase.drafted > 100 for phase in phases)
    ages = draft_model.Observer(worker, metrics, TOKENS).record()
    assert ages["speculation/accepted_pct/age_1"] > 0, "of the second update"
    assert ages["speculation/accepted_pct/age_2_to_4"] > 60, "of the third"
    wrong = tensors(1) | {"draft.fc.weight": torch.zeros(3, 5)}
    with WeightPublisher(worker.endpoint) as publisher, pytest.raises(WeightsRejected, match=r"draft\.fc\.weight"):
        publisher.publish(wrong, version=9).applied(60)
