"""A real worker whose weights are overwritten in place: while completions run, and when the publisher dies half-way."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.worker.harness import check, hooked, kill_publisher_half_way, launch, tensors, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import Unavailable


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("in_place") / "log"
    with launch(log=log, apply="in_place", idle_s=15.0, env=hooked("quiet_loop")) as worker:
        yield worker


@pytest.fixture(scope="module")
def steps() -> dict[int, int]:
    """What each version of the worker's weights counts in; a test that publishes to it writes it down."""
    return {0: 1}


def test_completions_change_step_where_their_versions_say(in_place: WorkerProcess, steps: dict[int, int]) -> None:
    old = max(steps)
    steps |= {old + 1: 2, old + 2: 1, old + 3: 2}
    with RolloutClient(in_place.endpoint, timeout_s=60) as client:
        with client.generate("17:", n=3, max_tokens=30_000, stream="tokens", stream_every=8) as stream:
            next(stream)
            for version, transport in enumerate(("shm", "zmq", "nccl"), old + 1):
                with WeightPublisher(in_place.endpoint, transport=transport, bucket_bytes=1 << 14) as publisher:
                    (report,) = publisher.publish(tensors(steps[version]), version).applied(60)
                    assert report.transport == transport and 0 < report.pause_s < report.seconds
                while next(stream).part.versions[-1][0] != version:
                    pass
            stream.cancel()
            for completion in stream.wait().completions:
                assert [version for version, _ in completion.versions] == [old, old + 1, old + 2, old + 3]
                check("17:", completion, steps)


def test_tokens_name_their_version_over_updates_that_send_changes(
    in_place: WorkerProcess, steps: dict[int, int]
) -> None:
    old = max(steps)
    steps |= {old + 1: 2, old + 2: 1, old + 3: 2}
    with (
        WeightPublisher(in_place.endpoint, transport="zmq", deltas="host") as publisher,
        RolloutClient(in_place.endpoint, timeout_s=60) as client,
        client.generate("17:", n=3, max_tokens=30_000, stream="tokens", stream_every=8) as stream,
    ):
        next(stream)
        for version in range(old + 1, old + 4):
            (report,) = publisher.publish(tensors(steps[version]), version).applied(60)
            assert (report.sent_nbytes < report.nbytes) == (version > old + 1)
            while next(stream).part.versions[-1][0] != version:
                pass
        stream.cancel()
        for completion in stream.wait().completions:
            assert [version for version, _ in completion.versions] == [old, old + 1, old + 2, old + 3]
            check("17:", completion, steps)


def test_an_update_wakes_a_loop_that_has_no_work(in_place: WorkerProcess, steps: dict[int, int]) -> None:
    """By itself the loop here would look ten minutes later."""
    old = max(steps)
    steps[old + 1] = 3 - steps[old]
    with WeightPublisher(in_place.endpoint) as publisher, RolloutClient(in_place.endpoint, timeout_s=60) as client:
        publisher.publish(tensors(steps[old + 1]), old + 1).applied(60)
        (completion,) = client.generate("17:", max_tokens=20).completions
        assert [version for version, _ in completion.versions] == [old + 1]
        check("17:", completion, steps)


@pytest.mark.nightly
def test_a_stale_worker_says_why_keeps_its_rows_and_is_cured_by_a_whole_update(
    in_place: WorkerProcess, steps: dict[int, int]
) -> None:
    half = max(steps) + 1
    cured, next_one = half + 1, half + 2
    steps |= {cured: 1, next_one: 2}
    client, other = (RolloutClient(in_place.endpoint, timeout_s=60) for _ in range(2))  # each belongs to a thread
    with client, other, ThreadPoolExecutor() as pool:
        with client.generate("17:", max_tokens=30_000, stream="tokens", stream_every=8) as stream:
            next(stream)
            kill_publisher_half_way(in_place.endpoint, half)
            status = until(lambda: (found := client.status())["state"] == "stale" and found, "a stale worker")
            assert f"version {half}" in status["problems"][0] and status["rows"]["running"] == 1
            with pytest.raises(
                Unavailable, match=f"version {half} of the weights was written in place, in part.*Publish"
            ):
                client.generate("17:", max_tokens=5)
            with WeightPublisher(in_place.endpoint) as publisher:
                publisher.publish(tensors(1), cured).applied(60)
                status = client.status()
                assert (status["state"], status["problems"]) == ("serving", [])
                waiting = pool.submit(other.generate, "17:", max_tokens=20, min_version=next_one)
                while next(stream).part.versions[-1][0] != cured:
                    pass
                until(lambda: client.status()["queue"]["waiting"] == 1, "the request that waits for the next version")
                assert not waiting.done()
                publisher.publish(tensors(2), next_one).applied(60)
            (completion,) = waiting.result(60).completions
            assert [version for version, _ in completion.versions] == [next_one]
            check("17:", completion, steps)
            (late,) = client.generate("17:", max_tokens=20, min_version=next_one + 1, deadline_s=0.05).completions
            assert late.finish_reason == "deadline" and len(late.token_ids) == 0
            stream.cancel()
            (completion,) = stream.wait().completions
        check("17:", completion, steps)
