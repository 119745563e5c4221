"""A follower that lives and hangs is found, also while no step is ordered; one that is slow is not."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support.peft_adapters import make_adapter
from tests.support.worker.harness import ONES, check, is_gone, tensors
from tests.support.worker.lost_ranks import (
    COUNT,
    FAULT,
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
from trainer_bridge.wire.errors import RolloutError, RolloutTimeout

STALL_S = 3
StartRanks = Callable[..., WorkerProcess]
#: The lane of each point.
LANES = {
    "adapter": "adapters",
    "forget": "adapters",
    "write": "adapter_copies",
    "memory": "orders",
    "out": "kv_out",
    "back": "kv_in",
    "open": "updates",
    "piece": "updates",
    "prepare": "updates",
    "swap": "orders",
    "copy": "swap",
}
#: In a usual run.
USUAL = ("adapter",)


@pytest.fixture
def flags(tmp_path: Path, points: Points) -> dict[str, Any]:
    """What a worker needs for every order."""
    base = AutoModelForCausalLM.from_pretrained(ONES)
    for seed, name in enumerate(("one", "two")):
        make_adapter(base, tmp_path / "adapters" / name, seed, ("q_proj", "o_proj"))
    kept = {"sleep": True, "host_kv_gib": 0.05, "adapter_slots": 1, "adapter_root": str(tmp_path / "adapters")}
    return {"env": points.environment, "rank_stall_s": STALL_S, **kept}


def answer_to(ask: Callable[[], object]) -> str:
    """What a client gets that waits: an error, before its own time is over, or its completion as `error`."""
    told = list[str]()

    def run() -> None:
        try:
            result = ask()
        except RolloutTimeout:
            raise
        except RolloutError as error:
            told.append(str(error))
        else:
            told.extend(c.error or "" for c in getattr(result, "completions", []) if c.finish_reason == "error")

    asks = threading.Thread(target=run)
    asks.start()
    asks.join(KNOWN_S)
    assert not asks.is_alive() and told, "the client does not know"
    return told[0]


def assert_named(worker: WorkerProcess, point: str) -> None:
    """The log says which rank hangs, and where; an order also holds back steps, so either rule may find it first."""
    log = worker.log_path.read_text()
    lane = f"has hung: it has completed nothing in its lane {LANES[point]} "
    assert lane in log or (LANES[point] == "orders" and "no rank has completed anything" in log)


def prepared(point: str, client: RolloutClient, publisher: WeightPublisher) -> Callable[[], object]:
    """What brings an idle follower to the point."""
    if point in ("open", "piece", "prepare", "swap", "copy"):
        return lambda: publisher.publish(tensors(2), 1).applied(60)
    if point == "adapter":
        return lambda: client.load_adapter("one", "one")
    if point in ("write", "forget"):
        client.load_adapter("one", "one")
        if point == "write":
            return lambda: client.generate("17:", max_tokens=40, adapter="one")
        client.unload_adapter("one")

        def load_until_refused() -> None:  # a load looks for places, and so has old adapters forgotten
            while True:
                client.load_adapter("two", "two")
                time.sleep(0.5)

        return load_until_refused
    if point == "back":
        client.sleep()
        return client.wake  # the rows get their KV after it
    return client.sleep


@pytest.mark.nightly
@pytest.mark.parametrize("point", [pytest.param(p, marks=() if p in USUAL else pytest.mark.nightly) for p in LANES])
def test_a_follower_that_hangs_at_an_order_is_found_while_no_step_is_ordered(
    start_ranks: StartRanks, points: Points, flags: dict[str, Any], point: str
) -> None:
    worker = start_ranks(**flags)
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client, WeightPublisher(worker.endpoint) as publisher:
        streams = streams_of(client) if point in ("out", "back") else []
        ask = prepared(point, client, publisher)
        points.order(point)
        if point in ("back", "swap", "copy"):  # answered when rank 0 has done its own part
            ask()
        else:
            answer_to(ask)
        if streams:
            assert_handed_back(streams, "hung")
    assert ended(worker) == FAULT and is_gone(follower)
    assert_named(worker, point)


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["adapter", "open", "piece", "prepare"])
def test_a_follower_that_hangs_beside_steps_is_found_while_they_go_on(
    start_ranks: StartRanks, points: Points, flags: dict[str, Any], point: str
) -> None:
    worker = start_ranks(**flags)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client, WeightPublisher(worker.endpoint) as publisher:
        streams = streams_of(client)
        ask = prepared(point, client, publisher)
        points.order(point)
        answer_to(ask)
        assert_handed_back(streams, f"it has completed nothing in its lane {LANES[point]}")
    assert ended(worker) == FAULT


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["adapter", "memory", "prepare"])
def test_one_of_four_ranks_that_hangs_is_named_within_ten_seconds(
    start_ranks: StartRanks, points: Points, flags: dict[str, Any], point: str
) -> None:
    worker = start_ranks(**flags | {"tensor_parallel": 4, "rank_stall_s": 8.0})
    followers = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client, WeightPublisher(worker.endpoint) as publisher:
        ask = prepared(point, client, publisher)
        points.order(point)
        began_s = time.monotonic()
        answer_to(ask)
        known_s = time.monotonic() - began_s
    assert ended(worker) == FAULT and all(map(is_gone, followers))
    assert_named(worker, point)
    assert known_s < KNOWN_S, known_s
    print(f"{point}: known after {known_s:.1f} s")


@pytest.mark.nightly
def test_an_update_and_a_sleep_whose_parts_are_slow_take_longer_than_a_rank_may_stand_still(
    start_ranks: StartRanks, points: Points, flags: dict[str, Any]
) -> None:
    limit_s = 4  # four times as long as where cores are free
    worker = start_ranks(**flags | {"rank_stall_s": limit_s, "env": points.environment | {"SLOW_S": "0.6"}})
    with (
        RolloutClient(worker.endpoint, timeout_s=600.0) as client,
        WeightPublisher(worker.endpoint, bucket_bytes=16_384) as publisher,
    ):
        streams = streams_of(client)
        points.order("slow")
        took_s = []
        for act in (lambda: publisher.publish(tensors(2), 1).applied(120), client.sleep, client.wake):
            began_s = time.monotonic()
            act()
            took_s.append(time.monotonic() - began_s)
        points.leave("slow")
        assert min(took_s) > 2 * limit_s, took_s
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            read(stream, 100)
            stream.cancel()
            (completion,) = stream.wait().completions
            check(prompt, completion, COUNT)


@pytest.mark.nightly
def test_steps_that_hang_are_found_while_pieces_of_an_update_come(
    start_ranks: StartRanks, points: Points, flags: dict[str, Any]
) -> None:
    worker = start_ranks(**flags)
    with (
        RolloutClient(worker.endpoint, timeout_s=60.0) as client,
        WeightPublisher(worker.endpoint, bucket_bytes=1024) as publisher,
    ):
        streams = streams_of(client)
        points.order("slow")
        update = publisher.publish(tensors(2), 1)
        points.order("decode")
        points.reached("decode")
        assert_handed_back(streams, "no rank has completed anything")
        with pytest.raises(RolloutError):
            update.applied(60)
    assert ended(worker) == FAULT
