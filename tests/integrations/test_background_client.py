"""A client whose requests run in a thread while their caller does something else."""

from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.integrations.integration_worker import start
from tests.support.integrations.tiny_checkpoints import CHECKPOINT
from tests.support.worker.harness import until
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.integrations.background import BackgroundClient
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import BadRequest

COUNT = {"max_tokens": 12, "temperature": 1.0}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with start(CHECKPOINT, tmp_path_factory.mktemp("background") / "worker.log", max_context_tokens=4096) as worker:
        yield worker


def test_requests_run_without_a_waiting_thread(worker: WorkerProcess) -> None:
    with BackgroundClient(worker.endpoint) as client, RolloutClient(worker.endpoint) as other:
        other.pause()
        many = client.generate_many(["17:", "9:"], n=2, **COUNT)
        one = client.generate("5:", return_text=True, **COUNT)
        assert not many.done() and not one.done()
        other.resume()
        assert one.result(30).completions[0].text == " 6 7 8 9 10 "
        assert [len(result.completions) for result in many.result(30)] == [2, 2]


def test_workers_join_and_leave_from_any_thread(worker: WorkerProcess) -> None:
    with BackgroundClient("tcp://127.0.0.1:9", resume=True) as client:
        waiting = client.generate("5:", return_text=True, **COUNT)
        client.add(worker.endpoint)
        assert waiting.result(60).endpoint == worker.endpoint
        client.remove("tcp://127.0.0.1:9", "now")
        assert client.generate("5:", **COUNT).result(30).endpoint == worker.endpoint
        with pytest.raises(ValueError, match="last endpoint"):
            client.remove(worker.endpoint)


def test_run_says_what_it_takes(worker: WorkerProcess) -> None:
    async def play(client: AsyncRolloutClient) -> int:
        return len(client.endpoints)

    with BackgroundClient(worker.endpoint) as client:
        for job in (None, "play", lambda client: 3):
            with pytest.raises(TypeError, match="async def"):
                client.run(job)  # type: ignore[arg-type]
        assert client.run(play).result(10) == 1  # nothing is disturbed


@pytest.mark.parametrize("kind", [BackgroundClient, RolloutClient, AsyncRolloutClient, WeightPublisher])
def test_endpoints_are_addresses_and_an_error_says_so(kind: Any, worker: WorkerProcess) -> None:
    for wrong in (worker, [worker], None, [b"tcp://127.0.0.1:1"]):
        with pytest.raises(TypeError, match=r"worker\.endpoints"):
            kind(wrong)
    for wrong in ([], ["tcp://127.0.0.1:9"] * 2):
        with pytest.raises(ValueError, match="at least one"):
            kind(wrong)


def test_the_output_of_a_tokenizer_is_refused_by_name(worker: WorkerProcess) -> None:
    output = AutoTokenizer.from_pretrained(CHECKPOINT)("17:")
    assert isinstance(output, Mapping)
    with BackgroundClient(worker.endpoint) as client:
        for call in (
            lambda: client.generate(output),
            lambda: client.generate_many([output]),
            lambda: client.generate_many([{"prompt": output}]),
        ):
            with pytest.raises((TypeError, ValueError), match="input_ids"):
                call().result(10)
        assert client.generate(output["input_ids"], **COUNT).result(30).prompt_tokens == len(output["input_ids"])


def test_future_raises_what_the_client_does(worker: WorkerProcess) -> None:
    with BackgroundClient(worker.endpoint) as client, pytest.raises(BadRequest):
        client.generate("5:", temperature=-1.0).result(30)


def test_a_coroutine_of_the_caller_runs_in_the_thread_with_the_client(worker: WorkerProcess) -> None:
    async def two_turns(client: AsyncRolloutClient) -> list[str | None]:
        async with client.session() as session:
            first = await session.generate("5:", return_text=True, **COUNT)
            second = await session.generate("50:", return_text=True, **COUNT)
        return [result.completions[0].text for result in (first, second)]

    async def wrong(client: AsyncRolloutClient) -> None:
        await client.generate("5:", temperature=-1.0)

    with BackgroundClient(worker.endpoint) as client:
        assert client.run(two_turns).result(30) == [" 6 7 8 9 10 ", " 51 52 53 54"]
        with pytest.raises(BadRequest):
            client.run(wrong).result(30)


def in_work(client: RolloutClient) -> int:
    """Requests that run or wait."""
    status = client.status()
    return status["rows"]["running"] + status["queue"]["waiting"]


def test_closing_cancels_unfinished_requests_at_the_worker(worker: WorkerProcess) -> None:
    with RolloutClient(worker.endpoint) as other:
        other.pause()
        client = BackgroundClient(worker.endpoint)
        future = client.generate("17:", n=4, max_tokens=4000)
        until(lambda: future.done() or in_work(other), "the request")
        assert not future.done()
        client.close()
        client.close()
        with pytest.raises(CancelledError):
            future.result(0)
        other.resume()
        until(lambda: not in_work(other), "its end")
        assert other.status()["tokens"] < 4 * 4000
    with pytest.raises(ValueError, match="closed"):
        client.generate("17:")
