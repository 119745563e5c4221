"""Sessions over the wire: conversations with a real worker, by hand and with both clients."""

import asyncio
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.worker.harness import ONES, ROOT, launch, text_of, token_ids, until
from tests.support.worker.raw_client import RawClient
from tests.support.worker.served import Served
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.wire.errors import BadRequest, NotFound

GREEDY = {"sampling": {"temperature": 0.0}, "max_tokens": 12}
ANSWERS = ([], token_ids(" 41:"), token_ids(" 7:"), token_ids(" 800:"))
PROMPT = token_ids("17:" + "".join(f" {i}" for i in range(18, 29)) + " 5:")


def used(client: RolloutClient) -> int:
    return client.status()["pages"]["used"]


def rested(client: RolloutClient, before: dict[str, Any], turns: int, **wanted: int) -> dict[str, Any]:
    """`sessions` of a status after a number of turns since `before`, as soon as it has the `wanted` values."""

    def look() -> dict[str, Any] | None:
        status = client.status()
        found = status["sessions"]
        over = status["rows"]["running"] == 0 and found["turns"] - before["turns"] == turns
        return found if over and all(found[name] == value for name, value in wanted.items()) else None

    return until(look, f"{turns} turns, and {wanted}")


def converse(generate: Callable[[list[int]], GenerateResult]) -> list[GenerateResult]:
    """Four turns, each of which has all that was said before as its prompt."""
    tokens, results = list(PROMPT), []
    for answer in ANSWERS:
        tokens += answer
        results.append(generate(list(tokens)))
        tokens += results[-1].completions[0].token_ids.tolist()
    return results


def expected_of(client: RolloutClient) -> list[GenerateResult]:
    return converse(lambda tokens: client.generate(tokens, **GREEDY))


def check_turns(results: list[GenerateResult], expected: list[GenerateResult]) -> None:
    """The same tokens and log-probs, and nothing was computed but what is new in each turn, if that."""
    for turn, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        (one,), (other,) = mine.completions, theirs.completions
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)
        if turn:  # the last token of the turn before is the one that no step had yet
            assert 1 <= mine.prompt_tokens - mine.cached_tokens <= len(ANSWERS[turn]) + 1


