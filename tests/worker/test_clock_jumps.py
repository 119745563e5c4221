"""A worker whose wall clock jumps by days, in both directions: deadlines, leases and times are as if it did not."""

from collections.abc import Iterator

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import assert_idle, check, hooked, launch, tensors, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher

DAY_S = 86_400


@pytest.fixture(scope="module")
def jumpy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("clock") / "log"
    flags = {"max_rows": 4, "max_context_tokens": 32_768, "interval_s": 0.1}
    with launch(log=log, env=hooked("jumping_clock"), **flags) as worker:
        yield worker
        assert_idle(worker)


@pytest.fixture
def client(jumpy: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(jumpy.endpoint, timeout_s=PATIENCE_S) as client:
        yield client


def test_a_deadline_ends_its_request_and_no_other_one(client: RolloutClient) -> None:
    long = client.generate("17:", max_tokens=600, deadline_s=DAY_S / 2, stream="completions")
    short = client.generate("17:", max_tokens=30_000, deadline_s=0.5)
    result = long.wait()
    assert short.completions[0].finish_reason == "deadline" and len(short.completions[0]) < 30_000
    assert result.completions[0].finish_reason == "length"
    check("17:", result.completions[0], {0: 1, 1: 1})
    for timing in (short.timing, result.timing):
        assert all(0 <= seconds < PATIENCE_S for seconds in (timing.queued_s, timing.prefill_s, timing.total_s))


def test_a_lease_ends_after_its_time(client: RolloutClient) -> None:
    def holding() -> int:
        return client.status()["sessions"]["holding"]

    with client.session(lease_s=3_600) as kept, client.session(lease_s=0.2) as left:
        kept.generate("17:", max_tokens=40)
        left.generate("23:", max_tokens=40)
        kept.generate("17: 18", max_tokens=4)
        # A status may be from before the last session's end of a turn, so this may see 1, 2 and 1.
        until(lambda: holding() == 1, "the end of the short lease")
    until(lambda: holding() == 0, "the end of the session")


def test_the_age_of_an_update_and_of_steps_is_that_of_a_clock_that_does_not_jump(
    jumpy: WorkerProcess, client: RolloutClient
) -> None:
    with WeightPublisher(jumpy.endpoint) as publisher:
        publisher.publish(tensors(1), 1).applied(PATIENCE_S)
    client.generate("17:", max_tokens=20)
    for _ in range(4):
        status = client.status()
        assert 0 <= status["weights"]["last"]["age_s"] < PATIENCE_S
        assert all(0 <= swap["age_s"] < PATIENCE_S for swap in status["swaps"])
        assert status["state"] == "serving" and status["problems"] == []
