"""TRL's weight transfer when an update does not reach every worker, or one loses what it had."""

import pytest

from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from trainer_bridge.integrations.trl import WeightTransfer
from trainer_bridge.wire.errors import ConnectionLost, RolloutTimeout


def test_an_attempt_that_a_worker_missed_does_not_stand_in_the_way_of_the_next() -> None:
    with Worker() as one, Worker(version=4) as other:
        weights = WeightTransfer([one.endpoint, other.endpoint], transport="zmq", begin_s=6.0)
        weights.init_weight_transfer()
        weights.send_weights(iter(new_tensors(one.model, 1).items()))
        other.close()
        with pytest.raises((ConnectionLost, RolloutTimeout)):
            weights.send_weights(iter(new_tensors(one.model, 2).items()))
        with Worker(version=5, port=other.port) as again:
            weights.send_weights(iter((tensors := new_tensors(one.model, 3)).items()))
            assert serves(one.model, tensors) and serves(again.model, tensors)
            assert one.receiver.version == again.receiver.version == 7
        assert [weights.trainer_version(version) for version in (3, 4, 5, 6, 7)] == [-1, 0, 1, 2, 2]
        weights.destroy()


def test_a_worker_that_is_started_again_gets_the_last_update_though_the_trainer_waits_for_its_samples() -> None:
    with Worker() as first:
        weights = WeightTransfer(first.endpoint)
        weights.init_weight_transfer()
        weights.send_weights(iter((tensors := new_tensors(first.model, 1)).items()))
        first.close()
        with Worker(port=first.port) as again:
            wait_for(lambda: again.receiver.version == 1, "the weights of the worker before")
            assert serves(again.model, tensors)
        weights.destroy()
