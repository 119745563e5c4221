"""`/v1/messages` (Anthropic's Messages API), held against the same conversation by `/v1/chat/completions`."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import gateway, post
from tests.support.worker.harness import EOS, text_of, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

PATH = "/v1/messages"
USER = {"role": "user", "content": "17:"}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
BODY: dict[str, Any] = {"model": "ones", "max_tokens": 12, "messages": [USER], "temperature": 0}


def stream(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        text = answer.read().decode()
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def refused(client: httpx.Client, body: Any, status: int = 400, path: str = PATH) -> str | None:
    """The field that an error in Anthropic's form names."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found["type"] == "error" and found["error"]["message"] and found["error"]["code"] == status
    assert found["error"]["type"].endswith("_error")
    return found["error"]["param"]


def test_an_answer_and_its_stream(client: httpx.Client) -> None:
    answer = post(client, PATH, BODY)
    assert answer["role"] == "assistant" and answer["type"] == "message" and answer["model"] == "ones"
    assert answer["content"] == [{"type": "text", "text": " 18 19 20 21", "citations": None}]
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 12
    found = stream(client, BODY)
    assert [event["type"] for event in found[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in found[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    said = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(said) == answer["content"][0]["text"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens" and found[-2]["usage"]["output_tokens"] == 12
    whole = found[-2]["usage"]
    assert whole["input_tokens"] + whole["cache_read_input_tokens"] == found[0]["message"]["usage"]["input_tokens"] == 3


def test_how_an_answer_ends(client: httpx.Client) -> None:
    stopped = post(client, PATH, BODY | {"stop_sequences": ["x", " 20"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " 20")
    assert stopped["content"][0]["text"] == " 18 19"
    ended = post(client, PATH, BODY | {"logit_bias": {str(EOS): 100.0}})
    assert ended["stop_reason"] == "end_turn" and ended["stop_sequence"] is None
    full = post(client, PATH, BODY | {"max_tokens": 100_000, "ignore_eos": True})
    assert full["stop_reason"] == "model_context_window_exceeded" and full["usage"]["output_tokens"] == 512 - 3
    assert post(client, PATH, BODY | {"max_tokens": 0})["content"] == []
    assert stream(client, BODY | {"max_tokens": 0})[-1] == {"type": "message_stop"}


def test_blocks_are_rendered_as_the_same_chat(client: httpx.Client) -> None:
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "17"}, {"type": "text", "text": ":"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "9", "signature": "x"},
                {"type": "text", "text": " 18"},
                {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": " 3"}]},
                {"type": "text", "text": " 19:", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "5 \n\n6"},
        {"role": "user", "content": [{"type": "text", "text": "17"}, {"type": "text", "text": ":"}]},
        {"role": "assistant", "content": " 18", "reasoning_content": "9", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "add", "content": " 3"},
        {"role": "user", "content": " 19:"},
    ]
    body = {
        "model": "ones",
        "messages": blocks,
        "system": [{"type": "text", "text": "5 "}, {"type": "text", "text": "6"}],
    }
    counted = post(client, f"{PATH}/count_tokens", body)["input_tokens"]
    assert counted == len(post(client, "/v1/chat/completions/render", {"messages": chat})["token_ids"])
    client.post(PATH, json=BODY | body, headers={"X-Session-ID": "blocks"})
    found = client.get("/v1/trajectories/blocks").json()
    assert text_of(found["branches"][0]["token_ids"][: found["turns"][0]["start"]]).endswith(" 3 19:")
    assert found["turns"][0]["messages"] == len(chat)
    assert post(client, "/finish_session?session_id=blocks")["finished"]


def test_thoughts_may_be_asked_to_stay(client: httpx.Client) -> None:
    keeps = {"edits": [{"keep": "all", "type": "clear_thinking_20251015"}]}  # as Claude Code sends it
    assert post(client, PATH, BODY | {"context_management": keeps})["content"] == post(client, PATH, BODY)["content"]


def test_the_beginning_of_an_answer_goes_on(client: httpx.Client) -> None:
    messages = [USER, {"role": "assistant", "content": " 18"}]
    assert post(client, PATH, BODY | {"messages": messages, "max_tokens": 3})["content"][0]["text"] == " 19"


def test_a_choice_that_demands_a_call(client: httpx.Client) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
        fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 300, "temperature": 1.0, "seed": 1}
        answer = client.post(PATH, json=BODY | fields)
        assert answer.status_code in (200, 400), answer.text  # this tokenizer has no braces


def test_an_aborted_answer_may_go_on(client: httpx.Client, direct: RolloutClient) -> None:
    direct.pause()
    response = {"input": "17:", "max_output_tokens": 100, "request_id": "second"}
    with ThreadPoolExecutor() as threads:
        message = threads.submit(post, client, PATH, BODY | {"max_tokens": 100, "request_id": "first"})
        other = threads.submit(post, client, "/v1/responses", response)
        until(lambda: direct.status()["queue"]["waiting"] == 2, "the requests")
        assert post(client, "/abort_requests", {"request_ids": ["first", "second"]}) == {"aborted": 2}
        direct.resume()
        assert message.result()["stop_reason"] == "pause_turn" and message.result()["content"] == []
        assert other.result()["status"] == "incomplete" and other.result()["incomplete_details"]["reason"] == "abort"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "zz"}]}]},
            "messages.0.content.0",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages.1.content.0.input",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages.1.content.0.type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "x"}}]}
                ]
            },
            "messages.0.content.0.source.type",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:,x"}}]},
                ]
            },
            "messages.1.content.0.source",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL]}, "tools"),  # no format of calls is known here
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format"),
        ({"output_config": {"task_budget": 1}}, "output_config.task_budget"),
        ({"stop_sequences": [5]}, "stop_sequences.0"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": -1}, "temperature"),
        ({"container": "x"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ({"n": 2}, "n"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    assert refused(client, BODY | fields) == named


def test_errors_have_the_form_of_the_api(client: httpx.Client) -> None:
    assert refused(client, BODY | {"model": "other"}, 404) == "model"
    assert refused(client, {"model": "other", "messages": [USER]}, 404, f"{PATH}/count_tokens") == "model"
    long = [{"role": "user", "content": "1" * 600}]
    assert refused(client, BODY | {"messages": long}) == "messages"
    assert client.post(PATH, content=b"{").json()["error"]["type"] == "invalid_request_error"
    assert client.get(PATH).json()["type"] == "error"


def test_a_key_comes_in_either_header(worker: WorkerProcess) -> None:
    key = "0123456789abcdef"
    with gateway([worker.endpoint], keys=(key.encode(),), served_model_name=("ones",)) as closed:
        refusal = closed.post(PATH, json=BODY)
        assert refusal.status_code == 401 and refusal.json()["error"]["type"] == "authentication_error"
        for headers in (
            {"X-Api-Key": key},
            {"Authorization": f"Bearer {key}"},
            {"X-Api-Key": key, "Authorization": "x"},
        ):
            assert closed.post(PATH, json=BODY, headers=headers).status_code == 200
        for headers in ({"X-Api-Key": "x" * 16}, {"X-Api-Key": ""}, {"X-Api-Key": f"Bearer {key}"}):
            assert closed.post(PATH, json=BODY, headers=headers).status_code == 401
        assert closed.get("/v1/models", headers={"X-Api-Key": key}).status_code == 200
