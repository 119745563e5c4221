"""A worker whose checkpoint has a layer for multi-token prediction drafts with it, and updates renew it."""

import json

import pytest
from safetensors.torch import load_file

from tests.support.models.mtp_layers import make_predicting
from tests.support.worker.harness import launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerFailed, WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher

PATIENCE_S = 60.0


def generate(worker: WorkerProcess) -> list[list[int]]:
    with RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as client:
        result = client.generate([3, 5, 7, 9], n=3, max_tokens=60, sampling={"temperature": 1.0, "seed": 4})
    return [done.token_ids.tolist() for done in result.completions]


@pytest.mark.nightly
def test_heads_need_no_second_checkpoint(tmp_path) -> None:
    """The same tokens as without drafts, before and after updates with its tensors and without; also by two ranks."""
    first, second = tmp_path / "first", tmp_path / "second"
    found = make_predicting("Glm4Moe", first)
    make_predicting("Glm4Moe", second, seed=1)
    updates = [load_file(second / "model.safetensors")]
    updates.append({name: t for name, t in updates[0].items() if not name.startswith(found.prefix)})
    told = []
    for speculation, ranks in (("off", 1), ("heads", 1), ("heads", 2)):
        metrics = tmp_path / f"{speculation}-{ranks}.jsonl"
        flags = {"jsonl": metrics, "interval_s": 0.1, "speculation": speculation, "max_rows": 4, "dtype": "float32"}
        flags |= {"device": "cpu", "tensor_parallel": ranks, "check_ranks": ranks > 1}
        with launch(first, log=tmp_path / f"{speculation}-{ranks}.log", **flags) as worker:
            told.append([generate(worker)])
            with WeightPublisher(worker.endpoint) as publisher:
                for version, tensors in enumerate(updates, 1):
                    publisher.publish(tensors, version=version).applied(PATIENCE_S)
                    told[-1].append(generate(worker))
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert (records[-1]["speculation/drafted"] > 100) == (speculation == "heads")
    assert told[0] == told[1] == told[2] and told[0][0] != told[0][1] == told[0][2]


@pytest.mark.nightly
def test_a_model_without_such_layers_says_what_to_set(tmp_path) -> None:
    with pytest.raises(WorkerFailed, match=r"layers for multi-token prediction(.|\n)*speculation_model"):
        launch(log=tmp_path / "worker.log", speculation="heads")
