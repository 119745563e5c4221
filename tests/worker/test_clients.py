"""The clients of `trainer_bridge` and the command line, with one real worker and with two."""

import asyncio
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.harness import ROOT, check, rollout, subprocess_environment, text_of, token_ids, until
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import ConnectionLost

Two = tuple[WorkerProcess, WorkerProcess]
LONG = {"max_tokens": 30_000, "stream": "tokens", "stream_every": 16}


@pytest.fixture
def both(workers: Two, worker: WorkerProcess, weights_worker: WorkerProcess) -> list[str]:
    """The endpoints of two workers, which must be idle again when the test is over."""
    return [worker.endpoint for worker in workers]


def test_arrays_are_numpy_and_writable(client: RolloutClient) -> None:
    prompt = np.array(token_ids("17:"), np.int64)
    result = client.generate(prompt, n=2, max_tokens=12, top_p=0.9, metadata={"array": np.arange(3, dtype=np.int32)})
    for completion in result.completions:
        arrays = (completion.token_ids, completion.logprobs, completion.raw_logprobs, completion.drawn_logprobs)
        assert [array.dtype for array in arrays if array is not None] == [np.int32, *[np.float32] * 3]
        assert all(array is not None and array.shape == (12,) and array.flags.writeable for array in arrays)
        assert completion.versions == [(0, 12)] and completion.text is None and completion.stop is None
    assert result.metadata["array"].tolist() == [0, 1, 2]
    assert result.endpoint == client.endpoints[0] and result.worker == client.status()["worker"]
    assert result.prompt_tokens == 3 and result.timing.total_s > 0


def test_the_client_of_the_tutorial_prints_results_and_a_stream(
    client: RolloutClient, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"## 3. A client\n.*?```python\n(.*?)```", page, re.DOTALL)
    source = source.replace("tcp://127.0.0.1:5757", client.endpoints[0])
    exec(compile(source, "docs/tutorial.md", "exec"), {})
    *results, streamed = capsys.readouterr().out.splitlines()
    assert streamed.startswith(" 18 19 20 21 22 23 24") and results.count(" 18 19 20 21") == 2


def test_chunks_have_their_text(client: RolloutClient) -> None:
    stream = client.generate("17:", n=2, max_tokens=40, stream="tokens", stream_every=1, return_text=True)
    texts = ["", ""]
    for chunk in stream:
        assert chunk.text is not None
        texts[chunk.index] += chunk.text
    assert texts == [completion.text for completion in stream.wait().completions] and texts[0].startswith(" 18 19")
    assert all(chunk.text is None for chunk in client.generate("17:", max_tokens=4, stream="tokens"))


def test_a_result_tells_the_prompts_token_ids_if_asked(worker: WorkerProcess, tmp_path: Path) -> None:
    expected = token_ids("17:")
    asked = {"max_tokens": 8, "return_prompt_ids": True}
    with (
        RolloutClient(worker.endpoint, client="prompts") as client,
        RolloutClient(worker.endpoint, journal=tmp_path / "journal") as resuming,
    ):
        for prompt in ("17:", expected):
            ids = client.generate(prompt, n=2, **asked).prompt_token_ids
            assert ids is not None and ids.dtype == np.int32 and ids.tolist() == expected
        stream = client.generate("17:", stream="tokens", request_id="streamed", **asked)
        assert [chunk.offset for chunk in stream][:1] == [0] and stream.result is not None
        assert stream.result.prompt_token_ids.tolist() == expected
        assert client.attach("streamed").prompt_token_ids.tolist() == expected
        assert resuming.generate("17:", request_id="a", **asked).prompt_token_ids.tolist() == expected
        assert client.generate("17:", max_tokens=8).prompt_token_ids is None
    with RolloutClient(worker.endpoint, journal=tmp_path / "journal") as again:
        assert again.generate("17:", request_id="a", **asked).prompt_token_ids.tolist() == expected


def test_a_batch_comes_back_in_order(client: RolloutClient) -> None:
    requests = [{"prompt": f"{start}:", "max_tokens": 5 + start % 7} for start in range(20, 60)]
    results = client.generate_many(requests)  # more than fit into the worker's queue at once
    for request, result in zip(requests, results, strict=True):
        assert len(result.completions[0]) == request["max_tokens"]
        check(request["prompt"], result.completions[0], {0: 1})


