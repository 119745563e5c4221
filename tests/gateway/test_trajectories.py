"""Tokens that the gateway keeps between turns: how turns go on with them, branches, limits, and how they are read."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_gateway.history.trajectories import AnswerTokens, Trajectories
from rollout_gateway.prompts.chat_messages import Rendering
from tests.support.gateway.harness import events, gateway, post, refused
from tests.support.worker.harness import EOS, token_ids
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.expiring_cache import ExpiringCache

CHAT = "/v1/chat/completions"
DRAWN: dict[str, Any] = {"temperature": 2.5, "seed": 3, "max_tokens": 12}
HOT: dict[str, Any] = {"temperature": 40.0, "ignore_eos": True}
USED: list[tuple[httpx.Client, str]] = []


@pytest.fixture(autouse=True)
def finished(client: httpx.Client) -> Iterator[None]:
    """Ends all sessions, whose KV the worker holds."""
    yield
    while USED:
        gone, session = USED.pop()
        if not gone.is_closed:
            finish(gone, session)


def finish(client: httpx.Client, session: str) -> None:
    post(client, "/finish_session", params={"session_id": session})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(client: httpx.Client, session: str, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], Any]:
    """The answer's message, and the prompt and the tokens that the answer names."""
    USED.append((client, session))
    body = {"messages": messages, "return_token_ids": True, **DRAWN, **fields}
    answer = post(client, CHAT, body, headers={"X-Session-ID": session})
    (choice,) = answer["choices"]
    return choice["message"], (answer["prompt_token_ids"], choice["token_ids"])


def kept(client: httpx.Client, session: str) -> dict[str, Any]:
    answer = client.get(f"/v1/trajectories/{session}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_turn_goes_on_with_the_drawn_tokens_and_they_are_read_back(
    client: httpx.Client, direct: RolloutClient
) -> None:
    first, (prompt, drawn) = turn(client, "read", [user("17:")], **HOT)
    second, (longer, more) = turn(client, "read", [user("17:"), first, user(" 30:")], **HOT)
    assert longer[: len(prompt) + len(drawn)] == prompt + drawn and len(longer) > len(prompt) + len(drawn)
    found = kept(client, "read")
    assert [each["parent"] for each in found["turns"]] == [None, 0] and found["session"] == "read"
    (branch,) = found["branches"]
    assert branch["token_ids"] == longer + more and branch["turns"] == [0, 1]
    for place, truth in ((0, drawn), (1, more)):
        start, end = (found["turns"][place][name] for name in ("start", "end"))
        assert branch["token_ids"][start:end] == truth and branch["mask"][start:end] == [1] * len(truth)
        drawing = {**DRAWN, "temperature": HOT["temperature"], "stop": {"ignore_eos": True}}
        (again,) = direct.generate(branch["token_ids"][:start], **drawing).completions
        assert again.token_ids.tolist() == truth
        assert np.allclose(branch["logprobs"][start:end], again.logprobs, atol=1e-4)
    assert sum(branch["mask"]) == len(drawn) + len(more)
    assert all((value is None) == (not drew) for value, drew in zip(branch["logprobs"], branch["mask"], strict=True))
    assert {(run["start"], run["end"]) for run in branch["weight_versions"]} == {
        (each["start"], each["end"]) for each in found["turns"]
    }


def test_a_request_may_do_without_kept_tokens(client: httpx.Client) -> None:
    said, _ = turn(client, "with", [user("17:")], **HOT | {"max_tokens": 100})  # special tokens have no text
    talk = [user("17:"), said, user("5:")]
    _, (anew, _) = turn(client, "with", talk, keep_tokens=False)
    assert anew == turn(client, "another", talk)[1][0] != turn(client, "with", talk)[1][0]
    assert len(kept(client, "with")["turns"]) == 2
    assert refused(client, CHAT, {"messages": talk, "keep_tokens": "no"}) == "keep_tokens"


def test_a_stream_is_kept_as_a_whole_answer_is(client: httpx.Client) -> None:
    turn(client, "whole", [user("17:")])
    USED.append((client, "stream"))
    events(client, CHAT, {"messages": [user("17:")], **DRAWN}, headers={"X-Session-ID": "stream"})
    whole, stream = (kept(client, name)["branches"] for name in ("whole", "stream"))
    assert whole == stream


