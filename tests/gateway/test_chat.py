"""Chat, its prompts and tokens, held against transformers' rendering and the worker's own client."""

from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.gateway.harness import events, post, refused
from tests.support.worker.harness import EOS, ONES, text_of, token_ids
from trainer_bridge.client.blocking import RolloutClient

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "17:"}]}]


def test_a_conversation_is_rendered_as_transformers_does(client: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ONES)
    wanted = tokenizer.apply_chat_template([{"role": "user", "content": "17:"}], tokenize=True)["input_ids"]
    answer = post(client, PATH, {"messages": MESSAGES, "max_tokens": 6, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == wanted and choice["message"] == {"role": "assistant", "content": " 18 19"}
    assert text_of(choice["token_ids"]) == " 18 19" and choice["finish_reason"] == "length"
    assert post(client, PATH + "/render", {"messages": MESSAGES})["token_ids"] == wanted
    assert post(client, "/tokenize", {"messages": MESSAGES})["tokens"] == wanted
    assert post(client, "/tokenize", {"prompt": "17:"}) == {
        "count": 3,
        "max_model_len": 512,
        "tokens": wanted,
        "token_strs": None,
    }
    assert post(client, "/detokenize", {"tokens": [*wanted, EOS]}) == {"prompt": "17:<eos>"}


def test_log_probs_of_chat(client: httpx.Client, direct: RolloutClient) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 5, "max_tokens": 12}
    (truth,) = direct.generate("17:", logprobs=2, **drawn).completions
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **drawn}
    content = post(client, PATH, body)["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == truth.token_ids.tolist()
    assert np.array_equal(np.float32([entry["logprob"] for entry in content]), truth.logprobs)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    for entry, ids in zip(content, truth.top_ids, strict=True):
        assert {top["token_id"] for top in entry["top_logprobs"]} == {*ids.tolist(), entry["token_id"]}
    named = post(client, PATH, body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in named] == [f"token_id:{entry['token_id']}" for entry in content]
    assert post(client, PATH, body | {"logprobs": 1})["choices"][0]["logprobs"]["content"] == content
    assert refused(client, PATH, {"messages": MESSAGES, "logprobs": 2}) == "logprobs"
    assert refused(client, PATH, {"messages": MESSAGES, "top_logprobs": 2}) == "top_logprobs"


def test_a_stream_of_chat_is_the_whole_answer_in_pieces(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "n": 2, "temperature": 2.5, "seed": 3, "max_completion_tokens": 20, "logprobs": True}
    whole = post(client, PATH, body | {"return_token_ids": True})
    found = events(client, PATH, body | {"return_token_ids": True})
    assert [event.get("prompt_token_ids") for event in found].count(whole["prompt_token_ids"]) == 1
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in found if e["choices"][0]["index"] == choice["index"]]
        assert [each["delta"].get("role") for each in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(each["delta"]["content"] for each in mine) == choice["message"]["content"]
        assert [token for each in mine for token in each["token_ids"]] == choice["token_ids"]
        assert [entry for each in mine for entry in each["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_turns_that_bring_their_tokens_keep_them(client: httpx.Client) -> None:
    """Tokens that the tokenizer would not make of the text: a special token in the middle of the answer."""
    earlier = {"prompt_token_ids": token_ids("17:"), "generation_token_ids": [*token_ids(" 18"), EOS]}
    turns = [
        {"role": "user", "content": "17:"},
        {"role": "assistant", "content": " 18<eos>", **earlier, "generation_log_probs": [0.0] * 4},
        {"role": "user", "content": " 19:"},
    ]
    wanted = [*token_ids("17: 18"), EOS, *token_ids(" 19:")]
    assert post(client, PATH + "/render", {"messages": turns})["token_ids"] == wanted
    other = [{**turns[0], "content": "23:"}, {**turns[1], "content": "-"}, turns[2]]
    assert refused(client, PATH, {"messages": other}) == "messages.1.generation_token_ids"


def test_a_session_goes_on_with_its_kv(client: httpx.Client) -> None:
    turn = [{"role": "user", "content": "".join(f"{number} " for number in range(17, 60)) + "60:"}]
    headers = {"X-Session-ID": "conversation"}
    first = post(client, PATH, {"messages": turn, "max_tokens": 9}, headers=headers)
    said = first["choices"][0]["message"]
    more = [*turn, said, {"role": "user", "content": " 64:"}]
    second = post(client, PATH, {"messages": more, "max_tokens": 3}, headers=headers)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]
    assert post(client, "/finish_session?session_id=conversation")["finished"]
    assert not post(client, "/finish_session?session_id=conversation")["finished"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        *(
            ({"chat_template_kwargs": {name: []}}, f"chat_template_kwargs.{name}")
            for name in ("tokenize", "messages", "conversation", "self")
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),  # the model has no letters
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools.0"),
        ({"tools": [{}]}, "tools.0"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"audio": {}}, "audio"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    assert refused(client, PATH, {"messages": MESSAGES, "max_tokens": 2} | fields) == named
