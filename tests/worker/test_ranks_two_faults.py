"""Several faults at once, or one at a bad moment: clients get errors with their tokens, and nothing is left behind."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker.harness import check, facts, is_gone, tensors, until
from tests.support.worker.lost_ranks import (
    COUNT,
    FAULT,
    LONG,
    PROMPTS,
    Points,
    assert_answered,
    assert_handed_back,
    ended,
    followers_of,
    streams_of,
)
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError, RolloutTimeout

StartRanks = Callable[..., WorkerProcess]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
pytestmark = pytest.mark.nightly


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The temporary folder of a worker."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def children_of(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    children = [child for child, parent in found.items() if parent == pid]
    return [process for child in children for process in (child, *children_of(child))]


def assert_nothing_left(processes: list[int], scratch: Path) -> None:
    """No process, which had all shared memory, and no folder."""
    until(lambda: all(map(is_gone, processes)), "the end of all processes")
    until(lambda: not list(scratch.glob("rollout-ranks-*")), "the end of the folder")


@pytest.mark.parametrize("signals", [(STOP, STOP), (KILL, KILL), (STOP, KILL), (KILL, STOP)])
def test_two_of_four_ranks_that_are_lost_at_once(
    start_ranks: StartRanks, scratch: Path, signals: tuple[signal.Signals, ...]
) -> None:
    worker = start_ranks(tensor_parallel=4, env={"TMPDIR": str(scratch)})
    processes = [worker.pid, *children_of(worker.pid)]
    first, _, third = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        for pid, number in zip((third, first), signals, strict=True):
            os.kill(pid, number)
        assert_handed_back(streams, "rank ")
    assert ended(worker) == FAULT
    assert_nothing_left(processes, scratch)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 2.0, 5.9])
def test_a_client_that_leaves_while_the_group_ends_holds_nobody_up(
    start_ranks: StartRanks, scratch: Path, after_s: float
) -> None:
    worker = start_ranks(env={"TMPDIR": str(scratch)})
    processes = [worker.pid, *children_of(worker.pid)]
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as stays:
        kept = streams_of(stays)
        with RolloutClient(worker.endpoint, timeout_s=60.0) as leaves:
            gone = streams_of(leaves)
            os.kill(follower, STOP)
            time.sleep(after_s)
            gone[0].cancel()
        assert_handed_back(kept, "hung")
    assert ended(worker) == FAULT
    assert_nothing_left(processes, scratch)


@pytest.mark.parametrize(("first", "second"), [("prepare", "prepare"), ("prepare", "piece"), ("swap", "copy")])
@pytest.mark.parametrize("number", [KILL, STOP])
def test_two_ranks_that_are_lost_in_the_commit_of_an_update(
    start_ranks: StartRanks, points: Points, scratch: Path, first: str, second: str, number: signal.Signals
) -> None:
    worker = start_ranks(tensor_parallel=4, env={**points.environment, "TMPDIR": str(scratch)}, rank_stall_s=20)
    processes = [worker.pid, *children_of(worker.pid)]
    followers = followers_of(worker.pid)
    with WeightPublisher(worker.endpoint) as publisher, RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        points.order(first)
        if second != first:
            points.order(second)
        update = publisher.publish(tensors(2), 1)
        points.reached(first)
        for follower in followers[:2]:
            os.kill(follower, number)
        assert_handed_back(streams, "rank ")
        try:
            update.applied(60)
            assert first == "swap", "rank 0 may have swapped before it knew"
        except RolloutTimeout:
            raise
        except RolloutError as error:
            assert not update.reports, error
    assert ended(worker) == FAULT
    assert_nothing_left(processes, scratch)


def test_rank_0_that_is_killed_in_a_commit_leaves_no_follower(
    start_ranks: StartRanks, points: Points, scratch: Path
) -> None:
    worker = start_ranks(tensor_parallel=4, env={**points.environment, "TMPDIR": str(scratch)})
    processes = [worker.pid, *children_of(worker.pid)]
    with WeightPublisher(worker.endpoint) as publisher, RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        points.order("prepare")
        update = publisher.publish(tensors(2), 1)
        points.reached("prepare")
        os.kill(worker.pid, KILL)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            with pytest.raises(RolloutError):
                stream.wait()
            check(prompt, stream.partials()[0], COUNT)
        with pytest.raises(RolloutError):
            update.applied(60)
    until(lambda: all(map(is_gone, processes)), "the end of all processes")  # the next worker removes the folder


@pytest.mark.parametrize("victim", ["follower", "rank 0"])
@pytest.mark.parametrize("number", [KILL, STOP])
def test_a_fault_while_the_supervisor_starts_the_group_again(
    start_ranks: StartRanks, points: Points, scratch: Path, victim: str, number: signal.Signals
) -> None:
    env = {**points.environment, "TMPDIR": str(scratch)}
    worker = start_ranks(supervise=True, restart_backoff_s=0.1, env=env)
    (pid,) = worker.pids
    asked: list[Any] = []
    with (
        RolloutClient(worker.endpoint, timeout_s=60.0) as client,
        WeightPublisher(worker.endpoint, keep=True) as publisher,
    ):
        publisher.publish(tensors(2), 1).applied(60)
        streams = streams_of(client)
        processes = [pid, *children_of(pid)]
        points.order("load")
        os.kill(followers_of(pid)[0], KILL)
        assert_handed_back(streams, "signal 9")
        points.reached("load")  # the next group starts
        (again,) = (child for child in children_of(worker.pid) if followers_of(child))
        (follower,) = followers_of(again)
        processes += [again, follower]

        def ask() -> None:
            with RolloutClient(worker.endpoint, timeout_s=600.0, resume=True) as other:
                asked.append(other.generate("17:", max_tokens=60, min_version=1))

        waits = threading.Thread(target=ask)
        waits.start()
        os.kill(follower if victim == "follower" else again, number)
        points.leave("load")
        until(lambda: is_gone(again) and is_gone(follower), "the end of the second group")
        waits.join(120)
        assert asked, "a client that resumes is served by the third group"
        (completion,) = asked[0].completions
        assert completion.versions == [(1, 60)]
        check("17:", completion, COUNT)
        processes += worker.pids
    ends = [fact["status"] for fact in facts(worker.log_path) if fact["event"] == "worker_ended"]
    assert ends[0] == FAULT and len(ends) == 2 and ends[1] != 0
    os.kill(worker.pid, signal.SIGTERM)
    until(lambda: worker.returncode is not None, "the end of the supervisor")
    if victim == "follower":
        assert_nothing_left(processes, scratch)
    until(lambda: all(map(is_gone, processes)), "the end of all processes")


@pytest.mark.parametrize("number", [KILL, STOP])
def test_a_second_rank_that_is_lost_while_the_group_ends(
    start_ranks: StartRanks, scratch: Path, number: signal.Signals
) -> None:
    worker = start_ranks(tensor_parallel=4, env={"TMPDIR": str(scratch)})
    processes = [worker.pid, *children_of(worker.pid)]
    first, second, _ = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = streams_of(client)
        late = client.generate("980:", **LONG)
        os.kill(first, STOP)
        until(lambda: any(rank["beat_age_s"] > 5 for rank in client.status()["ranks"]), "silence")  # found at 6 s
        os.kill(second, number)
        assert_handed_back(streams, "rank ")
        assert_answered(late)
    assert ended(worker) == FAULT
    assert_nothing_left(processes, scratch)
