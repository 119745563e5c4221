"""Sleeps and wakes of several ranks in odd orders, amid updates: nothing hangs, and every token is the right one."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.worker.harness import assert_idle, check, is_gone, tensors, until
from tests.support.worker.lost_ranks import (
    FAULT,
    KILL_AND_STOP,
    KNOWN_S,
    PROMPTS,
    Points,
    assert_handed_back,
    ended,
    followers_of,
    read,
    streams_of,
)
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError, RolloutTimeout, Unavailable

pytestmark = pytest.mark.nightly
StartRanks = Callable[..., WorkerProcess]
FLAGS: dict[str, Any] = {"sleep": True, "host_kv_gib": 0.05, "check_ranks": True, "kv_on_swap": "keep"}


def in_thread(ask: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Ask in a thread; what it got, or the error."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(ask())
        except RolloutError as error:
            told.append(error)

    asks = threading.Thread(target=run, daemon=True)
    asks.start()
    return asks, told


def test_sleeps_and_wakes_in_odd_orders_amid_updates(start_ranks: StartRanks, points: Points) -> None:
    worker = start_ranks(env=points.environment, rank_stall_s=120, **FLAGS)
    counts = {version: 1 + version % 2 for version in range(8)}
    with (
        RolloutClient(worker.endpoint, timeout_s=600.0) as client,
        RolloutClient(worker.endpoint, timeout_s=600.0) as other,
        WeightPublisher(worker.endpoint) as publisher,
    ):

        def state() -> str:
            return client.status()["state"]

        streams = streams_of(client)
        (woken,) = client.wake()  # it is awake
        assert woken["level"] == 0

        # a sleep waits for an update that is under way, and no other one begins
        points.order("piece")
        first = publisher.publish(tensors(counts[1]), 1)
        points.reached("piece")
        sleeps, slept = in_thread(other.sleep)
        until(lambda: client.status()["state"] == "asleep", "the order to sleep")
        with WeightPublisher(worker.endpoint) as late:
            begun = late.publish(tensors(counts[2]), 2)
            sleeps.join(0.5)
            assert not slept
            points.leave("piece")
            first.applied(60)
            sleeps.join(60)
            assert slept[0][0]["level"] == 1
            with pytest.raises(RolloutError, match="asleep"):
                begun.applied(60)

        # again, deeper, and lighter
        assert [told["level"] for (told,) in (client.sleep(), client.sleep(level=2), client.sleep())] == [1, 2, 2]
        with WeightPublisher(worker.endpoint) as late, pytest.raises(RolloutError, match="asleep"):
            late.publish(tensors(counts[3]), 3).applied(60)
        assert client.wake()[0]["level"] == 2 and client.wake()[0]["level"] == 0
        assert state() == "stale"

        # asleep without weights: what was dropped is not there after a sleep of level 1 either
        client.sleep()
        client.wake()
        assert state() == "stale"
        publisher.publish(tensors(counts[4]), 4).applied(60)
        until(lambda: state() == "serving", "the weights")
        for stream in streams:
            read(stream, 50)

        # orders that overtake each other are carried out in turn
        asked = [in_thread(order) for order in (client.sleep, other.wake)]
        for asks, told in asked:
            asks.join(60)
            assert told and not isinstance(told[0], RolloutError)
        client.wake()
        publisher.publish(tensors(counts[5]), 5).applied(60)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            read(stream, 50)
            stream.cancel()
            (completion,) = stream.wait().completions
            check(prompt, completion, counts)
            assert [version for version, _ in completion.versions] == [0, 4, 5]  # none was drawn between 1 and 4
    assert_idle(worker)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("when", ["asleep", "waking"])
@pytest.mark.parametrize(("number", "said"), KILL_AND_STOP)
def test_a_rank_that_is_lost_asleep_gives_all_that_wait_an_answer(
    start_ranks: StartRanks, points: Points, level: int, when: str, number: signal.Signals, said: str
) -> None:
    worker = start_ranks(env=points.environment, **FLAGS)
    (follower,) = followers_of(worker.pid)
    with (
        RolloutClient(worker.endpoint, timeout_s=60.0) as client,
        RolloutClient(worker.endpoint, timeout_s=60.0) as other,
        RolloutClient(worker.endpoint, timeout_s=60.0) as third,
    ):
        streams = streams_of(client)
        client.sleep(level=level)
        late = in_thread(lambda: third.generate("980:", max_tokens=60).completions[0])  # it waits for the wake
        until(lambda: client.status()["queue"]["waiting"] == len(PROMPTS) + 1, "the request")
        asked = [late]
        if when == "waking":
            points.order("memory")
            asked.append(in_thread(other.wake))
            points.reached("memory")
        os.kill(follower, number)
        if when == "asleep":
            asked.append(in_thread(other.wake))
        began_s = time.monotonic()
        assert_handed_back(streams, said)
        for asks, told in asked:
            asks.join(KNOWN_S)
            assert told and not isinstance(told[0], RolloutTimeout), told
        assert time.monotonic() - began_s < KNOWN_S
        (answer,) = late[1]
        assert isinstance(answer, Unavailable) or answer.finish_reason == "error"
    assert ended(worker) == FAULT and is_gone(follower)


@pytest.mark.parametrize("seed", range(4))
def test_random_orders_to_sleep_and_wake_amid_updates(start_ranks: StartRanks, seed: int) -> None:
    """Two clients and a publisher do not know of each other. In the end the worker serves the last update."""
    worker, draws = start_ranks(tensor_parallel=2 + seed % 2 * 2, **FLAGS), random.Random(seed)
    counts = {version: 1 + version % 2 for version in range(200)}
    with (
        RolloutClient(worker.endpoint, timeout_s=600.0) as client,
        RolloutClient(worker.endpoint, timeout_s=600.0) as first,
        RolloutClient(worker.endpoint, timeout_s=600.0) as second,
        WeightPublisher(worker.endpoint, bucket_bytes=4096) as publisher,
    ):
        streams, version = streams_of(client), 0
        for _ in range(25):
            version += 1
            asked = []
            for who in (first, second):
                level = draws.choice([1, 1, 1, 2])
                asked.append(in_thread(who.wake if draws.random() < 0.5 else lambda w=who, n=level: w.sleep(level=n)))
            update = publisher.publish(tensors(counts[version]), version) if draws.random() < 0.6 else None
            for asks, told in asked:
                asks.join(60)
                assert told and not isinstance(told[0], RolloutError), told
            if update is not None:
                try:
                    update.applied(60)
                except RolloutTimeout:
                    raise
                except RolloutError as error:
                    assert "asleep" in str(error), error
        first.wake()
        publisher.publish(tensors(counts[version + 1]), version + 1).applied(60)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            read(stream, 50)
            stream.cancel()
            (completion,) = stream.wait().completions
            check(prompt, completion, counts)
            assert completion.versions[-1][0] == version + 1
    assert_idle(worker)
