"""A real worker that sleeps between a trainer's steps: clients that wait, updates before and after, both levels."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.worker.harness import check, facts, launch, tensors, text_of, until
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import BadRequest, Unavailable


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with launch(log=tmp_path_factory.mktemp("sleeper") / "log", sleep=True, max_rows=4, host_kv_gib=0.1) as worker:
        yield worker


@pytest.fixture(scope="module")
def steps() -> dict[int, int]:
    """What each version of the sleeper's weights counts in; a test that publishes to it writes it down."""
    return {0: 1}


@pytest.fixture
def client(sleeper: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(sleeper.endpoint, timeout_s=60) as client:
        yield client
        assert client.status()["state"] == "serving"
        until(lambda: client.status()["pages"]["used"] == 0, "the pages to be free")


def test_completions_go_on_after_the_wake_and_requests_wait_for_it(
    client: RolloutClient, steps: dict[int, int]
) -> None:
    streams = [client.generate("17:", n=3, max_tokens=30_000, stream="tokens", stream_every=8) for _ in range(2)]
    next(streams[0])
    (told,) = client.sleep()
    assert told["level"] == 1 and told["seconds"] > 0 and told["parked"] >= 1
    status = client.status()
    assert (status["state"], status["sleep"]["level"], status["sleep"]["requests"]) == ("asleep", 1, "wait")
    until(lambda: (found := client.status())["rows"]["running"] == 0 and found["queue"]["waiting"] == 6, "the snapshot")
    late = client.generate("40:", max_tokens=20, stream="completions")
    client.ping()
    assert client.sleep()[0]["level"] == 1
    (woken,) = client.wake()
    assert woken["level"] == 1 and woken["bytes"] > 0 and client.wake()[0]["level"] == 0
    for stream in streams:  # four rows for six completions: the second stream's last ones wait
        had = {part.index: len(part) for part in stream.partials()}
        while len(parts := stream.partials()) < 3 or any(len(part) < had.get(part.index, 0) + 50 for part in parts):
            next(stream)
        stream.cancel()
        completions = stream.wait().completions
        assert len(completions) == 3
        for completion in completions:
            assert completion.finish_reason == "cancelled" and not completion.recomputed
            check("17:", completion, steps)
    assert text_of(late.wait().completions[0].token_ids) == " 41 42 43 44 45 46 47"[:20]


def test_requests_are_refused_and_completions_handed_back_where_that_is_wanted(
    client: RolloutClient, steps: dict[int, int]
) -> None:
    stream = client.generate("17:", max_tokens=30_000, stream="tokens", stream_every=8)
    next(stream)
    client.sleep(mode="abort", requests="refuse")
    (completion,) = stream.wait().completions
    assert completion.finish_reason == "cancelled" and 8 <= len(completion) < 30_000
    with pytest.raises(Unavailable, match="asleep"):
        client.generate("17:", max_tokens=4)
    client.wake()
    goes_on = client.generate("17:", max_tokens=len(completion) + 30, continue_from=completion)
    check("17:", goes_on.completions[0], steps)


def test_a_trainers_rounds_at_both_levels(client: RolloutClient, sleeper: WorkerProcess, steps: dict[int, int]) -> None:
    first, second = max(steps) + 1, max(steps) + 2
    steps |= {first: 2, second: 1}
    with WeightPublisher(sleeper.endpoint, bucket_bytes=1 << 14) as publisher, ThreadPoolExecutor() as pool:
        stream = client.generate("17:", max_tokens=30_000, stream="tokens", stream_every=8)
        next(stream)
        client.sleep()
        with pytest.raises(Unavailable, match="asleep.*wake it"):
            publisher.publish(tensors(2), first).applied(60)
        client.wake()
        publisher.publish(tensors(2), first).applied(60)
        while next(stream).part.versions[-1][0] != first:
            pass
        client.sleep(level=2)
        waiting = pool.submit(client_of(sleeper), "90:")
        until(lambda: client.status()["queue"]["waiting"] == 2, "the request that waits")
        assert client.wake()[0]["level"] == 2
        status = client.status()
        assert status["state"] == "stale" and status["problems"] == [], "that is as somebody wanted it"
        with pytest.raises(Unavailable, match="dropped in a sleep of level 2: publish"):
            client.generate("17:", max_tokens=4)
        publisher.publish(tensors(1), second).applied(60)
        check("90:", waiting.result(60), {second: 1})
        while next(stream).part.versions[-1][0] != second:
            pass
        stream.cancel()
        check("17:", stream.wait().completions[0], steps)


def client_of(worker: WorkerProcess):
    def generate(prompt: str):
        with RolloutClient(worker.endpoint, timeout_s=60) as other:
            return other.generate(prompt, max_tokens=20).completions[0]

    return generate


def test_the_asyncio_client_has_both(sleeper: WorkerProcess, client: RolloutClient) -> None:
    async def rounds() -> list[int]:
        async with AsyncRolloutClient(sleeper.endpoint, timeout_s=60) as other:
            (slept,), (woken,) = await other.sleep(mode="keep", requests="wait"), await other.wake()
            return [slept["level"], woken["level"]]

    assert asyncio.run(rounds()) == [1, 1]


def test_a_worker_that_was_not_started_for_it_says_so(worker: WorkerProcess) -> None:
    with RolloutClient(worker.endpoint, timeout_s=60) as other:
        for ask in (other.sleep, other.wake):
            with pytest.raises(BadRequest, match=r"engine\.sleep"):
                ask()


@pytest.mark.nightly
def test_a_shutdown_during_a_sleep_returns_the_tokens_so_far(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launch(log=log, sleep=True, max_rows=4, kv_pages=8192) as worker:
        with RolloutClient(worker.endpoint, timeout_s=60) as other:
            stream = other.generate("17:", max_tokens=30_000, stream="tokens", stream_every=8)
            next(stream)
            other.sleep()
            other.shutdown("drain")
            (completion,) = stream.wait().completions
            assert completion.finish_reason == "cancelled" and "the worker ended" in completion.error
            check("17:", completion, {0: 1})
        until(lambda: worker.returncode is not None, "the end of the worker")
        assert worker.returncode == 0
    assert facts(log)[-1]["event"] == "ended"
