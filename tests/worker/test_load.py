"""Many requests at once, a full queue, a client that does not read, a lost tokenizer: with real workers."""

import heapq
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq

from tests.support.worker.harness import check, facts, launch, token_ids, until
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client import batch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.wire.errors import InternalError

CLIENTS = 8
MAX_QUEUE, BUFFER_BYTES = 64, 1 << 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[WorkerProcess]:
    """A worker with a short queue and small buffers."""
    limits = {"max_queue": MAX_QUEUE, "max_stream_buffer_bytes": BUFFER_BYTES}
    with launch(log=folder / "narrow.log", max_rows=32, max_context_tokens=4096, **limits) as worker:
        yield worker


def short_requests(first: int, count: int) -> list[dict[str, Any]]:
    """Requests of 3 to 16 tokens, no two with the same prompt."""
    return [
        {"prompt": f"{17 + i}:", "max_tokens": 3 + i % 14, "request_id": f"r{i}"} for i in range(first, first + count)
    ]


def check_all(requests: list[dict[str, Any]], results: list[GenerateResult]) -> None:
    """Every request has one result, its own, and every token of it is right."""
    assert len(results) == len(requests)
    for request, result in zip(requests, results, strict=True):
        (completion,) = result.completions
        assert result.id == request["request_id"]
        assert (len(completion), completion.finish_reason) == (request["max_tokens"], "length")
        check(request["prompt"], completion, {0: 1})