def test_twenty_tasks_of_one_async_client(worker: WorkerProcess) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=60.0) as client:

            async def one(start: int) -> None:
                if start % 2:
                    stream = await client.generate(f"{start}:", max_tokens=64, stream="tokens", stream_every=8)
                    seen = [token async for chunk in stream for token in chunk.token_ids.tolist()]
                    result = await stream.wait()
                    assert seen == result.completions[0].token_ids.tolist()
                else:
                    result = await client.generate(f"{start}:", max_tokens=64)
                check(f"{start}:", result.completions[0], {0: 1})

            async with asyncio.TaskGroup() as tasks:
                for start in range(100, 120):
                    tasks.create_task(one(start))
            task = asyncio.create_task(client.generate("17:", max_tokens=30_000))
            while (await client.status())["rows"]["running"] != 1:
                await asyncio.sleep(0)
            task.cancel()  # the worker gets a cancel: the fixture checks that no row is left
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_connections_without_a_name_are_clients_that_the_queue_tells_apart(
    client: RolloutClient, worker: WorkerProcess
) -> None:
    client.pause()
    crowd = [client.generate(f"{start}:", max_tokens=100, stream="completions") for start in range(20, 40)]
    until(lambda: client.status()["queue"] == {"waiting": 20, "max": 24, "clients": 1}, "the crowd")
    with RolloutClient(worker.endpoint, timeout_s=60.0) as other:
        late = other.generate("17:", max_tokens=100, stream="completions")
        until(lambda: other.status()["queue"] == {"waiting": 21, "max": 24, "clients": 2}, "the other one")
        client.resume()
        queued_s = late.wait().timing.queued_s
    slower = [stream.wait().timing.queued_s > queued_s for stream in crowd]
    assert sum(slower) >= 12, "all that did not run at once beside it; by arrival none would be"


def test_requests_go_to_the_least_loaded_worker(both: list[str]) -> None:
    with RolloutClient(both, timeout_s=60.0) as client:
        with client.generate("17:", n=6, **LONG) as heavy:
            others = [client.generate("17:", n=2, **LONG) for _ in range(3)]
            assert {stream.endpoint for stream in others} == set(both) - {heavy.endpoint}
            # Six here, six there: the next two are one each.
            pair = [client.generate("17:", max_tokens=5, stream="completions") for _ in range(2)]
            assert {stream.endpoint for stream in pair} == set(both)
            until(lambda: all(status["rows"]["running"] >= 6 for status in client.statuses().values()), "the rows")
            for stream in (heavy, *others):
                stream.cancel()
            assert len({stream.wait().worker for stream in (heavy, *others, *pair)}) == 2


def test_a_session_stays_on_its_worker(both: list[str]) -> None:
    with RolloutClient(both, timeout_s=60.0) as client:
        homes = {
            session: [client.generate("17:", max_tokens=3, session=session).endpoint for _ in range(4)]
            for session in ("a", "b", "c", "d")
        }
        assert all(len(set(endpoints)) == 1 for endpoints in homes.values())
        assert Counter(endpoints[0] for endpoints in homes.values()) == Counter(dict.fromkeys(both, 2))
        pinned = client.generate("17:", max_tokens=3, endpoint=both[1])
        assert pinned.endpoint == both[1]


def test_a_worker_that_is_not_there_is_a_lost_connection(worker: WorkerProcess) -> None:
    with RolloutClient("tcp://127.0.0.1:9", connect_timeout_s=0.1) as client, pytest.raises(ConnectionLost):
        client.ping()


# --- the command line ------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        rollout(*arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=subprocess_environment(COLUMNS="200"),
    )


def test_status_command(worker: WorkerProcess) -> None:
    shown = run("status", worker.endpoint)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "serving" in shown.stdout
    whole = run("status", worker.endpoint, "--all")
    assert whole.returncode == 0 and worker.weights_endpoint in whole.stdout
    told = run("status", worker.endpoint, "--json")
    assert json.loads(told.stdout)["rows"] == {"running": 0, "max": 8} and told.stdout.count("\n") == 1


def test_generate_command(worker: WorkerProcess, tmp_path: Path) -> None:
    plain = run("generate", worker.endpoint, "--prompt", "17:", "--max-tokens", "12")
    assert (plain.returncode, plain.stdout) == (0, " 18 19 20 21\n")
    said = plain.stderr.splitlines()[-1]  # on a busy machine there is progress to tell, too
    assert said == "[completion 0: 12 tokens, length, weights version 0]"
    streamed = run("generate", worker.endpoint, "--prompt", "17:", "--stop", " 22", "--stream", "--seed", "3")
    assert (streamed.returncode, streamed.stdout) == (0, " 18 19 20 21\n")
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "17:"}]')
    chat = run("generate", worker.endpoint, "--messages", str(tmp_path / "chat.json"), "--max-tokens", "6", "--json")
    told = json.loads(chat.stdout)
    assert (told["text"], told["versions"], told["finish_reason"]) == (" 18 19", [[0, 6]], "length")
    ids = run("generate", worker.endpoint, "--token-ids", ",".join(map(str, token_ids("17:"))), "--max-tokens", "6")
    assert text_of(map(int, ids.stdout.split())) == " 18 19"


def test_a_refused_command_is_one_line_and_status_1(worker: WorkerProcess) -> None:
    done = run("generate", worker.endpoint, "--prompt", "17:", "--max-tokens", "99999999")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"rollout: {worker.endpoint}: ") and done.stderr.count("\n") == 1
