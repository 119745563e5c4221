"""A fleet on real Ray, on a CPU: workers die, join and leave while a publisher and a client go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="make test-integrations installs Ray")

from tests.support.integrations.integration_worker import worker_environment  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402
from tests.support.worker.harness import ONES, check, is_gone, tensors, until  # noqa: E402
from trainer_bridge.client.blocking import RolloutClient  # noqa: E402
from trainer_bridge.client.launch import WorkerFailed  # noqa: E402
from trainer_bridge.integrations.ray import RayFleet  # noqa: E402
from trainer_bridge.publish.publisher import WeightPublisher  # noqa: E402

FLAGS: dict[str, Any] = {
    **{"device": "cpu", "wandb": False, "max_rows": 8, "max_context_tokens": 4096, "kv_memory_max_gib": 0.03},
    "min_version": 1,
}
LONG: dict[str, Any] = {"max_tokens": 1500, "stream": "tokens", "stream_every": 16}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def fleet(cluster: None) -> Iterator[RayFleet]:
    options = {"gpus": 0, "flags": FLAGS, "env": worker_environment(), "restart_backoff_s": 0.1}
    with RayFleet(str(ONES), 2, ready_timeout_s=PATIENCE_S, **options) as fleet:
        yield fleet


def test_a_job_goes_on_while_workers_die_join_and_leave(fleet: RayFleet) -> None:
    """Two workers, one killed, one added, one removed; versions are current after each."""
    steps: dict[int, int] = {}
    first, second = fleet.endpoints
    with (
        RolloutClient(fleet.endpoints, resume=True, timeout_s=PATIENCE_S) as client,
        WeightPublisher(fleet.endpoints, keep=True, begin_s=PATIENCE_S) as publisher,
    ):

        def publish() -> int:
            version = max(steps, default=0) + 1
            steps[version] = 1 + version % 2
            reports = publisher.publish(tensors(steps[version]), version).applied(PATIENCE_S)
            assert {report.endpoint for report in reports} == set(fleet.endpoints)
            return version

        def generate(endpoint: str) -> Any:
            (completion,) = client.generate("17:", max_tokens=30, endpoint=endpoint).completions
            check("17:", completion, steps)
            return completion

        publish()
        until(lambda: fleet.version == 1, "the fleet to see the version")

        # A worker is killed: its requests go on, and it comes back at its endpoint with current weights only.
        streams = [client.generate(f"{start}:", **LONG) for start in range(20, 24)]
        for stream in streams:
            next(stream)
        doomed = [stream for stream in streams if stream.endpoint == second]
        assert 0 < len(doomed) < len(streams)
        (pid,) = [state.pid for state in fleet.workers() if state.endpoint == second]
        os.kill(pid, signal.SIGKILL)
        for start, stream in zip(range(20, 24), streams, strict=True):
            result = stream.wait()
            assert check(f"{start}:", result.completions[0], steps).tokens == LONG["max_tokens"]
            assert bool(result.resumes) == (stream in doomed)
        until(lambda: [state.restarts for state in fleet.workers()] == [0, 1], "the restart")
        assert generate(second).versions == [(1, 30)], "it sampled from its checkpoint"
        fleet.sync(client, publisher)
        assert set(client.endpoints) == {first, second}
        assert publish() == 2

        # A worker joins: the publisher reaches it, the client uses it.
        third = fleet.add()
        fleet.sync(client, publisher)
        assert set(client.endpoints) == set(publisher.endpoints) == {first, second, third}
        assert generate(third).versions == [(2, 30)]
        assert publish() == 3
        until(lambda: client.generate("17:", max_tokens=4).endpoint == third, "the newcomer's share")

        # A worker leaves: what it has ends, the others stay.
        last = client.generate("30:", endpoint=first, **LONG)
        next(last)
        fleet.remove(first)
        fleet.sync(client, publisher)
        assert set(client.endpoints) == set(publisher.endpoints) == {second, third}
        result = last.wait()
        assert check("30:", result.completions[0], steps).tokens == LONG["max_tokens"]
        assert publish() == 4
        assert {generate(endpoint).versions[-1] for endpoint in (second, third)} == {(4, 30)}
        until(lambda: len(fleet.workers()) == 2, "the first worker's end")
        assert [state.state for state in fleet.workers()] == ["serving"] * 2


def test_an_actor_that_dies_is_replaced_and_its_worker_ends(fleet: RayFleet) -> None:
    first, second = fleet.endpoints
    with (
        RolloutClient(fleet.endpoints, resume=True, timeout_s=PATIENCE_S) as client,
        WeightPublisher(fleet.endpoints, keep=True, begin_s=PATIENCE_S) as publisher,
    ):
        publisher.publish(tensors(2), 5).applied(PATIENCE_S)
        until(lambda: fleet.version == 5, "the fleet to see the version")
        (pid,) = [state.pid for state in fleet.workers() if state.endpoint == second]
        os.kill(parent_of(pid), signal.SIGKILL)
        until(lambda: len(fleet.endpoints) == 2 and second not in fleet.endpoints, "the new actor")
        fleet.sync(client, publisher)
        (new,) = set(fleet.endpoints) - {first}
        assert set(client.endpoints) == {first, new}
        (completion,) = client.generate("17:", max_tokens=30, endpoint=new).completions
        check("17:", completion, {5: 2})
        until(lambda: is_gone(pid), "the end of the first actor's worker")


def test_what_cannot_start_or_has_no_room_is_an_error(cluster: None) -> None:
    with pytest.raises(WorkerFailed, match="no room"):
        RayFleet(str(ONES), 2, gpus=1, place_timeout_s=1.0)
    with pytest.raises(WorkerFailed, match="did not start"):
        RayFleet("/nothing/here", 1, gpus=0, flags=FLAGS, env=worker_environment(), ready_timeout_s=PATIENCE_S)
    with pytest.raises(ValueError, match="'bind'"):
        RayFleet(str(ONES), 1, flags={"bind": "tcp://127.0.0.1:7"})


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
