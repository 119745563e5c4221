"""Forks at a real worker: a running and an ended request, a session, trees, and what another client may not read."""

import asyncio
import uuid

import numpy as np
import pytest

from tests.support.worker.harness import text_of, token_ids, until
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import NotFound

SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
PROMPT = token_ids("17:" + "".join(f" {i}" for i in range(18, 40)))
PAGE = 16


def assert_same(client: RolloutClient, branch, prompt: list[int], n: int = 1) -> None:
    """The branch is what the whole prompt gives, sent with a salt that finds no KV."""
    fresh = client.generate(prompt, **SAMPLED, n=n, cache_salt=uuid.uuid4().hex)
    assert branch.prompt_tokens == len(prompt) and fresh.cached_tokens == 0
    for mine, theirs in zip(branch.completions, fresh.completions, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist() and mine.seed == theirs.seed
        assert np.allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


def test_branches_of_a_running_request_have_the_tokens_that_it_had(client: RolloutClient) -> None:
    stream = client.generate(PROMPT, max_tokens=20_000, temperature=1.0, seed=3, stream="tokens", stream_every=32)
    chunks = [next(stream), next(stream)]
    have = PROMPT + [int(token) for chunk in chunks for token in chunk.token_ids]
    for offset in (len(have), len(have) - 5, len(PROMPT), 20):
        result = client.generate(
            token_ids(" 41:"), fork={"request": stream.id, "offset": offset}, **SAMPLED, n=2, return_prompt_ids=True
        )
        source = have[:offset] + token_ids(" 41:")
        assert result.prompt_token_ids.tolist() == source
        assert result.cached_tokens >= offset // PAGE * PAGE - PAGE
        assert_same(client, result, source, n=2)
    whole = client.generate(fork={"request": stream.id}, **SAMPLED, return_prompt_ids=True)
    assert whole.prompt_token_ids.tolist()[: len(have)] == have and whole.prompt_tokens >= len(have)
    stream.close()


def test_a_request_that_is_not_streamed_is_continued_while_it_runs(client: RolloutClient, raw: RawClient) -> None:
    raw.send("generate", "r", prompt=PROMPT, max_tokens=20_000, sampling={"temperature": 1.0, "seed": 3})
    until(lambda: client.status()["rows"]["running"] == 1, "the source")
    raw.send("generate", "b", fork={"request": "r"}, max_tokens=4, return_prompt_ids=True)
    branch = raw.receive()
    assert branch["id"] == "b" and branch["prompt_tokens"] >= len(PROMPT)
    raw.ask("cancel", "c", target="r")
    source = next(reply for reply in (raw.receive() for _ in range(2)) if reply["op"] == "result")
    said = [*PROMPT, *source["completions"][0]["token_ids"]]
    assert list(branch["prompt_token_ids"]) == said[: branch["prompt_tokens"]]


def test_a_tree_of_branches_of_ended_requests(client: RolloutClient) -> None:
    """The results are acknowledged by then, as this client does at once."""
    level = [("root", client.generate(PROMPT, **SAMPLED, n=2, request_id="root"), PROMPT)]
    for depth in range(2):
        nodes = []
        for name, result, prompt in level:
            for index in range(2):
                source = prompt + result.completions[index].token_ids.tolist()[: 6 + depth]
                child = f"{name}.{index}"
                fork = {"request": name, "index": index, "offset": len(source)}
                nodes.append((child, client.generate(fork=fork, **SAMPLED, n=2, request_id=child), source))
        level = nodes
    assert len(level) == 4
    for _, result, source in level:
        assert result.cached_tokens >= len(source) - 2 * PAGE
        assert_same(client, result, source, n=2)


def test_a_session_branches_and_goes_back(client: RolloutClient) -> None:
    with client.session() as chat, client.session() as other:
        first = chat.generate(PROMPT, **SAMPLED)
        said = PROMPT + first.completions[0].token_ids.tolist()
        branch = other.generate(token_ids(" 5:"), fork={"session": chat.id}, **SAMPLED)
        assert_same(client, branch, said + token_ids(" 5:"))
        again = chat.generate(token_ids(" 9:"), fork={"session": chat.id, "offset": len(said) - 4}, **SAMPLED)
        assert again.cached_tokens == len(said) - 4
        assert_same(client, again, said[:-4] + token_ids(" 9:"))
        longer = other.generate(fork={"session": other.id}, **SAMPLED)
        assert longer.cached_tokens == longer.prompt_tokens - 1


def test_text_goes_on_after_a_fork(client: RolloutClient) -> None:
    result = client.generate("17: 18 19", temperature=0.0, max_tokens=6, request_id="r", return_text=True)
    more = client.generate(" 41:", fork={"request": "r"}, temperature=0.0, max_tokens=12, return_prompt_ids=True)
    assert text_of(more.prompt_token_ids) == f"17: 18 19{result.completions[0].text} 41:"
    assert text_of(more.completions[0].token_ids) == " 42 43 44 45"


def test_the_worker_of_a_fleet_that_has_the_tokens_continues_them(
    workers: tuple[WorkerProcess, WorkerProcess], worker: WorkerProcess, weights_worker: WorkerProcess
) -> None:
    async def run() -> None:
        async with AsyncRolloutClient([each.endpoint for each in workers], timeout_s=60.0) as client:

            async def one(i: int) -> None:
                first = await client.generate(token_ids(f"{i}:"), max_tokens=6, request_id=f"r{i}")
                for _ in range(2):
                    again = await client.generate(fork={"request": f"r{i}"}, max_tokens=3, n=2)
                    assert again.endpoint == first.endpoint
                    assert again.prompt_tokens == len(token_ids(f"{i}:")) + len(first.completions[0])

            await asyncio.gather(*map(one, range(100, 112)))

    asyncio.run(run())


def test_another_client_reads_nothing(worker: WorkerProcess, client: RolloutClient) -> None:
    client.generate(PROMPT, **SAMPLED, request_id="mine", session="mine")
    with RolloutClient(worker.endpoint, timeout_s=60.0) as other:
        for fork in ({"request": "mine"}, {"session": "mine"}):
            with pytest.raises(NotFound) as refused:
                other.generate(fork=fork, max_tokens=3, return_prompt_ids=True)
            assert refused.value.field in ("fork.request", "fork.session")
    client.end_session("mine")