def test_an_edited_history_begins_a_branch_at_the_last_turn_that_is_unchanged(client: httpx.Client) -> None:
    first, tokens = turn(client, "edits", [user("17:")])
    known = [user("17:"), first]
    second, _ = turn(client, "edits", [*known, user(" 30:")])
    turn(client, "edits", [*known, user(" 40:")])  # another question
    turn(client, "edits", [*known, user(" 30:"), {**second, "content": " 7"}, user(" 50:")])  # another answer
    turn(client, "edits", [user("23:"), first, user(" 30:")])  # another beginning, as after a compaction
    tools = [{"type": "function", "function": {"name": "f"}}]
    turn(client, "edits", [*known, user(" 30:")], tools=tools, tool_choice="none")  # other tools
    found = kept(client, "edits")
    assert [each["parent"] for each in found["turns"]] == [None, 0, 0, 0, None, None]
    assert [each["common_messages"] for each in found["turns"]] == [0, 2, 2, 3, 0, 0]
    assert [branch["turns"] for branch in found["branches"]] == [[0, 1], [0, 2], [0, 3], [4], [5]]
    beginning = sum(map(len, tokens))
    assert [branch["shared_tokens"] for branch in found["branches"]] == [0, beginning, beginning, 0, 0]
    for branch in found["branches"][:3]:
        assert branch["token_ids"][:beginning] == [*tokens[0], *tokens[1]]


@pytest.mark.parametrize(
    "changes",
    [
        {"content": [{"type": "text", "text": " 18 19"}]},
        {"content": "18 19\n"},
        {"tool_calls": [], "content": " 18 19"},
        {"refusal": None, "content": " 18 19", "annotations": None},
    ],
)
def test_an_answer_that_a_client_sends_in_another_form_is_unchanged(
    client: httpx.Client, changes: dict[str, Any]
) -> None:
    name = f"form{sorted(changes)}{changes['content']!r}".encode().hex()[:100]
    said, _ = turn(client, name, [user("17:")], temperature=0, max_tokens=6)
    assert said["content"] == " 18 19"
    turn(client, name, [user("17:"), {"role": "assistant", **changes}, user(" 30:")])
    assert [each["parent"] for each in kept(client, name)["turns"]] == [None, 0]


def test_tokens_of_a_client_come_before_kept_ones(client: httpx.Client) -> None:
    said, _ = turn(client, "sent", [user("17:")])
    own = {"prompt_token_ids": token_ids("17:"), "generation_token_ids": [*token_ids(" 18"), EOS]}
    _, (prompt, _) = turn(client, "sent", [user("17:"), {**said, **own}, user(" 19:")])
    assert prompt == [*token_ids("17: 18"), EOS, *token_ids(" 19:")]
    assert [each["parent"] for each in kept(client, "sent")["turns"]] == [None, None]


def test_every_completion_of_a_request_is_a_turn(client: httpx.Client) -> None:
    USED.append((client, "several"))
    body = {"messages": [user("17:")], "n": 3, **DRAWN}
    post(client, CHAT, body, headers={"X-Session-ID": "several"})
    assert len(kept(client, "several")["branches"]) == 3


def test_an_answer_that_is_cut_short_goes_on_in_its_own_tokens(client: httpx.Client) -> None:
    said, tokens = turn(client, "cut", [user("17:")], temperature=0, max_tokens=4)
    goes_on = {"continue_final_message": True, "temperature": 0, "max_tokens": 4}
    more, (prompt, _) = turn(client, "cut", [user("17:"), said], **goes_on)
    assert prompt == [*tokens[0], *tokens[1]]
    whole = {**said, "content": said["content"] + more["content"]}
    turn(client, "cut", [user("17:"), whole, user(" 30:")])
    assert [each["parent"] for each in kept(client, "cut")["turns"]] == [None, 0, 1]


def test_a_thought_that_came_in_two_turns_is_unchanged() -> None:
    kept_tokens, how = Trajectories(1 << 20, 60.0), Rendering(None, {}, None, False)
    drawn = AnswerTokens(np.array([7], np.int32), np.zeros(1, np.float32), [(0, 1)])
    messages, prompt = [user("17:")], [1]
    for content, thought in (("", "half a "), ("Hello", "half a thought")):
        known = kept_tokens.beginning("s", messages, how)
        answer = {"role": "assistant", "content": content, "reasoning_content": thought}
        kept_tokens.keep("s", known, prompt, answer, 1, drawn, {})
        messages, prompt = [user("17:"), answer], [*prompt, 7]
    assert kept_tokens.beginning("s", [*messages, user("18:")], how).parent == 1
    messages[1]["reasoning_content"] = "another thought"
    assert kept_tokens.beginning("s", [*messages, user("18:")], how).parent is None


