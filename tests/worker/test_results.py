"""Results outlive connections, and nothing of a client that is gone stays: with a real worker and killed clients."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.worker.harness import assert_idle, check, launch, subprocess_environment, text_of, until
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.assembly import Assembler
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import GenerateResult, read_chunk
from trainer_bridge.wire.errors import BadRequest, Duplicate, NotFound

LEASE_S = 4.0
CLIENT_SCRIPT = """
import sys, msgpack, zmq
endpoint, client, stream = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(endpoint)
request = {"v": 1, "op": "generate", "id": "r", "prompt": "17:", "n": 2, "max_tokens": 30_000}
if client:
    request["client"] = client
if stream:
    request |= {"stream": "tokens", "stream_every": 4}
print("there", flush=True)
sys.stdin.readline()
socket.send(msgpack.packb(request))
for i in range(3 if stream else 0):
    socket.recv_multipart()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("results") / "worker.log"
    flags = {"lease_s": LEASE_S, "kv_memory_max_gib": 1 / 8}
    with launch(log=log, max_rows=48, max_context_tokens=32_768, **flags) as worker:
        yield worker


@pytest.fixture
def worker(shared: WorkerProcess) -> Iterator[WorkerProcess]:
    """A worker of this file's own; idle again when a test is over."""
    yield shared
    assert_idle(shared)


def send_all(clients: list[subprocess.Popen[bytes]]) -> None:
    """Have processes of the script send their requests at about the same time, and wait until all have."""
    for process in clients:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
    for process in clients:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in clients:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"


def same(one: GenerateResult, two: GenerateResult) -> bool:
    """True if both are the same generation: seeds are drawn for each, so no other is equal."""
    return one.extra["seed"] == two.extra["seed"] and all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs) and a.versions == b.versions
        for a, b in zip(one.completions, two.completions, strict=True)
    )


def test_killed_clients_leave_nothing_behind(worker: WorkerProcess, tmp_path: Path) -> None:
    names = [f"job-{i}" if i % 2 else "" for i in range(8)]
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT_SCRIPT, worker.endpoint, name, "stream" if i % 4 < 2 else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=subprocess_environment(),
        )
        for i, name in enumerate(names)
    ]
    with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
        before = client.status()["reclaimed"]
        send_all(clients)
        until(lambda: client.status()["rows"]["running"] == 16, "all to run at once")
        for process in clients:
            process.send_signal(signal.SIGKILL)
        for process in clients:
            process.communicate()
        until(lambda: client.status()["rows"]["running"] == 0, "the rows to come back")
        assert_idle(worker)
        status = client.status()
        assert status["reclaimed"] == before + 16
        assert status["results"]["stored"] == 4, "partials of clients that may come back, and of no others"
    for name in filter(None, names):
        with RolloutClient(worker.endpoint, client=name, timeout_s=60.0) as client:
            for completion in client.attach("r").completions:
                assert completion.finish_reason == "cancelled" and len(completion) > 0
                check("17:", completion, {0: 1})
            client.ack(["r"])


