"""Faults, hangs and drains of real workers: each waiting client gets an answer with all its tokens.

A script starts the real worker and raises the errors that files in a folder order.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout.config import EngineConstants
from tests.support.worker.harness import ONES, TWOS, check, facts, launch, until
from trainer_bridge.client.blocking import RolloutClient, Stream
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import ConnectionLost, InternalError, RolloutError, Unavailable

LONG: dict[str, Any] = {"max_tokens": 30_000, "stream_every": 8}
COUNT = {0: 1}
SCRIPT = "tests.support.worker.faulty_worker"
FAULT, HUNG = 3, 4


@dataclass(frozen=True)
class Faulty:
    """A worker and the folder that its faults are ordered in."""

    process: WorkerProcess
    folder: Path

    def order(self, kind: str) -> None:
        (self.folder / kind).touch()

    def client(self) -> RolloutClient:
        return RolloutClient(self.process.endpoint, timeout_s=60.0)

    def ended(self) -> int:
        until(lambda: self.process.returncode is not None, "the end")
        assert self.process.returncode is not None
        return self.process.returncode


SETTINGS: dict[str, dict[str, Any]] = {
    "recovering": {"max_rows": 8},
    "publishing": {},
    "hanging": {"stall_exit_s": 10.0},
    "threads": {"interval_s": 0.05},
    "deadline": {"drain_s": 6},
    "at once": {"drain_s": 0},
}


@pytest.fixture
def start_faulty(tmp_path: Path) -> Iterator[Callable[[str], Faulty]]:
    """Starts a worker with the settings of that name, for one test: each test ends or harms its worker."""
    started: list[Faulty] = []

    def start(name: str) -> Faulty:
        command = (sys.executable, "-m", SCRIPT, str(tmp_path), "serve")
        flags = {"command": command, "max_context_tokens": 32_768, **SETTINGS[name]}
        started.append(Faulty(launch(log=tmp_path / "worker.log", **flags), tmp_path))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()


def streams_of(client: RolloutClient) -> list[Stream]:
    """Two streams that have received tokens, and a request that has received none."""
    silent = client.generate("980:", stream="completions", **LONG)
    streams = [client.generate("17:", stream="tokens", **LONG), client.generate("2024:", n=2, stream="tokens", **LONG)]
    for stream in streams:
        for _ in range(3):
            next(stream)
        while any(len(part.token_ids) < 16 for part in stream.partials()):
            next(stream)
    return [*streams, silent]


def assert_partial(stream: Stream, prompt: str, reason: str, error: str) -> None:
    """The stream and the result agree, every token is right, and the reason and the error are given."""
    result = stream.wait()
    for completion, partial in zip(result.completions, stream.partials(), strict=True):
        assert completion.finish_reason == reason and 30_000 > len(completion) >= 16
        assert error in (completion.error or "")
        assert completion.token_ids.tolist() == partial.token_ids.tolist()
        assert len(completion.logprobs) == len(completion.raw_logprobs) == len(completion)
        check(prompt, completion, COUNT)


def assert_all_partial(streams: list[Stream], reason: str, error: str) -> None:
    first, second, silent = streams
    assert_partial(first, "17:", reason, error)
    assert_partial(second, "2024:", reason, error)
    assert_partial(silent, "980:", reason, error)


def assert_serves(client: RolloutClient) -> None:
    """New requests get the right tokens, and the old ones hold no row, page or slot."""
    result = client.generate("17:", n=4, max_tokens=120)
    for completion in result.completions:
        assert (completion.finish_reason, len(completion)) == ("length", 120)
        check("17:", completion, COUNT)

    def idle() -> bool:
        status = client.status()
        pages = status["pages"]
        return status["rows"]["running"] == pages["used"] == status["slots"]["in_flight"] == 0

    until(idle, "the worker to be idle")


def test_after_a_fault_the_worker_returns_tokens_so_far_and_recovers_unless_it_fails_too_often(
    start_faulty: Callable[[str], Faulty],
) -> None:
    worker = start_faulty("recovering")
    with worker.client() as client:
        for count, kind in enumerate(["device", "cuda_memory", "torn", "memory"], start=1):
            streams = streams_of(client)
            if kind == "torn":
                worker.order("books")  # the fault cannot be described: its tokens are handed back all the same
            worker.order(kind)
            assert_all_partial(streams, "error", kind)
            assert not (worker.folder / "books").exists()
            if count <= EngineConstants().max_faults:
                assert_serves(client)
                status = client.status()
                assert (status["faults"], status["state"], status["problems"]) == (count, "serving", [])
    assert worker.ended() == FAULT
    assert [fact["event"] for fact in facts(worker.process.log_path)] == ["ready", "ended"]


def test_a_failed_submit_is_an_error_and_a_fault_during_a_swap_ends_the_worker(
    start_faulty: Callable[[str], Faulty],
) -> None:
    """The worker's weights are unknown then, so it ends; the publisher gets the error, too."""
    worker = start_faulty("publishing")
    with worker.client() as client:
        streams = streams_of(client)
        worker.order("submit")
        with pytest.raises(InternalError, match="submit"):
            client.generate("17:", max_tokens=4)
        assert_all_partial(streams, "error", "submit")
        with WeightPublisher(worker.process.endpoint) as publisher:
            publisher.publish(load_file(ONES / "model.safetensors"), version=1).applied(60)
            assert client.status()["weights_version"] == 1
            streams = [client.generate("17:", stream="tokens", **LONG)]
            next(streams[0])
            worker.order("device")
            result = streams[0].wait()
            assert result.completions[0].versions == [(1, len(result.completions[0]))]
            with client.generate("17:", stream="tokens", **LONG) as stream:
                next(stream)
                assert client.status()["weights_version"] == 1, "a recovery keeps the weights and their version"
                worker.order("copy")
                with pytest.raises(RolloutError, match="copy"):
                    publisher.publish(load_file(TWOS / "model.safetensors"), version=2).applied(60)
                (completion,) = stream.wait().completions
        assert completion.finish_reason == "error" and "copy" in (completion.error or "")
        check("17:", completion, {1: 1})
    assert worker.ended() == FAULT


