"""A client of several real workers: prompts stay where their KV is; workers join, die, come back and leave."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import check, launch, tensors, token_ids, until
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher

LONG: dict[str, Any] = {"max_tokens": 800, "stream": "tokens", "stream_every": 16}


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker that may be killed."""
    with launch(log=tmp_path / "mortal.log", max_rows=8, max_context_tokens=32_768, ready_timeout_s=120) as worker:
        yield worker


def test_a_prompt_goes_to_the_worker_that_has_its_kv(
    workers: tuple[WorkerProcess, WorkerProcess], worker: WorkerProcess, weights_worker: WorkerProcess
) -> None:
    prompts = [token_ids(" ".join(str(number) for number in range(start, start + 60))) for start in (100, 400, 700)]
    with RolloutClient([each.endpoint for each in workers], timeout_s=60.0) as client:
        first = [client.generate(prompt, max_tokens=4) for prompt in prompts]
        assert len({result.endpoint for result in first}) == 2
        for _ in range(3):
            for prompt, before in zip(prompts, first, strict=True):
                result = client.generate(prompt, max_tokens=4)
                assert result.endpoint == before.endpoint
                assert result.cached_tokens > len(prompt) // 2, "it computed the prompt again"


def test_a_worker_with_older_weights_is_not_used_and_one_that_leaves_ends_its_requests(
    worker: WorkerProcess, weights_worker: WorkerProcess, ledger: dict[int, int]
) -> None:
    old, new = worker.endpoint, weights_worker.endpoint
    version = max(ledger) + 1
    with WeightPublisher(new) as publisher:
        publisher.publish(tensors(2), version).applied(60)
    ledger[version] = 2
    with RolloutClient(new, timeout_s=60.0) as client:
        client.add(old)
        assert client.status(old)["weights_version"] < version
        assert {client.generate("17:", max_tokens=2).endpoint for _ in range(8)} == {new}
    with RolloutClient(old, timeout_s=60.0) as client:
        client.add(new)
        until(lambda: client.generate("17:", max_tokens=2).endpoint == new, "the newcomer's first request")
        last = client.generate("30:", endpoint=new, **{**LONG, "max_tokens": 200})
        client.remove(new)
        assert {client.generate("17:", max_tokens=2).endpoint for _ in range(4)} == {old}
        (completion,) = last.wait().completions
        assert check("30:", completion, ledger).tokens == 200 and last.endpoint == new
        assert client.endpoints == (old,)


@pytest.mark.nightly
def test_requests_survive_a_kill_and_the_worker_is_used_again_with_current_weights(
    weights_worker: WorkerProcess, mortal: WorkerProcess, ledger: dict[int, int], tmp_path: Path
) -> None:
    """A worker joins, is killed, comes back with its checkpoint, gets the newest weights, and leaves."""
    stays, dies = weights_worker.endpoint, mortal.endpoint

    async def used(client: AsyncRolloutClient, endpoint: str) -> None:
        """Generate until a worker gets a request."""
        while True:
            result = await client.generate("17:", max_tokens=12)
            check("17:", result.completions[0], ledger)
            if result.endpoint == endpoint:
                return

    async def run() -> None:
        async with AsyncRolloutClient(stays, resume=True, timeout_s=PATIENCE_S) as client:
            publish([stays, dies])
            client.add(dies)
            await used(client, dies)
            streams = [await client.generate(f"{start}:", **LONG) for start in range(20, 26)]
            doomed = [stream for stream in streams if stream.endpoint == dies]
            assert doomed and len(doomed) < len(streams)
            for stream in streams:
                await anext(stream)
            mortal.kill()
            for start, stream in zip(range(20, 26), streams, strict=True):
                result = await stream.wait()
                assert check(f"{start}:", result.completions[0], ledger).tokens == 800
                assert bool(result.resumes) == (stream in doomed) and result.endpoint == stays

            again = launch(log=tmp_path / "again.log", bind=dies, max_rows=8, max_context_tokens=32_768, wait=False)
            with again:
                await asyncio.to_thread(again.wait_ready, 120)
                assert (await client.status(dies))["weights_version"] == 0, "its checkpoint"
                places = [(await client.generate("17:", max_tokens=2)).endpoint for _ in range(12)]
                assert set(places) == {stays}
                publish([stays, dies])
                await used(client, dies)

                last = await client.generate("30:", endpoint=dies, **LONG)
                client.remove(dies)
                assert (await client.generate("17:", max_tokens=2)).endpoint == stays
                result = await last.wait()
                assert check("30:", result.completions[0], ledger).tokens == 800 and result.resumes == 0
                assert result.endpoint == dies and client.endpoints == (stays,)

    def publish(endpoints: list[str]) -> None:
        version = max(ledger) + 1
        with WeightPublisher(endpoints) as publisher:
            assert len(publisher.publish(tensors(2), version).applied(60)) == len(endpoints)
        ledger[version] = 2

    asyncio.run(run())