def test_turns_of_a_blocking_client(client: RolloutClient) -> None:
    expected, before = expected_of(client), client.status()["sessions"]
    with client.session(lease_s=60) as chat:
        check_turns(converse(lambda tokens: chat.generate(tokens, **GREEDY)), expected)
        said = len(PROMPT) + sum(map(len, ANSWERS)) + 4 * 12
        found = rested(client, before, turns=4, holding=1, pages=-(-(said - 1) // 16))
        assert found["hits"] - before["hits"] == 3 and used(client) == found["pages"]
    rested(client, before, turns=4, holding=0, pages=0)
    assert used(client) == 0


def test_the_last_turn_reads_the_sessions_kv_and_leaves_none(client: RolloutClient) -> None:
    before = client.status()["sessions"]
    first = client.generate(PROMPT, **GREEDY, session="brief")
    said = PROMPT + first.completions[0].token_ids.tolist()
    last = client.generate([*said, *token_ids(" 41:")], **GREEDY, session="brief", end_of_session=True)
    assert last.cached_tokens >= len(said) - 1
    rested(client, before, turns=2, holding=0, pages=0)


def test_turns_of_many_tasks(worker: WorkerProcess, client: RolloutClient) -> None:
    expected = expected_of(client)

    async def one(shared: AsyncRolloutClient) -> None:
        tokens, results = list(PROMPT), []
        async with shared.session(lease_s=60) as chat:
            for answer in ANSWERS:
                tokens += answer
                results.append(await chat.generate(list(tokens), **GREEDY))
                tokens += results[-1].completions[0].token_ids.tolist()
        check_turns(results, expected)

    async def run() -> None:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=60.0) as shared, asyncio.TaskGroup() as tasks:
            for _ in range(12):  # more than there are rows
                tasks.create_task(one(shared))

    asyncio.run(run())
    until(lambda: used(client) == 0, "the sessions' pages")


def test_messages_are_matched_by_tokens(client: RolloutClient) -> None:
    """Text and messages are tokenized, and from there on it is the same conversation."""
    with client.session() as chat:
        first = chat.generate(text_of(PROMPT), **GREEDY, return_text=True)
        text = text_of(PROMPT) + str(first.completions[0].text)
        second = chat.generate(text + " 41:", **GREEDY)
        assert text_of(second.completions[0].token_ids) == " 42 43 44 45"
        assert second.cached_tokens >= second.prompt_tokens - len(" 41:") - 1
        third = chat.generate(messages=[{"role": "user", "content": "99"}], **GREEDY)
        assert third.cached_tokens == 0
        assert third.completions[0].token_ids.tolist() == (
            client.generate(messages=[{"role": "user", "content": "99"}], **GREEDY).completions[0].token_ids.tolist()
        )


def test_a_session_by_hand(raw: RawClient) -> None:
    fields = {"session": "s", "session_lease_s": 60, "client": "by-hand", "max_tokens": 12}
    first = raw.ask("generate", "1", prompt=PROMPT, **fields)
    said = PROMPT + first["completions"][0]["token_ids"]
    second = raw.ask("generate", "2", prompt=[*said, *token_ids(" 41:")], **fields)
    assert text_of(second["completions"][0]["token_ids"]) == " 42 43 44 45"
    assert second["cached_tokens"] >= len(said) - 1
    # What was said otherwise from within a page on: up to there it is reused.
    changed = [*said[:20], *token_ids(" 3:")]
    assert raw.ask("generate", "3", prompt=changed, **fields)["cached_tokens"] == 20
    until(lambda: raw.ask("status", "s")["sessions"]["holding"] == 1, "the session")
    for _ in range(2):  # of one that is not there nothing is held
        assert raw.ask("end_session", "e", session="s", client="by-hand")["op"] == "ok"
        until(lambda: raw.ask("status", "s")["sessions"]["holding"] == 0, "its end")
    raw.ask("ack", "a", targets=["1", "2", "3"], client="by-hand")


def test_two_turns_at_once_and_wrong_sessions_are_refused(raw: RawClient) -> None:
    raw.send("generate", "long", prompt=PROMPT, session="s", max_tokens=20_000, stream="tokens", stream_every=1)
    raw.receive()  # it runs
    raw.send("generate", "b", prompt=PROMPT, session="s", max_tokens=5)
    while (reply := raw.receive())["id"] != "b":
        assert reply["op"] == "chunk"
    assert (reply["code"], reply["field"]) == ("bad_request", "session")
    # Cancelled, it makes way: the next one may be sent without waiting for its end.
    raw.send("cancel", "c", target="long")
    raw.send("generate", "d", prompt=PROMPT, session="s", max_tokens=5)
    ends = {}
    while len(ends) < 3:
        reply = raw.receive()
        if reply["op"] != "chunk":
            ends[reply["id"]] = reply["op"]
    assert ends == {"c": "ok", "long": "result", "d": "result"}
    for fields, field in (
        ({"n": 2, "session": "s"}, "n"),
        ({"session_lease_s": 5}, "session_lease_s"),
        ({"session": "s", "session_lease_s": 1e9}, "session_lease_s"),
    ):
        reply = raw.ask("generate", "f", prompt=PROMPT, max_tokens=2, **fields)
        assert (reply["code"], reply["field"]) == ("bad_request", field)


def test_a_group_in_a_session_is_refused_by_the_helper_too(client: RolloutClient) -> None:
    with client.session() as chat, pytest.raises(BadRequest, match="one completion"):
        chat.generate(PROMPT, n=2, **GREEDY)


def test_a_lease_that_runs_out_gives_the_pages_back(worker: WorkerProcess, client: RolloutClient) -> None:
    before = client.status()["sessions"]
    with RolloutClient(worker.endpoint, client="goes-away", timeout_s=30.0) as other:
        (first,) = other.generate(PROMPT, session="short", session_lease_s=0.2, **GREEDY).completions
        rested(client, before, turns=1, holding=0)
        said = [*PROMPT, *first.token_ids.tolist(), *token_ids(" 41:")]
        again = other.generate(said, session="short", session_lease_s=60, **GREEDY)
        assert text_of(again.completions[0].token_ids) == " 42 43 44 45"
    # A client with a name may come back, its sessions stay.
    with RolloutClient(worker.endpoint, client="goes-away", timeout_s=30.0) as other:
        assert other.generate([*said, 3], session="short", **GREEDY).cached_tokens == len(said)
        assert rested(client, before, turns=3, holding=1)["hits"] - before["hits"] == 1
        other.end_session("short")
        rested(client, before, turns=3, holding=0, pages=0)


def test_sessions_of_a_client_without_a_name_end_with_it(worker: WorkerProcess, client: RolloutClient) -> None:
    before = client.status()["sessions"]
    with RolloutClient(worker.endpoint, timeout_s=30.0) as other:
        for name in "abc":
            other.generate(PROMPT, session=name, session_lease_s=600, **GREEDY)
        rested(client, before, turns=3, holding=3)
    rested(client, before, turns=3, holding=0, pages=0)


def test_no_turn_reuses_kv_of_older_weights(weights_worker: WorkerProcess, ledger: dict[int, int]) -> None:
    with closing(Served(weights_worker, ledger)) as served, served.client.session(lease_s=60) as chat:
        before = served.client.status()["sessions"]
        first = chat.generate(PROMPT, **GREEDY).completions[0]
        rested(served.client, before, turns=1, holding=1)
        step = ledger[served.version]
        served.publish(3 - step)
        rested(served.client, before, turns=1, holding=0)
        said = [*PROMPT, *first.token_ids.tolist(), *token_ids(" 41:")]
        second = chat.generate(said, **GREEDY)
        numbers = "".join(f" {41 + (3 - step) * (i + 1)}" for i in range(4))
        assert text_of(second.completions[0].token_ids) == numbers and second.cached_tokens == 0
        said += [*second.completions[0].token_ids.tolist(), *token_ids(" 7:")]
        assert chat.generate(said, **GREEDY).cached_tokens == len(said) - len(" 7:") - 1


@pytest.mark.nightly
def test_a_resumed_conversation_goes_on_at_a_worker_that_knows_nothing_of_it(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    """The worker dies amid a turn: the turn goes on elsewhere, and the next one finds its KV there."""
    with (
        launch(ONES, log=tmp_path / "mortal.log", max_rows=4, max_context_tokens=4096) as mortal,
        RolloutClient([mortal.endpoint, worker.endpoint], resume=True, timeout_s=60.0) as client,
        client.session() as chat,
    ):
        assert chat.generate(PROMPT, **GREEDY).endpoint == mortal.endpoint
        stream = client.generate(PROMPT, session=chat.id, max_tokens=2000, stream="tokens", stream_every=8)
        next(stream)
        mortal.kill()
        result = stream.wait()
        assert (result.resumes, result.endpoint, len(result.completions[0])) == (1, worker.endpoint, 2000)
        said = [*PROMPT, *result.completions[0].token_ids.tolist(), *token_ids(" 41:")]
        last = chat.generate(said, **GREEDY)
        assert text_of(last.completions[0].token_ids) == " 42 43 44 45"
        assert last.endpoint == worker.endpoint and last.cached_tokens == len(said) - len(" 41:") - 1


def test_the_tool_loop_of_the_docs(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "integrations" / "tools.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(import math\n\n\ndef converse.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, "docs/integrations/tools.md", "exec"), names)

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return token_ids(text)

    answers = {" 18 19 2": " 38:", " 39 4": " 58:", " 59 6": " 71:"}
    before = client.status()["sessions"]
    tokens, logprobs = names["converse"](client, Tokenizer(), answers.__getitem__, "17:", call_ends="0", max_tokens=12)
    assert text_of(tokens) == "17: 18 19 20 38: 39 40 58: 59 60 71: 72 73 74 75"
    assert np.isnan(logprobs).sum() == len("17: 38: 58: 71:") and len(logprobs) == len(tokens)
    assert rested(client, before, turns=4, holding=0)["hits"] - before["hits"] == 3


def test_a_prefetch_says_how_much_kv_is_on_the_device(worker: WorkerProcess, client: RolloutClient) -> None:
    prompt = token_ids("17:" + "".join(f" {i}" for i in range(60, 90)))
    with client.session() as chat:
        said = prompt + chat.generate(prompt, max_tokens=20).completions[0].token_ids.tolist()
        here = client.prefetch(session=chat.id)
        assert here == client.prefetch(said) == (len(said) - 1) // 16 * 16
        assert client.prefetch(said, cache_salt="other") == 0
        with pytest.raises(NotFound) as unknown:
            client.prefetch(session="unknown")
        assert unknown.value.field == "session"

    async def ask() -> int:
        async with AsyncRolloutClient(worker.endpoint, timeout_s=60.0) as other:
            return await other.prefetch(said)

    assert asyncio.run(ask()) == here, "the prefix cache is everyone's"


def test_a_lease_holds_until_its_client_leaves(worker: WorkerProcess, client: RolloutClient) -> None:
    before = client.status()["sessions"]["holding"]
    with RolloutClient(worker.endpoint, timeout_s=60.0) as other:
        other.generate(token_ids("17:" + " 18" * 20), n=2, max_tokens=20, lease_s=600)
        until(lambda: client.status()["sessions"]["holding"] == before + 2, "the leases")
    until(lambda: client.status()["sessions"]["holding"] == before, "the end of the leases")
