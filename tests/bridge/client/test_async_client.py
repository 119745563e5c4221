"""What only the asyncio client has: tasks, cancellation, the event loop."""

import asyncio
import threading
from typing import Any

import pytest

from tests.support.bridge.client_script import TIMEOUT_S, Serve, in_reverse, only_generate, silent
from tests.support.bridge.scripted_worker import ScriptedWorker, completion, result
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.wire import errors


def test_many_tasks_share_one_client(serve: Serve) -> None:
    worker = serve(in_reverse(200))

    async def main() -> list[int]:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            outcomes = await asyncio.gather(*(client.generate([i], max_tokens=1) for i in range(200)))
            return [int(outcome.completions[0].token_ids[0]) for outcome in outcomes]

    assert asyncio.run(main()) == list(range(1, 201))


def test_replies_that_arrive_while_others_send_are_not_missed(serve: Serve) -> None:
    worker = serve()

    async def one(client: AsyncRolloutClient, start: int) -> None:
        for token in range(start, start + 50):
            outcome = await client.generate([token], max_tokens=1)
            assert outcome.completions[0].token_ids[0] == token + 1

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            await asyncio.gather(*(one(client, 100 * task) for task in range(20)))

    asyncio.run(main())


def test_a_send_that_takes_the_signal_of_a_reply_looks_for_the_reply(serve: Serve) -> None:
    worker = serve(only_generate(silent))

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            await client.ping()
            stream = await client.generate([1], stream="tokens")
            ping = asyncio.create_task(client.ping())
            await asyncio.sleep(0)  # the ping is sent
            client._core.connections[client.endpoints[0]].socket.poll(
                5000
            )  # its reply has come, and ZeroMQ has taken back its signal
            stream.close()  # sends
            await ping

    asyncio.run(main())


def test_cancelling_a_task_cancels_its_request(serve: Serve) -> None:
    worker = serve(only_generate(silent))

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            task = asyncio.create_task(client.generate([1], request_id="r"))
            await asyncio.to_thread(worker.next, "generate")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await asyncio.to_thread(worker.next, "cancel"))["target"] == "r"

    asyncio.run(main())


def test_a_cancelled_anext_loses_no_chunk(serve: Serve) -> None:
    known: list[Any] = []
    worker = serve(only_generate(lambda worker, peer, header: known.append((peer, header))))

    async def main() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            stream = await client.generate([1], stream="tokens")
            await asyncio.to_thread(worker.next, "generate")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            chunk = {"op": "chunk", **completion([2]), "offset": 0}
            worker.do(lambda: worker.reply(*known[0], chunk))
            assert (await anext(stream)).token_ids.tolist() == [2]

    asyncio.run(main())


def test_closing_the_client_ends_what_waits(serve: Serve) -> None:
    worker = serve(only_generate(silent))

    async def main() -> None:
        client = AsyncRolloutClient(worker.endpoint)
        task = asyncio.create_task(client.generate([1]))
        await asyncio.to_thread(worker.next, "generate")
        await client.close()
        with pytest.raises(errors.ConnectionLost, match="closed"):
            await task
        assert worker.next("cancel")

    asyncio.run(main())


def test_a_client_of_another_loop_says_so(serve: Serve) -> None:
    client = AsyncRolloutClient(serve().endpoint, timeout_s=TIMEOUT_S)
    asyncio.run(client.ping())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(client.ping())
    asyncio.run(client.close())


def test_much_that_comes_at_once_leaves_other_tasks_their_turn(serve: Serve) -> None:
    sent = threading.Event()

    def flood(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        for offset in range(1000):
            worker.reply(peer, header, {"op": "chunk", **completion([offset]), "offset": offset})
        worker.reply(peer, header, result([completion(list(range(1000)))]))
        sent.set()

    worker = serve(only_generate(flood))

    async def main() -> int:
        """How often another task has its turn until all of it is here."""
        async with AsyncRolloutClient(worker.endpoint, timeout_s=TIMEOUT_S) as client:
            await client.ping()
            stream = await client.generate([1], stream="tokens")
            assert sent.wait(TIMEOUT_S)
            turns = 0
            while stream.result is None:
                await asyncio.sleep(0)
                turns += 1
            return turns

    assert asyncio.run(main()) >= 1000 // (2 * 64), "a signal and a look that was put off may come in one turn"