@pytest.mark.nightly
def test_a_hang_shows_in_the_status_and_one_that_lasts_ends_the_worker_with_all_answered(
    start_faulty: Callable[[str], Faulty],
) -> None:
    worker = start_faulty("hanging")
    with worker.client() as client:
        streams = streams_of(client)
        worker.order("hang")
        until(lambda: client.status()["state"] == "stalled", "the stall to show")
        assert client.status()["last_tick_s"] >= 2.0
        with pytest.raises(Unavailable, match="hangs"):
            client.ping()
        with pytest.raises(Unavailable, match="hangs"):
            client.generate("17:", max_tokens=4)
        worker.order("hang_over")
        until(lambda: client.status()["state"] == "serving", "the stall to be over")
        client.ping()
        assert client.status()["last_tick_s"] < 2.0
        for stream in streams[:2]:
            for _ in range(3):
                next(stream)
        worker.order("hang")
        assert_all_partial(streams, "error", "hung")
    assert worker.ended() == HUNG


@pytest.mark.nightly
def test_dead_threads_are_reported_and_without_the_service_the_worker_ends(
    start_faulty: Callable[[str], Faulty],
) -> None:
    worker = start_faulty("threads")
    with worker.client() as client:
        assert client.status()["problems"] == []
        worker.order("metrics")
        until(lambda: len(client.status()["problems"]) == 1, "the report")
        worker.order("receiver")
        with WeightPublisher(worker.process.endpoint) as publisher:
            publisher.status()  # wakes the thread up
            until(lambda: len(client.status()["problems"]) == 2, "the report")
            with pytest.raises(ConnectionLost):  # the weight socket is closed
                publisher.publish(load_file(ONES / "model.safetensors"), version=1).applied(60)
        assert_serves(client)
        (stream, *_) = streams_of(client)
        worker.order("service")
        with pytest.raises(ConnectionLost):
            client.generate("17:", max_tokens=4)
        with pytest.raises(ConnectionLost):
            stream.wait()
    assert worker.ended() == 1


@pytest.mark.nightly
def test_a_drain_finishes_short_completions_and_returns_the_rest_at_its_deadline(
    start_faulty: Callable[[str], Faulty],
) -> None:
    worker = start_faulty("deadline")
    with worker.client() as client:
        streams = streams_of(client)
        short = client.generate("17:", max_tokens=60, stream="tokens", stream_every=1)  # also on a busy machine
        next(short)
        os.kill(worker.process.pid, signal.SIGTERM)
        until(lambda: client.status()["state"] == "draining", "the drain")
        assert short.wait().completions[0].finish_reason == "length"
        assert_all_partial(streams, "cancelled", "the worker ended")
    assert worker.ended() == 0


@pytest.mark.nightly
def test_without_time_to_drain_all_completions_return_immediately(start_faulty: Callable[[str], Faulty]) -> None:
    worker = start_faulty("at once")
    with worker.client() as client:
        streams = streams_of(client)
        os.kill(worker.process.pid, signal.SIGTERM)
        assert_all_partial(streams, "cancelled", "the worker ended")
    assert worker.ended() == 0
