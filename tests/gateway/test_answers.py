"""What a model writes, over HTTP: whatever it is, tokens and log-probs arrive, and a stream is the whole answer."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.gateway.chat_templates import tokenizer_with
from tests.support.gateway.harness import events, gateway, post, refused
from tests.support.kernels.grids import checkered, nightly
from tests.support.models.families import make_checkpoint
from tests.support.worker.harness import assert_idle, launch

CHAT, TEXT, SGLANG = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hello"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "does", "parameters": PARAMETERS}}]
END = "<|im_end|>"
DEEP = "[" * 16  # one token
BUDGET, LOOP = {"thinking_token_budget": 3}, {"repetition_detection": {"max_pattern_size": 2, "min_count": 5}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = tokenizer_with("qwen3", "")
    found.eos_token = END  # else there are two tokens that end an answer
    found.add_tokens([DEEP])
    return found


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[dict[str, httpx.Client]]:
    """One worker, whose model has more ids than its tokenizer, and gateways in front of it."""
    folder: Path = tmp_path_factory.mktemp("answers")
    end = tokenizer.convert_tokens_to_ids(END)
    make_checkpoint(
        "qwen3", folder / "model", vocab_size=len(tokenizer) + 4, eos_token_id=end, max_position_embeddings=4096
    )
    tokenizer.save_pretrained(folder / "model")
    with ExitStack() as stack:
        worker = stack.enter_context(launch(folder / "model", log=folder / "log", max_rows=8))

        def front(**flags: Any) -> httpx.Client:
            return stack.enter_context(gateway([worker.endpoint], **flags))

        yield {
            "hermes": front(),
            "coarse": front(stream_every=5),
            "llama3": front(tool_parser="llama3", constrain_reasoning=True),
            "think": front(reasoning_parser="auto"),
            "coarse think": front(reasoning_parser="auto", stream_every=5),
            "strict": front(reasoning_parser="auto", constrain_reasoning=True),
        }
        assert_idle(worker)


def said(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose model writes this text."""
    return {
        "messages": MESSAGES,
        "max_tokens": 600,
        "structured_outputs": {"choice": [text]},
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 1,
        **fields,
    }


def joined(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream's events, as a client joins them."""
    choices: dict[int, dict[str, Any]] = {}
    for event in found:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"message": {}, "index": choice["index"]})
            delta = choice.pop("delta", {})
            for name, value in delta.items():
                calls = (
                    [{key: item for key, item in call.items() if key != "index"} for call in value]
                    if name == "tool_calls"
                    else value
                )
                old = whole["message"].get(name)
                whole["message"][name] = calls if old is None else old + calls
            for name, value in choice.items():
                old = whole.get(name)
                if name == "logprobs" and old is not None and value is not None:
                    whole[name] = {column: old[column] + value[column] for column in value}
                elif name in ("token_ids", "text", "forced") and old is not None:
                    whole[name] = old + value
                elif value is not None or name not in whole:
                    whole[name] = value
    return dict(sorted(choices.items()))


def parted(value: Any, numbers: list[float]) -> Any:
    """The value without its floats, which go to `numbers`."""
    if isinstance(value, float):
        numbers.append(value)
        return float
    if isinstance(value, dict):
        return {name: parted(item, numbers) for name, item in value.items()}
    return [parted(item, numbers) for item in value] if isinstance(value, list) else value


def assert_alike(found: Any, wanted: Any) -> None:
    """The same, but for numbers that depend a little on how many tokens were computed at once."""
    ours: list[float] = []
    others: list[float] = []
    assert parted(found, ours) == parted(wanted, others)
    assert ours == pytest.approx(others, abs=2e-3)


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """The choice without the ids of calls, which are new in every answer, and without absent parts of the message."""
    message = {name: value for name, value in choice["message"].items() if value is not None}
    for call in message.get("tool_calls", []):
        call["id"] = ""
    return {**choice, "message": message}


