"""A rank that dies or hangs ends its group: every client gets its tokens, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker.harness import (
    ONES,
    check,
    facts,
    is_gone,
    launch,
    rollout,
    subprocess_environment,
    tensors,
    until,
)
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError

LONG: dict[str, Any] = {"max_tokens": 30_000, "stream_every": 8}
COUNT = {0: 1}
FAULT = 3
#: Within which a client knows.
KNOWN_S = 10.0


def followers_of(pid: int) -> list[int]:
    """The processes of the other ranks of a worker."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and b"rollout.ranks.follower" in command:
                found.append(int(folder.name))
    return sorted(found)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts a worker of several ranks, for one test: each test ends it."""
    started: list[WorkerProcess] = []

    def start_one(**flags: Any) -> WorkerProcess:
        kept = {"tensor_parallel": 2, "device": "cpu", "max_rows": 8, "max_context_tokens": 32_768}
        started.append(launch(log=tmp_path / "worker.log", **kept | flags))
        return started[-1]

    yield start_one
    for worker in started:
        worker.kill()


def ended(worker: WorkerProcess) -> int:
    until(lambda: worker.returncode is not None, "the end of the worker")
    assert worker.returncode is not None
    return worker.returncode


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "hung")])
def test_a_follower_that_is_lost_ends_the_group_with_all_tokens_handed_back(
    start: Callable[..., WorkerProcess], number: signal.Signals, said: str
) -> None:
    worker = start()
    (follower,) = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        streams = [client.generate(prompt, stream="tokens", **LONG) for prompt in ("17:", "2024:")]
        for stream in streams:
            next(stream)
            while any(len(part.token_ids) < 16 for part in stream.partials()):
                next(stream)
        os.kill(follower, number)
        lost_s = time.monotonic()
        for stream, prompt in zip(streams, ("17:", "2024:"), strict=True):
            (completion,) = stream.wait().completions
            assert completion.finish_reason == "error" and len(completion) >= 16
            assert "tensor group is lost" in (completion.error or "") and said in (completion.error or "")
            check(prompt, completion, COUNT)
            assert time.monotonic() - lost_s < KNOWN_S
    assert ended(worker) == FAULT
    assert is_gone(follower)
    assert "rank 1" in worker.log_path.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_worker_notices_that_a_follower_is_lost(
    start: Callable[..., WorkerProcess], number: signal.Signals
) -> None:
    worker = start()
    (follower,) = followers_of(worker.pid)
    os.kill(follower, number)
    lost_s = time.monotonic()
    assert ended(worker) == FAULT
    assert time.monotonic() - lost_s < KNOWN_S + 5, "and its threads have ended, too"
    assert is_gone(follower)


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_followers_end_with_rank_0_even_if_they_are_stopped(start: Callable[..., WorkerProcess], stopped: bool) -> None:
    worker = start(tensor_parallel=4)
    followers = followers_of(worker.pid)
    assert len(followers) == 3
    if stopped:
        os.kill(followers[1], signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: all(is_gone(pid) for pid in followers), "the end of the followers", 10.0)


@pytest.mark.nightly
def test_a_group_whose_rank_0_was_stopped_goes_on(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        stream = client.generate("17:", stream="tokens", **LONG | {"max_tokens": 3000})
        next(stream)
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(8.0)  # longer than a follower may be silent
        os.kill(worker.pid, signal.SIGCONT)
        (completion,) = stream.wait().completions
    assert (completion.finish_reason, len(completion)) == ("length", 3000)
    check("17:", completion, COUNT)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_lost_during_an_update_gives_the_publisher_an_answer(
    start: Callable[..., WorkerProcess], number: signal.Signals
) -> None:
    worker = start()
    (follower,) = followers_of(worker.pid)
    with WeightPublisher(worker.endpoint) as publisher:
        publisher.publish(tensors(2), 1).applied(60)
        os.kill(follower, number)
        lost_s = time.monotonic()
        with pytest.raises(RolloutError):
            publisher.publish(tensors(1), 2).applied(60)
        assert time.monotonic() - lost_s < KNOWN_S + 5
    assert ended(worker) == FAULT


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_lost_at_the_start_ends_the_worker(tmp_path: Path, number: signal.Signals) -> None:
    command = rollout("serve", str(ONES), "--tensor-parallel=2", "--device=cpu", "--bind=tcp://127.0.0.1:0")
    log = tmp_path / "log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=subprocess_environment()) as process,
    ):
        follower = until(lambda: followers_of(process.pid), "a follower")[0]
        os.kill(follower, number)
        if number == signal.SIGSTOP:  # nothing tells a slow start from a stopped one: it waits
            time.sleep(3)
            assert process.poll() is None
            process.kill()
        until(lambda: process.poll() is not None, "the end")
        until(lambda: is_gone(follower), "the end of the follower")
    if number == signal.SIGKILL:
        assert process.returncode == 1 and "rank 1 was ended by signal 9" in log.read_text()


@pytest.mark.nightly
def test_a_worker_drains_on_a_signal_to_all_of_its_processes(start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    followers = followers_of(worker.pid)
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        stream = client.generate("17:", stream="tokens", **LONG | {"max_tokens": 2000})
        next(stream)
        for pid in (*followers, worker.pid):
            os.kill(pid, signal.SIGTERM)
        (completion,) = stream.wait().completions
        assert (completion.finish_reason, len(completion)) == ("length", 2000)
    assert ended(worker) == 0
    assert all(is_gone(pid) for pid in followers)


@pytest.mark.nightly
def test_a_supervisor_starts_a_lost_group_again_on_its_endpoint(start: Callable[..., WorkerProcess]) -> None:
    worker = start(workers=2, restart_backoff_s=0.1)
    ready = facts(worker.log_path)[0]
    first = ready["workers"][0]
    (follower,) = followers_of(first["pid"])
    os.kill(follower, signal.SIGKILL)
    again = until(
        lambda: next((fact for fact in facts(worker.log_path) if fact["event"] == "worker_ready"), None), "the restart"
    )
    assert again["worker"] == 0 and again["endpoint"] == first["endpoint"] and again["pid"] != first["pid"]
    with RolloutClient(again["endpoint"], timeout_s=60.0) as client:
        (completion,) = client.generate("17:", max_tokens=40).completions
    check("17:", completion, COUNT)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--apply=in_place"], "apply"),
        (["--tensor-parallel=3"], "cannot be cut into 3 shards"),
    ],
)
def test_what_a_group_cannot_do_is_refused_with_the_reason(flags: list[str], says: str) -> None:
    command = rollout("serve", str(ONES), "--tensor-parallel=2", "--device=cpu", "--bind=tcp://127.0.0.1:0", *flags)
    done = subprocess.run(command, capture_output=True, text=True, env=subprocess_environment(), timeout=240)
    assert done.returncode != 0 and says in done.stderr, done.stderr
