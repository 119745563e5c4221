"""Tensors that an update may have or lack: some keep their values, some are of no use to the worker."""

import pytest
import torch

from rollout.weights.parameter_map import UpdateNames
from tests.support.bridge.harness import Worker, new_tensors, serves
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected

NAMES = UpdateNames(kept_if_absent=frozenset({"norm.weight"}), unused=("mtp.", "visual."))
EXTRA = {"mtp.0.weight": torch.ones(13, 5), "visual.patch.weight": torch.ones(40), "mtp.bias": torch.ones(1)}


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_tensor_that_is_left_out_keeps_its_value(apply: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Worker(apply=apply, names=NAMES) as worker, WeightPublisher(worker.endpoint, bucket_bytes=64) as publisher:
        first = new_tensors(worker.model, 1)
        publisher.publish(first, 1).applied(20)
        for version in (2, 3):
            later = new_tensors(worker.model, version)
            del later["norm.weight"]
            publisher.publish(later, version).applied(20)
            assert serves(worker.model, later | {"norm.weight": first["norm.weight"]})
    said = [record.getMessage() for record in caplog.records if "norm.weight" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_tensors_of_no_use_are_received_and_said_once(apply: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Worker(apply=apply, names=NAMES) as worker, WeightPublisher(worker.endpoint, bucket_bytes=64) as publisher:
        for version in (1, 2):
            tensors = new_tensors(worker.model, version)
            mixed = dict(sorted((tensors | EXTRA).items()))
            publisher.publish(mixed, version).applied(20)
            assert serves(worker.model, tensors) and worker.receiver.version == version
    assert len([record for record in caplog.records if "visual.patch.weight" in record.getMessage()]) == 1


def test_other_tensors_may_neither_be_left_out_nor_added() -> None:
    with Worker(names=NAMES) as worker, WeightPublisher(worker.endpoint) as publisher:
        tensors = new_tensors(worker.model, 1)
        with pytest.raises(WeightsRejected, match="missing tensors: k.weight"):
            publisher.publish({name: tensor for name, tensor in tensors.items() if name != "k.weight"}, 1).applied(20)
        with pytest.raises(WeightsRejected, match="unknown tensors: audio.weight"):
            publisher.publish(tensors | {"audio.weight": torch.zeros(2)}, 1).applied(20)


def test_weights_that_were_dropped_need_every_tensor() -> None:
    with Worker(names=NAMES) as worker, WeightPublisher(worker.endpoint) as publisher:
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 1).applied(20)
        worker.engine_gate.lose_weights("dropped")
        with pytest.raises(WeightsRejected, match="missing tensors: norm.weight"):
            publisher.publish({n: t for n, t in tensors.items() if n != "norm.weight"}, 2).applied(20)
        publisher.publish(tensors, 2).applied(20)