def answered(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer, which must be those of the stream."""
    whole = post(client, CHAT, body)["choices"]
    streamed = [without_ids(choice) for choice in joined(events(client, CHAT, body)).values()]
    assert_alike(streamed, [without_ids(json.loads(json.dumps(choice))) for choice in whole])
    return whole


def check_tokens(choice: dict[str, Any], text: str, tokenizer: Any) -> None:
    """All tokens of the text are there, each with its log-probs and bytes."""
    tokens = choice["token_ids"]
    assert tokenizer.decode(tokens).removesuffix(END) == text
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == tokens
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode().removesuffix(END) == text
    assert all(len(entry["top_logprobs"]) >= 2 and isinstance(entry["logprob"], float) for entry in content)


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (hermes('{"a":"\\ud83d"}'), {"a": "\ufffd"}),
        (hermes('{"a\\udc00":1}'), {"a\ufffd": 1}),
        (hermes('{"a":"echo </tool_call> done"}'), {"a": "echo </tool_call> done"}),
        (hermes('{"a":"é𝄞"}'), {"a": "é𝄞"}),
        (hermes('{"a":NaN}'), None),
        (hermes('{"a":1e999}'), None),
        (hermes('{"a":' + "[" * 210 + "]" * 210 + "}"), None),
        (hermes('{"a":'), None),
        ("no call", None),
    ],
)  # fmt: skip
def test_whatever_a_call_holds_all_completions_arrive(
    gateways: dict[str, httpx.Client], tokenizer: Any, text: str, arguments: Any
) -> None:
    for name in ("hermes", "coarse") if len(text) < 400 else ("coarse",):  # which reads a long answer in few pieces
        for choice in answered(gateways[name], said(text, tools=TOOLS, n=2 if len(text) < 400 else 1)):
            check_tokens(choice, text, tokenizer)
            if arguments is None:
                assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"
                assert ("missing_views" in choice) == ("tool_call" in text)
            else:
                (call,) = choice["message"]["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == arguments
                assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
                assert "missing_views" not in choice


def test_half_a_surrogate_pair_in_a_call_of_llama(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    text = '{"name":"\\ud83d","parameters":{"a":"\\ude00"}}'
    (choice,) = answered(gateways["llama3"], said(text, tools=TOOLS))
    check_tokens(choice, text, tokenizer)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "\ufffd", "arguments": '{"a": "\ufffd"}'}


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("patch", '{"input":"+\\n\\u00e9"}', {"type": "custom_tool_call", "name": "patch", "input": "+\né"}),
        ("patch", '{"diff":"+"}', {"type": "custom_tool_call", "name": "patch", "input": '{"diff": "+"}'}),
        ("patch", '{"input":1}', {"type": "custom_tool_call", "name": "patch", "input": '{"input": 1}'}),
        ("f", '{"a":"x"}', {"type": "function_call", "name": "f", "arguments": '{"a": "x"}'}),
        (
            "agents__close",
            '{"a":"x"}',
            {"type": "function_call", "namespace": "agents", "name": "close", "arguments": '{"a": "x"}'},
        ),
        ("other", '{"a":"x"}', {"type": "function_call", "name": "other", "arguments": '{"a": "x"}'}),
    ],
)
def test_calls_of_all_tools_of_responses(
    gateways: dict[str, httpx.Client], name: str, arguments: str, item: dict[str, Any]
) -> None:
    """A tool gets its arguments or its text; whatever the model writes is sent back as it was."""
    function = {"type": "function", "name": "close", "parameters": PARAMETERS}
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /.*/'}
    tools = [
        {"type": "custom", "name": "patch", "description": "edits", "format": grammar},
        {"type": "namespace", "name": "agents", "description": "others", "tools": [function]},
        function | {"name": "f"},
    ]
    text, client = hermes(arguments, name), gateways["hermes"]
    body = {"input": "Hello", "tools": tools, "seed": 1, "structured_outputs": {"choice": [text]}}
    (found,) = post(client, RESPONSES, body)["output"]
    call_id = found.pop("call_id")
    assert {key: value for key, value in found.items() if key != "id"} == item | {"status": "completed"}
    with client.stream("POST", RESPONSES, json=body | {"stream": True}) as answer:
        told = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    argument = "input" if "input" in item else "arguments"
    part = {"input": "custom_tool_call_input", "arguments": "function_call_arguments"}[argument]
    assert [each["type"].removeprefix("response.") for each in told][2:-1] == [
        *("output_item.added", f"{part}.delta", f"{part}.done", "output_item.done")
    ]
    assert told[3]["delta"] == told[4][argument] == told[5]["item"][argument] == item[argument]
    result = {"type": f"{found['type']}_output", "call_id": call_id, "output": "done"}
    again = post(client, RESPONSES, body | {"input": [item | {"call_id": call_id}, result]})
    chained = post(client, RESPONSES, body | {"previous_response_id": again["id"], "input": "More"})
    kept = client.get(f"/v1/trajectories/{again['id']}").json()
    assert chained["status"] == "completed" and [turn["parent"] for turn in kept["turns"]] == [None, 0]


def test_a_tool_with_a_text_is_a_function_to_the_model(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    """The same prompt as of a chat: the grammar stands in the description, and the template gets the verbosity."""
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    tool = {"type": "custom", "name": "patch", "description": "edits", "format": grammar}
    shape = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {
        "name": "patch",
        "parameters": shape,
        "description": "edits\n\nThe input has this grammar (regex):\n[a-z]+",
    }
    chat = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
    wanted = post(gateways["hermes"], f"{CHAT}/render", chat)["token_ids"]
    body = {"input": "Hello", "tools": [tool], "text": {"verbosity": "low"}, "max_output_tokens": 1}
    answer = post(gateways["hermes"], RESPONSES, body)
    kept = gateways["hermes"].get(f"/v1/trajectories/{answer['id']}").json()
    assert kept["branches"][0]["token_ids"][: kept["turns"][0]["start"]] == wanted
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_a_demanded_text_of_a_tool(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    ends = {str(tokenizer.convert_tokens_to_ids(token)): 60.0 for token in ('"', "}", END)}
    tool = {"type": "custom", "name": "patch"}
    body = {"input": "Hello", "tools": [tool], "tool_choice": {"type": "custom", "name": "patch"}, "seed": 1}
    (item,) = post(gateways["hermes"], RESPONSES, body | {"max_output_tokens": 600, "logit_bias": ends})["output"]
    assert item["type"] == "custom_tool_call" and item["name"] == "patch" and isinstance(item["input"], str)


@pytest.mark.parametrize("arguments", ['{"a":"\\ud83d"}', '{"a\\udc00":["\\ud83d"]}'])
def test_a_conversation_may_have_a_call_with_half_a_surrogate_pair(
    gateways: dict[str, httpx.Client], tokenizer: Any, arguments: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, *MESSAGES]
    found = post(gateways["hermes"], f"{CHAT}/render", {"messages": messages})["token_ids"]
    assert "\ufffd" in tokenizer.decode(found)


def test_a_call_in_a_conversation_that_is_nested_too_deeply_is_refused(gateways: dict[str, httpx.Client]) -> None:
    for levels in range(100, 2_000, 60):
        call = {"type": "function", "function": {"name": "f", "arguments": f"{'[' * levels}{']' * levels}"}}
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = gateways["hermes"].post(f"{CHAT}/render", json={"messages": messages})
        assert answer.status_code in (200, 400), levels
        assert answer.status_code == 200 or answer.json()["error"]["param"].startswith("messages")


def test_roles_that_a_template_leaves_out(gateways: dict[str, httpx.Client]) -> None:
    """A developer's text is a system's; any other role is an error, as its text would be lost."""
    client, path = gateways["hermes"], f"{CHAT}/render"

    def prompt(role: str) -> list[int]:
        return post(client, path, {"messages": [{"role": role, "content": "be kind"}, *MESSAGES]})["token_ids"]

    assert prompt("developer") == prompt("system") != prompt("user")
    for role in ("wizard", "function", "User", "", "x" * 1000):
        messages = [*MESSAGES, {"role": role, "content": "be kind"}]
        assert refused(client, path, {"messages": messages}) == "messages.1.role"


def test_effort_and_verbosity_reach_the_template(gateways: dict[str, httpx.Client]) -> None:
    """As options of the template, which names its own."""
    path, client = f"{CHAT}/render", gateways["hermes"]
    silent = post(client, path, {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}})
    thinking = post(client, path, {"messages": MESSAGES, "reasoning_effort": "low", "verbosity": "low"})
    none = post(client, path, {"messages": MESSAGES, "reasoning_effort": "none"})
    assert none["token_ids"] == silent["token_ids"] != thinking["token_ids"]
    assert refused(client, path, {"messages": MESSAGES, "verbosity": "loud"}) == "verbosity"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_demanded_call_that_is_cut_off_is_text(gateways: dict[str, httpx.Client], choice: Any) -> None:
    function = {"name": "f", "parameters": PARAMETERS | {"required": ["a"]}}  # five tokens are too few for them
    tools = [{"type": "function", "function": function}]
    body = said("", tools=tools, tool_choice=choice, max_tokens=5, structured_outputs=None)
    (found,) = answered(gateways["hermes"], body)
    assert found["message"]["content"] and found["finish_reason"] == "length" and len(found["token_ids"]) == 5
    assert list(found["missing_views"]) == ["tool_calls"]


def test_arguments_of_a_demanded_call_may_be_nested_deeply(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    nested: dict[str, Any] = {
        "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 1, "minItems": 1}}
    }
    parameters = nested | {"type": "object", "properties": {"a": {"$ref": "#/$defs/list"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    bias = {str(token): -100.0 for token in tokenizer.encode(" \t\r\n", add_special_tokens=False)}
    bias[str(tokenizer.convert_tokens_to_ids(DEEP))] = 100.0
    body = said(
        "",
        tools=tools,
        tool_choice="required",
        max_tokens=120,
        structured_outputs=None,
        logprobs=False,
        top_logprobs=0,
    )
    (found,) = answered(gateways["hermes"], body | {"logit_bias": bias})
    assert found["finish_reason"] == "length" and len(found["token_ids"]) == 120
    assert found["message"]["content"].count("[") > 1_000


def test_structured_output_of_a_thinking_model_is_the_content(
    gateways: dict[str, httpx.Client], tokenizer: Any
) -> None:
    """The prompt has opened the thoughts: the constraint begins after them, or there are none."""
    schema = {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
        },
    }
    open_thoughts = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    body = said(
        "", messages=open_thoughts, structured_outputs=None, response_format=schema, continue_final_message=True
    )
    (strict,) = answered(gateways["strict"], body)
    assert json.loads(strict["message"]["content"]) == {"a": 1} and strict["message"].get("reasoning_content") is None


@pytest.mark.parametrize(
    ("every", "thinks"),
    [("think", False), ("coarse think", True), *nightly(("think", True), ("coarse think", False))],
)
def test_a_constraint_begins_after_the_thoughts_if_there_are_any(
    gateways: dict[str, httpx.Client], tokenizer: Any, every: str, thinks: bool
) -> None:
    """Without thoughts, as the template decides, it holds from the first token on."""
    close = tokenizer.convert_tokens_to_ids("</think>")
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    form = {"messages": begun, "continue_final_message": True} if thinks else {}
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    for wanted, more in (
        ({"a": 1}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        ([{"name": "f", "parameters": {"a": 1}}], {"tool_choice": "required"}),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = said(
            "", structured_outputs=None, tools=tools, n=2, temperature=1.5, logit_bias={str(close): 5}, max_tokens=300,
            chat_template_kwargs={"enable_thinking": thinks}, **form, **more,
        )  # fmt: skip
        found = answered(gateways[every], body)
        assert found[0]["token_ids"] != found[1]["token_ids"]
        for choice in found:
            tokens, message = choice["token_ids"], choice["message"]
            assert (close in tokens) == thinks
            constrained = tokenizer.decode(tokens[tokens.index(close) + 1 if thinks else 0 :]).removesuffix(END)
            assert json.loads(constrained) == wanted
            if isinstance(wanted, dict):
                assert message["content"].strip() == constrained.strip()
                assert bool(message.get("reasoning_content")) == thinks
            else:
                (call,) = message["tool_calls"]
                assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_allowed_tokens_are_the_only_ones(gateways: dict[str, httpx.Client]) -> None:
    """The end of a completion is not among them."""
    body = {"temperature": 3.0, "n": 8, "allowed_token_ids": [40, 41], "return_token_ids": True, "max_tokens": 40}
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 7}):
        (*texts,) = post(gateways["hermes"], TEXT, {"prompt": "x", **body, **more})["choices"]
        chats = answered(gateways["hermes"], {"messages": MESSAGES, **body, **more, "seed": 3})
        for choice in (*texts, *chats):
            assert set(choice["token_ids"]) <= {40, 41} and len(choice["token_ids"]) == 40


def test_a_request_for_no_tokens_scores_its_prompt(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    """As one for a token does, up to the whole context."""
    client, prompt = gateways["hermes"], [(7 * place) % 250 for place in range(4095)]
    fields = {
        "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True, "n": 2, "temperature": 1.0,
        "return_weight_versions": True,
    }  # fmt: skip
    one = post(client, TEXT, {"prompt": prompt, "max_tokens": 1, **fields})
    none = post(client, TEXT, {"prompt": prompt, "max_tokens": 0, **fields})
    whole = post(client, TEXT, {"prompt": [*prompt, 9], "max_tokens": 0, **fields})
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["prompt_tokens"] == 4096
    for choice, longer, other in zip(none["choices"], whole["choices"], one["choices"], strict=True):
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([], "length", None)
        assert (choice["weight_versions"], choice["prompt_weight_version"]) == ([], 0)
        assert choice["text"] == tokenizer.decode(prompt) and other["text"].startswith(choice["text"])
        assert len(longer["logprobs"]["token_logprobs"]) == 4096
        columns = {name: column[:4095] for name, column in other["logprobs"].items()}
        assert_alike(choice["logprobs"], columns)
        assert_alike(choice["prompt_logprobs"], other["prompt_logprobs"])
        assert_alike(longer["prompt_logprobs"][:4095], other["prompt_logprobs"])

    (empty,) = joined(events(client, TEXT, {"prompt": "abc", "max_tokens": 0, "logprobs": 1})).values()
    assert (empty["text"], empty["finish_reason"]) == ("", "length")
    body = {"messages": MESSAGES, "max_tokens": 0, "logprobs": True, "n": 2, "tools": TOOLS}
    for more in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        for choice in answered(client, body | more | {"return_token_ids": True}):
            assert choice["finish_reason"] == "length" and choice["token_ids"] == []
            assert not choice["message"].get("tool_calls")
    scored = {"prompt_logprobs": 0, "return_weight_versions": True}
    assert post(client, CHAT, body | scored)["prompt_weight_version"] == 0
    sampling = {"sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}}
    answer = post(client, "/inference/v1/generate", {"token_ids": prompt, "return_weight_versions": True, **sampling})
    assert answer["prompt_weight_version"] == 0 and len(answer["prompt_logprobs"]) == 4095

    params = {"max_new_tokens": 0, "temperature": 1.0}
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    scores = post(client, SGLANG, body | {"sampling_params": params})["meta_info"]
    assert scores["completion_tokens"] == 0 and scores["output_token_logprobs"] == []
    known = [value for value, *_ in scores["input_token_logprobs"]]
    assert known[1:] == pytest.approx(none["choices"][0]["logprobs"]["token_logprobs"][1:4095], abs=1e-3)
    (last,) = events(client, SGLANG, {"input_ids": prompt, "sampling_params": params, "stream": True})
    assert last["text"] == "" and last["meta_info"]["finish_reason"]["type"] == "length"


def test_ids_beyond_the_vocabulary_have_no_text(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    beyond = len(tokenizer) + 2
    fields = {"max_tokens": 4, "temperature": 0, "logit_bias": {str(beyond): 100.0}, "return_token_ids": True}
    for special in (True, False):
        body = said("", structured_outputs=None, tools=TOOLS, skip_special_tokens=special, **fields)
        (choice,) = answered(gateways["hermes"], body)
        assert choice["token_ids"] == [beyond] * 4 and choice["message"]["content"] == ""
        assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[]] * 4
    answer = post(gateways["hermes"], TEXT, {"prompt": "x", "logprobs": 2, **fields})["choices"][0]
    assert answer["token_ids"] == [beyond] * 4 and answer["text"] == ""


@pytest.mark.parametrize(
    ("keep", "special", "every"),
    [
        *((True, True, "coarse"), (True, False, "hermes"), (False, True, "hermes"), (False, False, "coarse")),
        *nightly(*((True, True, "hermes"), (True, False, "coarse"), (False, True, "coarse"), (False, False, "hermes"))),
    ],
)
def test_what_ends_a_completion_is_in_its_text_if_that_is_asked_for(
    gateways: dict[str, httpx.Client], tokenizer: Any, keep: bool, special: bool, every: str
) -> None:
    client = gateways[every]
    letter = tokenizer.convert_tokens_to_ids("c")
    fields = {"max_tokens": 60, "seed": 1, "skip_special_tokens": special}
    for text, more, shown, reason in (
        ("ab", {}, "" if special else END, None),
        ("abcd", {"stop_token_ids": [letter]}, "c", letter),
        ("abcd", {"stop": ["bc"]}, "bc", "bc"),
        ("abbcbcd", {"stop": "bc", "min_tokens": 2}, "bc", "bc"),
    ):
        body = {**fields, **more, "structured_outputs": {"choice": [text]}, "include_stop_str_in_output": keep}
        wanted = text.partition("bc" if "stop" in more else "c")[0] + (shown if keep else "")
        (whole,) = post(client, TEXT, {"prompt": "x", **body})["choices"]
        assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (wanted, "stop", reason), (text, more)
        found = joined(events(client, TEXT, {"prompt": "x", **body}))[0]
        assert (found["text"], found["stop_reason"]) == (wanted, reason)
        (chat,) = answered(client, {"messages": MESSAGES, **body})
        assert (chat["message"]["content"], chat["stop_reason"]) == (wanted, reason)
        params = {"max_new_tokens": 60, "skip_special_tokens": special, "no_stop_trim": keep, **more}
        body = {"text": "x", "sampling_params": params | {"regex": text}}
        answer = post(client, SGLANG, body)
        assert answer["text"] == wanted
        *_, last = events(client, SGLANG, body)
        assert last["text"] == wanted


@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
def test_a_stop_string_cuts_thoughts_and_answers_at_its_first_character(
    gateways: dict[str, httpx.Client], tokenizer: Any, seed: int
) -> None:
    """No piece of it is in an event, although a part of a mark may wait beside a part of a stop string."""
    body: dict[str, Any] = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "<think>"}],
        **{"continue_final_message": True, "max_tokens": 60, "seed": seed, "temperature": 3.0, "ignore_eos": True},
        "logit_bias": {str(tokenizer.convert_tokens_to_ids("</think>")): 12.0},
    }
    (whole,) = answered(gateways["think"], body)
    thoughts, answer = whole["message"]["reasoning"] or "", whole["message"]["content"]
    said_first = thoughts + "</think>"
    tried = 0
    for at in range(len(answer) - 3):
        stop = answer[at : at + 3]
        first = (said_first + answer).find(stop) == len(said_first) + at
        if tried < 4 and first and stop.isascii() and stop.strip() == stop:
            (cut,) = answered(gateways["think"], body | {"stop": stop})
            assert (cut["message"]["reasoning"] or "", cut["message"]["content"] or "") == (thoughts, answer[:at])
            assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
            tried += 1
    assert tried


def test_calls_of_one_answer_have_places_of_their_own(gateways: dict[str, httpx.Client]) -> None:
    text = hermes('{"a":"1"}') + hermes('{"a":"2"}') + hermes('{"a":"3"}')
    for name in ("hermes", "coarse"):
        found: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
        for event in events(gateways[name], CHAT, said(text, tools=TOOLS, n=2)):
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls", []):
                    found[choice["index"]].append((call["index"], call["function"]["arguments"]))
        assert found[0] == found[1] == [(place, f'{{"a": "{place + 1}"}}') for place in range(3)]


@pytest.mark.parametrize("stop", ["</tool_call>", "}</tool", "<tool_call>"])
def test_a_stop_string_in_a_call(gateways: dict[str, httpx.Client], stop: str) -> None:
    """A call whose closing mark is the stop string is whole; one that is cut before it is text."""
    text = "hi " + hermes('{"a":"x"}')
    for name in ("hermes", "coarse"):
        for choice in answered(gateways[name], said(text, tools=TOOLS, n=2, stop=stop)):
            assert choice["stop_reason"] == stop
            if stop == "</tool_call>":
                (call,) = choice["message"]["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"a": "x"}
                assert choice["finish_reason"] == "tool_calls"
            else:
                assert choice["message"]["content"] == text.partition(stop)[0] and choice["finish_reason"] == "stop"


def test_log_probs_by_text_lose_no_token(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    """Parts of characters have names of their own, and the drawn token has its own log-prob."""
    body = {"prompt": "x", "max_tokens": 60, "logprobs": 20, "temperature": 3.0, "seed": 7, "return_token_ids": True}
    (whole,) = post(gateways["hermes"], TEXT, body)["choices"]
    columns = whole["logprobs"]
    for token, own, top in zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True):
        assert len(top) in (20, 21)
        # At another temperature than 1 the drawn token's own log-prob is of the policy, the others at temperature 1.
        assert token in top and isinstance(own, float)
    again = post(gateways["hermes"], TEXT, body | {"temperature": 1.0})["choices"][0]["logprobs"]
    for token, own, top in zip(again["tokens"], again["token_logprobs"], again["top_logprobs"], strict=True):
        assert top[token] == pytest.approx(own, abs=1e-5)
    assert any(token.startswith("bytes:") for token in columns["tokens"])
    found = joined(events(gateways["hermes"], TEXT, body))[0]
    assert found["logprobs"] == columns and found["token_ids"] == whole["token_ids"]


def test_bytes_of_a_token_are_its_own(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    text = "é𝄞 x"
    (choice,) = answered(gateways["hermes"], said(text))
    found = [entry["bytes"] for entry in choice["logprobs"]["content"]][:-1]
    assert found == [[byte] for byte in text.encode()]


def test_an_answer_over_sglang_is_the_last_event_of_its_stream(gateways: dict[str, httpx.Client]) -> None:
    params = {"max_new_tokens": 12, "sampling_seed": 3, "temperature": 1.0}
    body = {"text": "hello there", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    post(gateways["hermes"], SGLANG, body)
    whole = post(gateways["hermes"], SGLANG, body)
    *_, last = events(gateways["hermes"], SGLANG, body)
    for answer in (whole, last):
        answer["meta_info"].pop("e2e_latency")
        answer["meta_info"].pop("id")
    assert last == whole


BAD = "("  # no regular expression


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": BAD}}, "structured_outputs.regex"),
        (TEXT, {"prompt": "x", "structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice.1"),
        (TEXT, {"prompt": "x", "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (TEXT, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        (TEXT, {"prompt": "x", "allowed_token_ids": [1 << 30]}, "allowed_token_ids"),
        (TEXT, {"prompt": "x", "stop": ["a", ""]}, "stop.1"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {"prompt": [1, "x"]}, "prompt"),
        (TEXT, {"prompt": [1 << 30]}, "prompt"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "x",
         "schema": {"type": "wrong"}}}}, "response_format.json_schema.schema"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required", "tools": [{"type": "function", "function": {
         "name": "f", "parameters": {"type": "wrong"}}}]}, "tools"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "maybe", "tools": TOOLS}, "tool_choice"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature"),
        (SGLANG, {"text": 5}, "text"),
        (SGLANG, {"text": "x", "sampling_params": 5}, "sampling_params"),
        (SGLANG, {"text": "x", "sampling_params": {"regex": BAD}}, "sampling_params.regex"),
        (SGLANG, {"text": "x", "sampling_params": {"ebnf": BAD}}, "sampling_params.ebnf"),
        (SGLANG, {"text": "x", "sampling_params": {"stop": [""]}}, "sampling_params.stop.0"),
        (SGLANG, {"text": "x", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        (SGLANG, {"text": "x", "return_logprob": True, "sampling_params": {"prompt_logprobs": 1}},
         "sampling_params.prompt_logprobs"),
        (SGLANG, {"text": "x", "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}},
         "sampling_params.min_new_tokens"),
        (SGLANG, {"input_ids": [1 << 30]}, "input_ids"),
        ("/inference/v1/generate", {"token_ids": [1 << 30]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": BAD}}},
         "sampling_params.structured_outputs.regex"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        (TEXT, {"prompt": "x", **BUDGET}, "thinking_token_budget"),
        (CHAT, {"messages": MESSAGES, **BUDGET}, "thinking_token_budget"),
        (CHAT, {"messages": MESSAGES, "thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"messages": MESSAGES, "thinking_token_budget": 2.5}, "thinking_token_budget"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": BUDGET},
         "sampling_params.thinking_token_budget"),
        (SGLANG, {"text": "x", "sampling_params": {"custom_params": {"thinking_budget": 3}}},
         "sampling_params.custom_params.thinking_budget"),
        (SGLANG, {"text": "x", "sampling_params": {"custom_params": {"budget": 3}}},
         "sampling_params.custom_params.budget"),
        (SGLANG, {"text": "x", "sampling_params": BUDGET | {"custom_params": {"thinking_budget": 3}}},
         "sampling_params.thinking_token_budget"),
        (TEXT, {"prompt": "x", "repetition_detection": {"max_pattern_size": 2}}, "repetition_detection.min_count"),
        (TEXT, {"prompt": "x", "repetition_detection": {"size": 2}}, "repetition_detection.size"),
        (TEXT, {"prompt": "x", "repetition_detection": 2}, "repetition_detection"),
        (CHAT, {"messages": MESSAGES, "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3,
         "min_count": 2}}, "repetition_detection.min_pattern_size"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"repetition_detection": {
         "max_pattern_size": 9999, "min_count": 2}}}, "sampling_params.repetition_detection.max_pattern_size"),
        (SGLANG, {"text": "x", "sampling_params": {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}},
         "sampling_params.repetition_detection.min_count"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_of_the_request(
    gateways: dict[str, httpx.Client], path: str, fields: dict[str, Any], field: str, stream: bool
) -> None:
    assert refused(gateways["hermes"], path, {"stream": stream, **fields}) == field


def test_a_score_over_sglang_has_the_version_that_made_it(gateways: dict[str, httpx.Client]) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    assert post(gateways["hermes"], SGLANG, body)["meta_info"]["weight_version"] == "0"


def said_by_all(client: httpx.Client, prompt: list[int], params: dict[str, Any], custom: dict[str, Any]) -> list[Any]:
    """Tokens, forced positions and end of each dialect, as a whole and as a stream, for a prompt of token ids."""
    found = []
    for path, body in (
        (TEXT, {"prompt": prompt, "return_token_ids": True, **params}),
        ("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params}),
    ):
        (whole,) = post(client, path, body)["choices"]
        (streamed,) = joined(events(client, path, body)).values()
        for choice in (whole, streamed):
            found.append((choice["token_ids"], choice.get("forced"), choice["finish_reason"], choice["stop_reason"]))
    given = {name: value for name, value in params.items() if name not in ("max_tokens", "thinking_token_budget")}
    fields = {**given, "max_new_tokens": params["max_tokens"], "custom_params": custom}
    body = {"input_ids": prompt, "sampling_params": fields, "require_reasoning": True}
    for answer in (post(client, SGLANG, body), events(client, SGLANG, body)[-1]):
        meta, reasons = answer["meta_info"], {"repetition_detected": "repetition"}
        end = meta["finish_reason"]
        reason = (reasons.get(end.get("matched"), end["type"]), end.get("matched"))
        found.append((answer["output_ids"], meta.get("forced"), *reason))
    return found


@pytest.mark.parametrize(("budget", "every"), checkered((0, 1, 7, 40, -1), ("think", "coarse think")))
def test_a_thought_ends_where_its_budget_is_used_up(
    gateways: dict[str, httpx.Client], tokenizer: Any, budget: int, every: str
) -> None:
    """In the peers' words over each endpoint; the prompt has opened the thought."""
    start, close = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    forced = [budget] if 0 <= budget < 30 else None
    params = {
        "max_tokens": 30, "temperature": 1.5, "seed": 3, "ignore_eos": True, "thinking_token_budget": budget,
        "logit_bias": {str(start): -100, str(close): -50},
    }  # fmt: skip
    found = said_by_all(gateways[every], [5, start], params, {"thinking_budget": budget})
    for tokens, places, reason, stop in found:
        assert (places, reason, stop) == (forced, "length", None)
        assert tokens == found[0][0] and [i for i, token in enumerate(tokens) if token == close] == (forced or [])
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    chat = {"messages": begun, "continue_final_message": True, "return_token_ids": True, "n": 2, **params}
    for choice in answered(gateways[every], chat):
        message = choice["message"]
        assert choice.get("forced") == forced and bool(message["content"]) == bool(forced)
        assert bool(message["reasoning_content"]) == (budget != 0)


@pytest.mark.parametrize("every", ["think", "coarse think"])
def test_the_budget_of_a_message_ends_its_thought_and_masks_the_end(
    gateways: dict[str, httpx.Client], tokenizer: Any, every: str
) -> None:
    client, session = gateways[every], {"X-Session-ID": f"budget-{every[:3]}"}
    start, close = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    body = {
        "model": client.get("/v1/models").json()["data"][0]["id"], "max_tokens": 30, "seed": 3, "ignore_eos": True,
        "messages": [*MESSAGES, {"role": "assistant", "content": "<think>"}],
        "thinking": {"type": "enabled", "budget_tokens": 7}, "logit_bias": {str(start): -100, str(close): -50},
    }  # fmt: skip
    for stream in (False, True):
        answer = client.post("/v1/messages", json=body | {"stream": stream}, headers=session)
        assert answer.status_code == 200, answer.text
    found = client.get(f"/v1/trajectories/{session['X-Session-ID']}").json()
    for turn in found["turns"]:
        branch = found["branches"][turn["branch"]]
        drawn, mask = (branch[name][turn["start"] : turn["end"]] for name in ("token_ids", "mask"))
        assert len(drawn) == 30 and drawn[7] == close and [i for i, chosen in enumerate(mask) if not chosen] == [7]
    assert len(found["turns"]) == 2
    post(client, f"/finish_session?session_id={session['X-Session-ID']}", {})


def test_a_constraint_begins_after_a_forced_end(gateways: dict[str, httpx.Client], tokenizer: Any) -> None:
    close = tokenizer.convert_tokens_to_ids("</think>")
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    body = said("", messages=begun, continue_final_message=True, structured_outputs={"choice": ["yes", "no"]}, n=2,
                thinking_token_budget=5, logit_bias={str(close): -50}, temperature=1.5)  # fmt: skip
    for choice in answered(gateways["think"], body):
        assert choice["token_ids"].index(close) == 5 and choice["forced"] == [5]
        assert choice["message"]["content"].strip() in ("yes", "no") and choice["finish_reason"] == "stop"


def test_a_completion_that_repeats_itself_ends(gateways: dict[str, httpx.Client]) -> None:
    """In the peers' words over each endpoint."""
    params = {"max_tokens": 30, "temperature": 0, "logit_bias": {"40": 100}, **LOOP}
    for tokens, _, *end in said_by_all(gateways["hermes"], [5, 6], params, {}):
        assert (tokens, end) == ([40] * 5, ["repetition", "repetition_detected"])
    for choice in answered(gateways["hermes"], {"messages": MESSAGES, "return_token_ids": True, "n": 2, **params}):
        assert choice["token_ids"] == [40] * 5
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    off = {"messages": MESSAGES, **params, "repetition_detection": {"max_pattern_size": 0}, "return_token_ids": True}
    (choice,) = answered(gateways["hermes"], off)
    assert choice["token_ids"] == [40] * 30 and choice["finish_reason"] == "length"
