"""`/v1/responses` (OpenAI's Responses API): answers, streams, stored responses, and what is refused."""

import json
from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import gateway, post, refused
from trainer_bridge.client.launch import WorkerProcess

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "17:", "max_output_tokens": 12, "temperature": 0}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


def stream(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, named by their types and numbered."""
    with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        text = answer.read().decode()
    found = []
    for place, block in enumerate(text.strip().split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == place
    return found


def alike(response: dict[str, Any]) -> dict[str, Any]:
    """A response without ids, times and what the prefix cache had."""
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    shown = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    return shown | {"output": items, "usage": usage}


def test_an_answer_and_its_stream(client: httpx.Client) -> None:
    answer = post(client, PATH, BODY | {"stop": " 20"})
    (item,) = answer["output"]
    assert answer["status"] == item["status"] == "completed" and answer["object"] == "response"
    part = {"type": "output_text", "text": " 18 19", "annotations": [], "logprobs": []}
    assert item["content"] == [part] and answer["incomplete_details"] is None
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    found = stream(client, BODY | {"stop": " 20"})
    names = [event["type"].removeprefix("response.") for event in found if not event["type"].endswith("delta")]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names == [*opening, "output_text.done", "content_part.done", "output_item.done", "completed"]
    said = [event["delta"] for event in found if event["type"].endswith("delta")]
    assert "".join(said) == part["text"]
    assert alike(found[-1]["response"]) == alike(answer)


def test_an_answer_that_is_cut_short_is_incomplete(client: httpx.Client) -> None:
    answer = post(client, PATH, BODY)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    last = stream(client, BODY)[-1]
    assert last["type"] == "response.incomplete" and alike(last["response"]) == alike(answer)
    full = post(client, PATH, BODY | {"max_output_tokens": 100_000, "ignore_eos": True})
    assert full["usage"]["total_tokens"] == 512
    nothing = BODY | {"max_output_tokens": 0}
    (empty,) = post(client, PATH, nothing)["output"]
    assert stream(client, nothing)[-1]["response"]["output"][0]["content"] == empty["content"]
    assert empty["content"][0]["text"] == ""


def test_a_chain_of_responses_is_one_trajectory(client: httpx.Client) -> None:
    first = post(client, PATH, BODY | {"instructions": "5 "})
    second = post(client, PATH, BODY | {"input": " 30:", "instructions": "5 ", "previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"] and second["usage"]["input_tokens"] > 15
    items = [{"role": "user", "content": "17:"}, *first["output"], {"role": "user", "content": " 30:"}]
    again = post(client, PATH, BODY | {"input": items, "instructions": "5 "})
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    for name in (first["id"], second["id"]):
        found = client.get(f"/v1/trajectories/{name}").json()
        assert found["session"] == first["id"] and [turn["parent"] for turn in found["turns"]] == [None, 0]
        assert [turn["id"] for turn in found["turns"]] == [first["id"], second["id"]]
    other = post(client, PATH, BODY | {"input": " 40:", "previous_response_id": first["id"]})  # without instructions
    assert other["usage"]["input_tokens"] == second["usage"]["input_tokens"] - 2
    assert client.get(f"/v1/trajectories/{other['id']}").json()["turns"][-1]["parent"] is None


def test_a_stored_response_is_not_replaced_by_one_of_the_same_request_id(client: httpx.Client) -> None:
    same = {"headers": {"X-Request-Id": "task"}}
    first = post(client, PATH, BODY, **same)
    second = post(client, PATH, BODY | {"input": " 30:", "previous_response_id": first["id"]}, **same)
    assert first["id"] == "resp_task" and second["id"].startswith("resp_task-")
    for each in (first, second):
        assert client.get(f"{PATH}/{each['id']}").json() == each
    assert len(client.get(f"/v1/trajectories/{second['id']}").json()["turns"]) == 2


def test_a_stored_response_is_read_and_deleted(client: httpx.Client) -> None:
    answer = post(client, PATH, BODY)
    streamed = stream(client, BODY)[-1]["response"]
    for each in (answer, streamed):
        assert client.get(f"{PATH}/{each['id']}").json() == each
    assert client.delete(f"{PATH}/{answer['id']}").json() == {
        "id": answer["id"],
        "object": "response",
        "deleted": True,
    }
    for name in (answer["id"], post(client, PATH, BODY | {"store": False})["id"], "x" * 3000, "%ff"):
        for method in ("GET", "DELETE"):
            gone = client.request(method, f"{PATH}/{name}")
            assert gone.status_code == 404 and gone.json()["error"]["param"] == "response_id"
        assert refused(client, PATH, BODY | {"previous_response_id": name}) == "previous_response_id"


def test_stored_responses_are_bounded(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint], max_kept_bytes=20_000) as small:
        ids = [post(small, PATH, BODY)["id"] for _ in range(8)]
        found = [small.get(f"{PATH}/{each}").status_code for each in ids]
        assert found[0] == 404 and found[-1] == 200


@pytest.mark.parametrize("chained", [True, False])
def test_all_texts_of_stored_responses_count(worker: WorkerProcess, chained: bool) -> None:
    """What a chain shares counts each time: the responses before may be forgotten, and their messages stay."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 30_000}]}
    with gateway([worker.endpoint], max_kept_bytes=200_000) as small:
        ids: list[str | None] = [None]
        for place in range(4):
            body = BODY | {"previous_response_id": ids[-1] if chained else None}
            long = {"input": [thought, {"role": "user", "content": "17:"}]} if chained and not place else {}
            ids.append(post(small, PATH, body | long | ({} if chained else {"metadata": {"a": "x" * 30_000}}))["id"])
        found = [small.get(f"{PATH}/{each}").status_code for each in ids[1:]]
        assert found == [404, 404, 200, 200]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{}]}, "input.0.role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.image_url",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input.0.arguments",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "zz", "output": "x"}]}, "input.0"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"input": "1" * 600}, "input"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [TOOL]}, "tools"),  # no format of calls is known here
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "x"}, "tool_choice"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"volume": 1}}, "text.volume"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "x"}}]}, "tools.0.format.type"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools.0.format.syntax"),
        ({"tools": [{"type": "custom", "name": "f", "format": 5}]}, "tools.0.format"),
        ({"tools": [{"type": "namespace", "name": "f"}]}, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "name": "f", "tools": [5]}]}, "tools.0.tools.0"),
        ({"tools": [{"type": "namespace", "name": "f", "tools": [{"type": "shell"}]}]}, "tools.0.tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input.0.input"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"stop": ""}, "stop.0"),
        ({"n": 2}, "n"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    assert refused(client, PATH, BODY | fields) == named
