"""A publisher that is killed in an update of a tensor group: all ranks take the update, or none; the next one is taken.

Ranks compare their tokens at each step, so ranks with different weights end the worker.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.worker.harness import (
    ONES,
    TWOS,
    assert_idle,
    check,
    kill_publisher_half_way,
    subprocess_environment,
    tensors,
    until,
)
from tests.support.worker.lost_ranks import LONG, PROMPTS, Points, read, streams_of
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher

PUBLISHER = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from trainer_bridge.publish.publisher import WeightPublisher

endpoint, model, version, transport, folder = sys.argv[1:]
publisher = WeightPublisher(endpoint, transport=transport, folder=folder, bucket_bytes=4096)
publisher.publish(load_file(Path(model) / "model.safetensors"), int(version)).applied(600)
"""
pytestmark = pytest.mark.nightly  # with threads in the place of followers: tests/bridge/receiver/test_tensor_group.py
#: Where a follower stands when the publisher is killed, and what the worker then says of the update.
PHASES = {
    "piece": "receiving",  # all is sent and committed; a follower has not taken it
    "prepare": "receiving",  # all is verified; a follower has not planned its copies
    "decode": "ready",  # all ranks are prepared; the step before the swap goes on
}


@contextlib.contextmanager
def publisher_of(endpoint: str, step: int, version: int, transport: str, folder: Path) -> Iterator[subprocess.Popen]:
    """A process that publishes the weights that count in `step`."""
    model = {1: ONES, 2: TWOS}[step]
    arguments = [endpoint, str(model), str(version), transport, str(folder)]
    with subprocess.Popen([sys.executable, "-c", PUBLISHER, *arguments], env=subprocess_environment()) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("transport", ["shm", "zmq", "disk"])
def test_a_publisher_that_is_killed_in_any_phase_leaves_all_ranks_with_the_same_weights(
    start_ranks: Callable[..., WorkerProcess], points: Points, tmp_path: Path, transport: str
) -> None:
    worker = start_ranks(env=points.environment, check_ranks=True, rank_stall_s=120, kv_on_swap="keep")
    counts, version = {0: 1}, 0
    with RolloutClient(worker.endpoint, timeout_s=600.0) as client, WeightPublisher(worker.endpoint) as watcher:

        def publish_whole() -> None:
            nonlocal version
            version += 1
            counts[version] = 1 + version % 2
            watcher.publish(tensors(counts[version]), version).applied(60)
            assert watcher.status()[0]["version"] == version

        streams = streams_of(client)
        for phase, state in PHASES.items():
            version += 1
            counts[version] = 1 + version % 2
            points.order(phase)
            with publisher_of(worker.endpoint, counts[version], version, transport, tmp_path) as publisher:
                points.reached(phase)
                until(lambda s=state: watcher.status()[0]["state"] == s, f"the update to be {state}")
                if phase == "piece":
                    until(lambda: watcher.status()[0]["incoming"]["committed"], "the commit")
                publisher.kill()
                publisher.wait(60)
            assert watcher.status()[0]["version"] == version - 1
            points.leave(phase)
            until(lambda v=version: watcher.status()[0]["version"] == v, f"the update of phase {phase}")
            read(streams[0], 50)
            publish_whole()
        kill_publisher_half_way(worker.endpoint, version + 1)
        read(streams[0], 50)
        assert watcher.status()[0]["version"] == version
        publish_whole()  # it takes the place of the one that does not come
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            read(stream, 50)
            stream.cancel()
            (completion,) = stream.wait().completions
            check(prompt, completion, counts)
            assert completion.versions[-1][0] == version
        (completion,) = client.generate("5:", **LONG | {"max_tokens": 60}).wait().completions
        check("5:", completion, counts)
    assert_idle(worker)


def test_an_update_whose_publisher_was_killed_half_way_is_dropped_in_time(
    start_ranks: Callable[..., WorkerProcess],
) -> None:
    worker = start_ranks(check_ranks=True, idle_s=3, kv_on_swap="keep")
    with RolloutClient(worker.endpoint, timeout_s=600.0) as client, WeightPublisher(worker.endpoint) as watcher:
        streams = streams_of(client)
        kill_publisher_half_way(worker.endpoint, 1)
        until(lambda: watcher.status()[0]["state"] == "idle", "the end of the update")
        assert watcher.status()[0]["version"] == 0
        watcher.publish(tensors(2), 1).applied(60)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            read(stream, 50)
            stream.cancel()
            (completion,) = stream.wait().completions
            check(prompt, completion, {0: 1, 1: 2})
    assert_idle(worker)