def test_killed_client_that_is_back_in_time_gets_the_whole_result(worker: WorkerProcess) -> None:
    script = CLIENT_SCRIPT.replace("30_000", "400")
    process = subprocess.Popen(
        [sys.executable, "-c", script, worker.endpoint, "back", "stream"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=subprocess_environment(),
    )
    send_all([process])
    process.kill()
    with RolloutClient(worker.endpoint, client="back", timeout_s=60.0) as client:
        result = client.attach("r")
        process.communicate()
        assert result.id == "r"
        for completion in result.completions:
            assert (completion.finish_reason, len(completion)) == ("length", 400)
            check("17:", completion, {0: 1})
        assert same(result, client.attach("r")), "as often as it is asked for"
        client.ack(["r"])
        with pytest.raises(NotFound):
            client.attach("r")


@pytest.mark.parametrize("late", [False, True])
def test_stream_goes_on_from_its_offset_with_each_token_once(worker: WorkerProcess, late: bool) -> None:
    held = Assembler(2)
    with RawClient(worker.endpoint) as raw:
        fields = {"prompt": "17:", "n": 2, "max_tokens": 300, "stream": "tokens", "stream_every": 8}
        raw.send("generate", "s", client="streams", return_text=True, **fields)
        for _ in range(7):
            held.add(read_chunk(raw.receive()))
    with RolloutClient(worker.endpoint, client="streams", timeout_s=60.0) as client:
        if late:
            whole = client.attach("s")
        partials = held.partials()
        with client.attach("s", stream="tokens", stream_every=8, n=2, partials=partials) as stream:
            assert stream.id == "s"
            for chunk in stream:
                held.add(chunk)  # refuses a gap and a token twice
        result = stream.result
        assert result is not None and (not late or same(whole, result))
        for completion, joined, streamed in zip(result.completions, held.partials(), stream.partials(), strict=True):
            for part in (joined, streamed):
                assert part.token_ids.tolist() == completion.token_ids.tolist()
                assert part.logprobs.tolist() == completion.logprobs.tolist()
                assert part.text == completion.text == text_of(completion.token_ids)
            check("17:", completion, {0: 1})
        again = client.attach("s", stream="completions", n=2, partials=stream.partials()[:1])
        (rest,) = list(again)
        assert rest.index == 1 and rest.token_ids.tolist() == result.completions[1].token_ids.tolist()
        client.ack(["s"])


def acknowledged(client: RolloutClient, targets: list[str]) -> bool:
    """True once none of them is in flight any more."""
    try:
        client.ack(targets)
    except BadRequest:
        return False
    return True


def test_a_request_sent_twice_is_one_request(worker: WorkerProcess) -> None:
    request = {"prompt": "17:", "max_tokens": 200, "request_id": "twice"}
    with (
        RolloutClient(worker.endpoint, client="twice", timeout_s=60.0) as one,
        RolloutClient(worker.endpoint, client="twice", timeout_s=60.0) as two,
    ):
        streams = [client.generate(stream="tokens", stream_every=8, **request) for client in (one, two)]
        first, second = (stream.wait() for stream in streams)
        assert same(first, second), "while it runs"
        assert [len(stream.partials()[0]) for stream in streams] == [200, 200]
        again = two.generate(stream="tokens", stream_every=8, **request)
        assert same(first, again.wait()), "when it is over"
        with pytest.raises(Duplicate):
            one.generate(**{**request, "max_tokens": 201})
        two.ack(["twice"])
        anew = one.generate(stream="tokens", stream_every=8, **request)
        assert not same(first, anew.wait()), "after it was acknowledged it is a new one"
        with pytest.raises(BadRequest):
            long = two.generate(stream="tokens", max_tokens=20_000, prompt="17:", request_id="long")
            two.ack(["twice", "long"])
        long.close()
        until(lambda: acknowledged(two, ["twice", "long"]), "the cancelled one to end")


def test_detached_request_goes_on_without_its_client(worker: WorkerProcess) -> None:
    with RolloutClient(worker.endpoint, client="leaves", timeout_s=60.0) as client:
        client.pause()  # both are to be unfinished when their client leaves
        client.generate("17:", max_tokens=800, stream="tokens", request_id="stays", detached=True)
        client.generate("17:", max_tokens=30_000, stream="tokens", request_id="goes")
        until(lambda: client.status()["queue"]["waiting"] == 2, "both")
        client.resume()
    with RolloutClient(worker.endpoint, timeout_s=60.0) as other:
        until(lambda: other.status()["rows"]["running"] == 0, "them to end")
    with RolloutClient(worker.endpoint, client="leaves", timeout_s=60.0) as client:
        (stays,), (goes,) = client.attach("stays").completions, client.attach("goes").completions
        assert (stays.finish_reason, len(stays), goes.finish_reason) == ("length", 800, "cancelled")
        check("17:", stays, {0: 1})
        client.ack(["stays", "goes"])


def test_async_client_comes_back_too(worker: WorkerProcess) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(worker.endpoint, client="tasks", timeout_s=60.0) as client:
            result = await client.generate("17:", n=2, max_tokens=50, request_id="a")
            assert same(result, await client.attach("a"))
            stream = await client.attach("a", stream="completions", n=2)
            assert [completion.index async for completion in stream] == [0, 1]
            await client.ack(["a"])
            with pytest.raises(NotFound):
                await client.attach("a")

    asyncio.run(run())