def test_a_session_is_deleted_and_unknown_ones_are_errors(client: httpx.Client) -> None:
    turn(client, "gone", [user("17:")])
    turn(client, "job/1 a", [user("17:")])
    assert kept(client, "job/1%20a")["session"] == "job/1 a"
    assert client.delete("/v1/trajectories/gone").json() == {"session": "gone", "deleted": True}
    for name in ("gone", "never", "x" * 3000, "%2e%2e", "%ff"):
        for method in ("GET", "DELETE"):
            answer = client.request(method, f"/v1/trajectories/{name}")
            assert answer.status_code == 404 and answer.json()["error"]["param"] == "session"
    turn(client, "gone", [user("17:")])
    assert len(kept(client, "gone")["turns"]) == 1


def test_memory_is_bounded(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint], max_kept_bytes=5000) as small:
        for place in range(8):
            turn(small, f"session{place}", [user("17:")])
            finish(small, f"session{place}")
        found = [small.get(f"/v1/trajectories/session{place}").status_code for place in range(8)]
        assert found[0] == 404 and found[-1] == 200
    with gateway([worker.endpoint], max_kept_bytes=4000) as small:
        body = {"messages": [user("17:")], "max_tokens": 200, "ignore_eos": True}
        events(small, CHAT, body, headers={"X-Session-ID": "streamed"})
        finish(small, "streamed")
        assert small.get("/v1/trajectories/streamed").status_code == 200  # events take no memory
    with gateway([worker.endpoint], max_kept_bytes=0) as none:
        turn(none, "none", [user("17:")])
        finish(none, "none")
        assert none.get("/v1/trajectories/none").status_code == 404
        answer = post(none, "/v1/responses", {"input": "17:", "max_output_tokens": 2})
        assert not answer["store"] and none.get(f"/v1/responses/{answer['id']}").status_code == 404


def test_values_are_kept_up_to_a_size_and_an_age() -> None:
    now, gone = [0.0], list[tuple[str, int]]()
    values: ExpiringCache[str, int] = ExpiringCache(100, 10.0, lambda: now[0], lambda *value: gone.append(value))
    for name, size in (("a", 40), ("b", 40), ("a", 50)):
        values.put(name, size, size)
    assert values.get("a") == 50 and values.get("b") == 40
    values.put("c", 1, 30)  # `a` is unused for the longest
    assert values.get("a") is None and values.get("b") == 40 and len(values) == 2
    now[0] = 9.0
    assert values.get("c") == 1
    now[0] = 11.0
    assert values.get("b") is None and values.get("c") == 1
    assert values.drop("c") and not values.drop("c")
    values.put("small", 1, 10)
    values.put("large", 1, 101)
    assert values.get("large") is None and values.get("small") == 1
    values.put("small", 1, 101)
    assert values.get("small") is None and len(values) == 0
    assert gone == [("a", 50), ("b", 40), ("c", 1), ("small", 1)], "each once, but not a value with a successor"


@pytest.mark.parametrize("value", [None, 5, [], [{"type": "text"}], [5], {"a": 1}, "\x00", "x" * 100_000])
def test_odd_messages_of_a_session_are_errors_at_most(client: httpx.Client, value: Any) -> None:
    USED.append((client, "odd"))
    call = {"function": {"name": value, "arguments": value}}
    for message in (
        value,
        {"role": value, "content": "17:"},
        {"role": "user", "content": value},
        {"role": "assistant", "content": value, "tool_calls": value},
        {"role": "assistant", "tool_calls": [value, call]},
        {"role": "assistant", "content": "1", "reasoning_content": value},
    ):
        for messages in ([message], [user("17:"), message, user("17:")]):
            body = {"messages": messages, "max_tokens": 1}
            answer = client.post(CHAT, json=body, headers={"X-Session-ID": "odd"})
            assert answer.status_code in (200, 400), answer.text
    assert refused(client, CHAT, {"messages": []}, headers={"X-Session-ID": "odd"}) == "messages"
