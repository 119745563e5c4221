"""A rank that dies or hangs ends its group: every client gets its tokens, and no process stays.

Times leave room for a busy machine. The rules with their seconds are tested in tests/unit/ranks/test_rank_watch.py.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support.patience import PATIENCE_S
from tests.support.peft_adapters import make_adapter
from tests.support.worker.harness import (
    ONES,
    check,
    facts,
    is_gone,
    rollout,
    subprocess_environment,
    tensors,
    until,
)
from tests.support.worker.lost_ranks import (
    COUNT,
    FAULT,
    KILL_AND_STOP,
    KNOWN_S,
    LONG,
    PROMPTS,
    Points,
    assert_answered,
    assert_handed_back,
    ended,
    followers_of,
    read,
    streams_of,
)
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import ConnectionLost, RolloutError, RolloutTimeout

NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in KILL_AND_STOP]


# --- the work of a worker that serves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "said"), [KILL_AND_STOP[0], NIGHTLY[1]])
def test_a_follower_that_is_lost_in_decodes_ends_the_group_with_all_tokens_handed_back(
    start_ranks: Callable[..., WorkerProcess], number: signal.Signals, said: str
) -> None:
    worker = start_ranks()
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)

        def beating() -> list[dict[str, Any]] | None:
            now = client.status()["ranks"]
            return now if all(rank["done"] > 0 and rank["beat_age_s"] < 5 for rank in now) else None

        ranks = until(beating, "steps and a beat of each")
        assert [rank["rank"] for rank in ranks] == [0, 1] and [rank["device"] for rank in ranks] == ["cpu", "cpu"]
        assert [rank["pid"] for rank in ranks[1:]] == followers_of(worker.pid)
        assert ranks[0]["launched"] >= ranks[0]["done"]
        follower = ranks[1]["pid"]
        os.kill(follower, number)
        assert_handed_back(streams, said)
    assert ended(worker) == FAULT
    assert is_gone(follower)
    assert "rank 1" in worker.log_path.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["prefill", "decode", "order"])
@pytest.mark.parametrize(("number", "said"), KILL_AND_STOP)
def test_a_follower_that_is_lost_at_a_point_of_a_step(
    start_ranks: Callable[..., WorkerProcess], points: Points, point: str, number: signal.Signals, said: str
) -> None:
    worker = start_ranks(env=points.environment, prefill_chunk_tokens=32)
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        points.order(point)
        counted = " ".join(str(number) for number in range(1, 400))
        late = client.generate(f"{counted}:", **LONG)  # a prefill of many steps
        points.reached(point)
        os.kill(follower, number)
        assert_handed_back(streams, said)
        assert_answered(late)
    assert ended(worker) == FAULT


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["decode", "prefill", "order"])
def test_a_follower_that_hangs_while_it_beats_ends_the_group(
    start_ranks: Callable[..., WorkerProcess], points: Points, point: str
) -> None:
    worker = start_ranks(env=points.environment, rank_stall_s=3)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        points.order(point)
        late = client.generate("980:", **LONG)  # not the prompt of a stream: its KV is there
        assert_handed_back(streams, "hung")
        assert_answered(late)
    assert ended(worker) == FAULT


@pytest.mark.nightly
def test_a_first_rank_that_hangs_on_its_device_ends_the_group(
    start_ranks: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "tests.support.worker.faulty_worker", str(tmp_path), "serve")
    worker = start_ranks(command=command, rank_stall_s=3)
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        (tmp_path / "hang").touch()
        assert_handed_back(streams, "has completed anything")
    assert ended(worker) == FAULT and is_gone(follower)


@pytest.mark.nightly
@pytest.mark.parametrize("checks", [True, False])
def test_ranks_that_draw_different_tokens_are_found_where_they_are_compared(
    start_ranks: Callable[..., WorkerProcess], points: Points, checks: bool
) -> None:
    worker = start_ranks(env=points.environment, check_ranks=checks)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        points.order("drift")
        if checks:
            assert_handed_back(streams, "the ranks drew different tokens")
        else:
            read(streams[0], 100)  # only the tokens of rank 0 are committed
    if checks:
        assert ended(worker) == FAULT


@pytest.mark.nightly
def test_a_follower_whose_step_takes_long_is_not_lost(
    start_ranks: Callable[..., WorkerProcess], points: Points
) -> None:
    worker = start_ranks(env=points.environment, rank_stall_s=2)
    with RolloutClient(worker.endpoint, timeout_s=600.0) as client:
        streams = streams_of(client)
        points.order("busy")
        points.reached("busy")  # it computed for longer than a group may stand still
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            read(stream, 100)
            stream.cancel()
            (completion,) = stream.wait().completions
            assert completion.finish_reason == "cancelled"
            check(prompt, completion, COUNT)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_worker_notices_that_a_follower_is_lost(
    start_ranks: Callable[..., WorkerProcess], number: signal.Signals
) -> None:
    worker = start_ranks()
    (follower,) = followers_of(worker.pid)
    os.kill(follower, number)
    lost_s = time.monotonic()
    assert ended(worker) == FAULT
    assert time.monotonic() - lost_s < KNOWN_S
    assert is_gone(follower)


def test_a_stopped_rank_0_is_killed_and_its_clients_know(start_ranks: Callable[..., WorkerProcess]) -> None:
    worker = start_ranks()
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as client:
        stream = client.generate("17:", **LONG)
        read(stream, 20)
        os.kill(worker.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(ConnectionLost):
            stream.wait()
        assert time.monotonic() - stopped_s < KNOWN_S
    assert ended(worker) == -signal.SIGKILL
    until(lambda: is_gone(follower), "the end of the follower that killed it")
    assert f"rank 0 (process {worker.pid}) has been stopped" in worker.log_path.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("stall_s", "stopped_s"), [("8", 3.0), ("none", 12.0)])
def test_a_group_whose_rank_0_was_stopped_goes_on(
    start_ranks: Callable[..., WorkerProcess], stall_s: str, stopped_s: float
) -> None:
    """After a moment, or without a limit at any time."""
    worker = start_ranks(rank_stall_s=stall_s)
    with RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as client:
        stream = client.generate("17:", **LONG | {"max_tokens": 1000})
        next(stream)
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(worker.pid, signal.SIGCONT)
        (completion,) = stream.wait().completions
    assert (completion.finish_reason, len(completion)) == ("length", 1000)
    check("17:", completion, COUNT)


@pytest.mark.nightly
def test_a_follower_that_is_stopped_for_a_moment_goes_on(start_ranks: Callable[..., WorkerProcess]) -> None:
    worker = start_ranks()
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=PATIENCE_S) as client:
        stream = client.generate("17:", **LONG | {"max_tokens": 1000})
        for _ in range(3):
            read(stream, 100)  # more than may have come before the last stop
            os.kill(follower, signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(follower, signal.SIGCONT)
        (completion,) = stream.wait().completions
    assert (completion.finish_reason, len(completion)) == ("length", 1000)
    check("17:", completion, COUNT)


# --- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["piece", "prepare", "swap"])
@pytest.mark.parametrize(("number", "said"), KILL_AND_STOP)
def test_a_follower_that_is_lost_in_an_update_gives_clients_and_publisher_an_answer(
    start_ranks: Callable[..., WorkerProcess], points: Points, point: str, number: signal.Signals, said: str
) -> None:
    worker = start_ranks(env=points.environment)
    (follower,) = followers_of(worker.pid)
    with WeightPublisher(worker.endpoint) as publisher, RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        points.order(point)
        update = publisher.publish(tensors(2), 1)
        points.reached(point)
        os.kill(follower, number)
        assert_handed_back(streams, said)
        try:
            update.applied(60)
            assert point == "swap", "rank 0 may have swapped before it knew"
        except RolloutTimeout:
            raise
        except RolloutError as error:
            assert not update.reports, error
    assert ended(worker) == FAULT


@pytest.mark.nightly
def test_a_sleep_waits_for_pieces_of_an_update_that_was_dropped(
    start_ranks: Callable[..., WorkerProcess], points: Points
) -> None:
    worker = start_ranks(env=points.environment, sleep=True)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        points.order("piece")
        with WeightPublisher(worker.endpoint) as publisher:
            publisher.publish(tensors(2), 1)
            points.reached("piece")
        until(lambda: "version 1 rejected" in worker.log_path.read_text(), "the end of the update")
        told: list[Any] = []
        sleep = threading.Thread(target=lambda: told.append(client.sleep()))
        sleep.start()
        sleep.join(1.5)
        assert sleep.is_alive() and not told
        points.leave("piece")
        sleep.join(60)
        assert told
        client.wake()
        (completion,) = client.generate("17:", max_tokens=60).completions
        check("17:", completion, COUNT)


# --- adapters and sleep -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["adapter", "memory"])
@pytest.mark.parametrize(("number", "said"), KILL_AND_STOP)
def test_a_follower_that_is_lost_while_others_wait_for_it_gives_all_of_them_an_answer(
    start_ranks: Callable[..., WorkerProcess],
    points: Points,
    tmp_path: Path,
    point: str,
    number: signal.Signals,
    said: str,
) -> None:
    base = AutoModelForCausalLM.from_pretrained(ONES)
    make_adapter(base, tmp_path / "adapters" / "one", 0, ("q_proj", "o_proj"))
    flags = {"sleep": True, "host_kv_gib": 0.05, "adapter_slots": 1, "adapter_root": str(tmp_path / "adapters")}
    worker = start_ranks(env=points.environment, **flags)
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams, told = streams_of(client), list[RolloutError]()

        def ask() -> None:
            try:
                with RolloutClient(worker.endpoint, timeout_s=60.0) as other:
                    other.load_adapter("one", "one") if point == "adapter" else other.sleep()
            except RolloutError as error:
                told.append(error)

        points.order(point)
        asks = threading.Thread(target=ask)
        asks.start()
        points.reached(point)
        os.kill(follower, number)
        assert_handed_back(streams, said)
        asks.join(60)
        assert told and not isinstance(told[0], RolloutTimeout), told
    assert ended(worker) == FAULT and is_gone(follower)


# --- start and end ----------------------------------------------------------------------------------------------------


def end_of_start(log: Path, points: Points, point: str, number: signal.Signals | None, *flags: str) -> str:
    """The log of a worker that ends in its start, because a follower stands at the point, and gets the signal there."""
    points.order(point)
    command = rollout("serve", str(ONES), "--tensor-parallel=2", "--device=cpu", "--bind=tcp://127.0.0.1:0", *flags)
    command.append("--kv-memory-max-gib=0.03")
    env = {**subprocess_environment(), **points.environment}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as process:
        try:
            points.reached(point)
            (follower,) = followers_of(process.pid)
            if number is not None:
                os.kill(follower, number)
            until(lambda: process.poll() is not None, "the end")
        finally:
            process.kill()
        until(lambda: is_gone(follower), "the end of the follower")
    assert process.returncode == 1
    return log.read_text()


@pytest.mark.parametrize(("number", "said"), NIGHTLY)
def test_a_follower_that_is_lost_while_it_loads_ends_the_worker(
    tmp_path: Path, points: Points, number: signal.Signals, said: str
) -> None:
    log = end_of_start(tmp_path / "log", points, "load", number)
    assert "rank 1" in log and said in log


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("tensor", "'loading weights' at "),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("import", "'connecting'"),
                ("load", "'loading weights' for"),
                ("steps", "'preparing steps'"),
                ("served", "'preparing steps'"),
            ]
        ),
    ],
)
def test_a_follower_that_hangs_at_the_start_while_it_beats_ends_the_worker(
    tmp_path: Path, points: Points, point: str, said: str
) -> None:
    log = end_of_start(tmp_path / "log", points, point, None, "--rank-stall-s=1")
    named = "ranks 0, 1 have" if point in ("import", "steps") else "rank 1 has"  # those that wait for it are as far
    assert f"{named} hung at the start: nothing is done in the stage {said}" in log
    assert "Traceback" not in log


@pytest.mark.nightly
def test_a_follower_that_loads_slowly_is_not_lost(start_ranks: Callable[..., WorkerProcess], points: Points) -> None:
    points.order("slow")
    env = points.environment | {"SLOW_S": "3.6"}
    worker = start_ranks(env=env, rank_stall_s=3)  # its weights take twice the limit
    points.leave("slow")
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        (completion,) = client.generate("17:", max_tokens=20).completions
    check("17:", completion, COUNT)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "stopped"), [(2, False), *(pytest.param(4, s, marks=pytest.mark.nightly) for s in (False, True))]
)
def test_followers_end_with_rank_0_even_if_they_are_stopped(
    start_ranks: Callable[..., WorkerProcess], ranks: int, stopped: bool
) -> None:
    worker = start_ranks(tensor_parallel=ranks)
    followers = followers_of(worker.pid)
    assert len(followers) == ranks - 1
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        if stopped:
            os.kill(followers[1], signal.SIGSTOP)
        os.kill(worker.pid, signal.SIGKILL)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            with pytest.raises(RolloutError):
                stream.wait()
            (partial,) = stream.partials()  # tokens that were sent stay valid
            check(prompt, partial, COUNT)
    until(lambda: all(is_gone(pid) for pid in followers), "the end of the followers")


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "said"), KILL_AND_STOP)
def test_a_follower_that_is_lost_while_the_worker_drains(
    start_ranks: Callable[..., WorkerProcess], number: signal.Signals, said: str
) -> None:
    worker = start_ranks()
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        os.kill(worker.pid, signal.SIGTERM)
        until(lambda: client.status()["state"] == "draining", "the drain")
        os.kill(follower, number)
        assert_handed_back(streams, said)
    assert ended(worker) == FAULT
    assert is_gone(follower)


@pytest.mark.nightly
def test_a_worker_drains_on_a_signal_to_all_of_its_processes(start_ranks: Callable[..., WorkerProcess]) -> None:
    worker = start_ranks()
    followers = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        stream = client.generate("17:", **LONG | {"max_tokens": 2000})
        next(stream)
        for pid in (*followers, worker.pid):
            os.kill(pid, signal.SIGTERM)
        (completion,) = stream.wait().completions
        assert (completion.finish_reason, len(completion)) == ("length", 2000)
    assert ended(worker) == 0
    assert all(is_gone(pid) for pid in followers)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "said"), KILL_AND_STOP)
def test_a_supervisor_starts_a_lost_group_again_and_the_publisher_gives_it_its_weights(
    start_ranks: Callable[..., WorkerProcess], number: signal.Signals, said: str
) -> None:
    worker = start_ranks(supervise=True, restart_backoff_s=0.1)
    endpoints, (pid,) = worker.endpoints, worker.pids
    with (
        RolloutClient(worker.endpoint, timeout_s=60.0) as client,
        WeightPublisher(worker.endpoint, keep=True) as publisher,
    ):
        publisher.publish(tensors(2), 1).applied(60)
        streams = streams_of(client)
        (follower,) = followers_of(pid)
        os.kill(follower, number)
        assert_handed_back(streams, said)
        until(lambda: worker.pids[0] != pid, "the restart")
        assert worker.endpoints == endpoints
        (completion,) = client.generate("17:", max_tokens=60, min_version=1).completions
        assert completion.versions == [(1, 60)]
        check("17:", completion, COUNT)
        assert client.status()["restarts"] == 1
    ends = [fact for fact in facts(worker.log_path) if fact["event"] == "worker_ended"]
    assert [(fact["worker"], fact["status"]) for fact in ends] == [(0, FAULT)]


@pytest.mark.nightly
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason() -> None:
    command = rollout("serve", str(ONES), "--tensor-parallel=3", "--device=cpu", "--bind=tcp://127.0.0.1:0")
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_environment(), timeout=240)
    assert done.returncode != 0 and "cannot be cut into 3 shards" in done.stderr, done.stderr