def from_all_clients(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` with 0, 1, ... in a thread each; the outcomes in that order."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def in_use(client: RolloutClient) -> tuple[int, int, int]:
    """Rows, places in the queue and pages."""
    status = client.status()
    return status["rows"]["running"], status["queue"]["waiting"], status["pages"]["used"]


def resident_mib(pid: int) -> float:
    """Resident set of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.nightly
@pytest.mark.parametrize("requests_each", [12, pytest.param(250, marks=pytest.mark.nightly)])
def test_of_the_requests_of_8_clients_none_is_lost_and_none_comes_twice(requests_each: int, tmp_path: Path) -> None:
    log = tmp_path / "wide.log"
    with launch(log=log, max_rows=32, max_context_tokens=4096) as worker:

        def work(place: int) -> None:
            requests = short_requests(place * requests_each, requests_each)
            with RolloutClient(worker.endpoint, client=f"client-{place}", timeout_s=60.0) as client:
                check_all(requests, client.generate_many(requests))

        from_all_clients(CLIENTS, work)
        with RolloutClient(worker.endpoint, timeout_s=60.0) as client:
            assert client.status()["results"]["stored"] == CLIENTS * requests_each
            until(lambda: in_use(client) == (0, 0, 0), "the worker to be idle")
    totals = facts(log)[-1]["totals"]
    sent = short_requests(0, CLIENTS * requests_each)
    assert totals["total/completions"] == len(sent), "the worker generated each of them once"
    assert totals["total/tokens"] == sum(request["max_tokens"] for request in sent)


def test_a_full_queue_refuses_the_rest_and_batches_come_back_until_all_is_done(
    narrow: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_off: list[int] = []  # a batch's requests that are to be sent again

    def spy(later: list[tuple[float, int]], entry: tuple[float, int]) -> None:
        put_off.append(entry[1])
        heapq.heappush(later, entry)

    monkeypatch.setattr(batch, "heapq", SimpleNamespace(heappush=spy, heappop=heapq.heappop))
    with RolloutClient(narrow.endpoint, timeout_s=60.0) as control, RawClient(narrow.endpoint) as raw:
        control.pause()
        for i in range(3 * MAX_QUEUE):  # as tokens: a text in preparation could lose its place to another client's
            raw.send("generate", f"q{i}", prompt=token_ids("17:"), max_tokens=4)
        refused = [raw.receive() for _ in range(2 * MAX_QUEUE)]
        assert {(reply["op"], reply["code"]) for reply in refused} == {("error", "overloaded")}
        assert all(0 < reply["retry_after_s"] < 60 for reply in refused)
        until(lambda: control.status()["queue"]["waiting"] == MAX_QUEUE, "a full queue in the status")

        def work(place: int) -> None:
            requests = short_requests(place * 50, 50)
            with RolloutClient(narrow.endpoint, timeout_s=60.0) as client:
                check_all(requests, client.generate_many(requests))

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(work, place) for place in range(4)]
            until(
                lambda: len(put_off) >= 4 * 50 or any(outcome.done() for outcome in done), "all of them to be refused"
            )
            control.resume()
            for outcome in done:
                outcome.result()
        assert len(put_off) >= 4 * 50
        taken = [raw.receive() for _ in range(MAX_QUEUE)]
    assert {reply["op"] for reply in taken} == {"result"}
    assert {reply["id"] for reply in taken}.isdisjoint(reply["id"] for reply in refused)
    assert len({reply["id"] for reply in (*taken, *refused)}) == 3 * MAX_QUEUE


@pytest.mark.nightly
def test_the_process_that_prepares_prompts_is_replaced_while_the_worker_serves(
    narrow: WorkerProcess,
) -> None:
    with RolloutClient(narrow.endpoint, timeout_s=60.0) as client:
        check("17:", client.generate("17:", max_tokens=20).completions[0], {0: 1})
        before = client.status()["prompt_faults"]
        (pid,) = children(narrow.pid)
        os.kill(pid, signal.SIGSTOP)
        stream = client.generate(token_ids("18:"), max_tokens=1000, stream="tokens")
        chat = client.generate(messages=[{"role": "user", "content": "19:"}], max_tokens=20, stream="tokens")
        until(lambda: client.status()["queue"]["waiting"] == 1, "the chat to be prepared")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="died with this prompt"):
            chat.wait()
        check("18:", stream.wait().completions[0], {0: 1})
        check("20:", client.generate("20:", max_tokens=20).completions[0], {0: 1})
        assert client.status()["prompt_faults"] == before + 1
        (again,) = children(narrow.pid)
    assert again != pid


def stalled_socket(context: zmq.Context, endpoint: str) -> zmq.Socket:
    """A connection with the smallest buffers."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, 1)
    socket.set(zmq.RCVBUF, 4096)
    socket.connect(endpoint)
    return socket


@pytest.mark.nightly
def test_a_client_that_does_not_read_costs_a_bounded_buffer_and_others_go_on(narrow: WorkerProcess) -> None:
    request = {"prompt": "17:", "n": 24, "max_tokens": 1000}
    message = {"v": 1, "op": "generate", "id": "s", "client": "stalled", "stream": "tokens", "stream_every": 1}
    with zmq.Context() as context, RolloutClient(narrow.endpoint, client="good", timeout_s=60.0) as good:
        good.generate(request_id="warm", **request)
        good.ack(["warm"])
        before_mib = resident_mib(narrow.pid)
        with stalled_socket(context, narrow.endpoint) as stalled:
            stalled.send(msgpack.packb(message | request))
            until(lambda: good.status()["rows"]["running"] == 24, "the stalled client's rows")
            ends = [0, 0]
            with good.generate("18:", n=2, max_tokens=1000, stream="tokens", stream_every=4) as stream:
                for chunk in stream:
                    assert chunk.offset == ends[chunk.index], "the next tokens, without a gap"
                    ends[chunk.index] += len(chunk.token_ids)
            assert ends == [1000, 1000] and stream.result is not None
            for completion in stream.result.completions:
                check("18:", completion, {0: 1})
            until(lambda: good.status()["rows"]["running"] == 0, "the stalled client's rows to end")
            grown_mib = resident_mib(narrow.pid) - before_mib
            with RolloutClient(narrow.endpoint, client="stalled", timeout_s=60.0) as back:
                result = back.attach("s")
        assert [len(completion) for completion in result.completions] == [1000] * 24
        for completion in result.completions:
            check("17:", completion, {0: 1})
    assert grown_mib < 3, "of about 7 MiB of chunks"
