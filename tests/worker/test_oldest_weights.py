"""A worker with a `min_version` sends no token of older weights, neither at its start nor after a restart."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.worker.harness import ONES, TWOS, check, launch, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.publish.publisher import WeightPublisher

PROMPT = "17:"


@pytest.mark.nightly
def test_no_request_begins_under_weights_older_than_min_version(tmp_path: Path) -> None:
    with launch(log=tmp_path / "first.log", min_version=1) as first:
        endpoint = first.endpoint
        with (
            RolloutClient(endpoint, timeout_s=60.0) as client,
            WeightPublisher(endpoint, keep=True) as publisher,
        ):
            weights = client.status()["weights"]
            assert (weights["version"], weights["min_version"]) == (0, 1)
            early = [client.generate(PROMPT, max_tokens=20, stream="tokens", min_version=asked) for asked in (None, 0)]
            late = client.generate(PROMPT, max_tokens=20, stream="tokens", min_version=2)
            hurried = client.generate(PROMPT, max_tokens=20, deadline_s=0.2).completions[0]
            assert (hurried.finish_reason, len(hurried)) == ("deadline", 0)
            until(lambda: client.status()["queue"]["waiting"] == 3, "the three that are left")

            publisher.publish(load_file(TWOS / "model.safetensors"), 1).applied(60)
            for stream in early:
                (completion,) = stream.wait().completions
                assert completion.versions == [(1, 20)]
                check(PROMPT, completion, {1: 2})
            until(lambda: client.status()["queue"]["waiting"] == 1, "the one whose own min_version is higher")
            late.cancel()

            first.kill()
            until(lambda: first.returncode is not None, "the end")
            with launch(log=tmp_path / "second.log", min_version=1, bind=endpoint):
                (completion,) = client.generate(PROMPT, max_tokens=20).completions
                assert completion.versions == [(1, 20)], "the publisher brought what it keeps"
                check(PROMPT, completion, {1: 2})


@pytest.mark.nightly
def test_a_checkpoint_that_is_new_enough_is_served_at_once(tmp_path: Path) -> None:
    with (
        launch(ONES, log=tmp_path / "worker.log", min_version=7, initial_version=7) as worker,
        RolloutClient(worker.endpoint, timeout_s=60.0) as client,
    ):
        (completion,) = client.generate(PROMPT, max_tokens=20).completions
        assert completion.versions == [(7, 20)]
