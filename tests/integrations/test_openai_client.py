"""The HTTP gateway, used by the `openai` package: text, chat, streams, constraints, tools, errors, lost workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gateway.harness import gateway
from tests.support.tokenizer_folder import make_tokenizer_folder
from tests.support.worker.harness import launch, until
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

openai = pytest.importorskip("openai")
pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "the quick brown fox"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def scribbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes bytes at random, with a chat template that knows tools."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = make_tokenizer_folder(tmp_path_factory.mktemp("scribbler"), TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return make_tokenizer_folder(folder, TEMPLATE)


@pytest.fixture(scope="module")
def worker(scribbler: Path) -> Iterator[WorkerProcess]:
    with launch(scribbler, log=scribbler / "log", max_rows=16) as started:
        yield started


@pytest.fixture(scope="module")
def client(worker: WorkerProcess) -> Iterator[openai.OpenAI]:
    # The model has no thoughts to wait for: constraints begin at once.
    flags: dict[str, Any] = {"reasoning_parser": "think", "constrain_reasoning": True}
    with gateway([worker.endpoint], served_model_name=("scribbler",), **flags) as http:
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)


def test_models_text_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scribbler"]
    common = {"model": "scribbler", "prompt": "the quick", "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 2}
    whole = client.completions.create(**common)
    parts = list(client.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [part.choices[0] for part in parts if part.choices and part.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text and mine[-1].finish_reason == choice.finish_reason
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens and whole.usage.completion_tokens > 20


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    common = {"model": "scribbler", "messages": USER, "max_completion_tokens": 20, "seed": 5}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=3)
    (choice,) = whole.choices
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) in (3, 4) for entry in choice.logprobs.content)
    with client.chat.completions.stream(**common) as stream:
        (final,) = [event for event in stream if event.type == "chunk"][-1].snapshot.choices
    assert final.message.content == choice.message.content and final.finish_reason == choice.finish_reason


def test_structured_outputs(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for seed in range(5):
        common = {"model": "scribbler", "messages": USER, "seed": seed, "max_completion_tokens": 400}
        (choice,) = client.chat.completions.create(**common, response_format=schema).choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), WEATHER)
        (choice,) = client.chat.completions.create(**common, response_format={"type": "json_object"}).choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    found = client.completions.create(
        model="scribbler", prompt="the", extra_body={"structured_outputs": {"regex": "(cat|dog)s?"}}
    )
    assert found.choices[0].text in ("cat", "cats", "dog", "dogs")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_must_be_called(client: openai.OpenAI, stream: bool) -> None:
    common = {"model": "scribbler", "messages": USER, "tools": TOOLS, "max_completion_tokens": 600, "temperature": 0.7}
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(3):
        for choice in ("required", named):
            fields = {**common, "seed": seed, "tool_choice": choice, "parallel_tool_calls": False}
            if stream:
                with client.chat.completions.stream(**fields) as events:
                    for _ in events:
                        pass
                    (answer,) = events.get_final_completion().choices
            else:
                (answer,) = client.chat.completions.create(**fields).choices
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls
            assert call.id and call.function.name in (("weather",) if choice is named else ("weather", "now"))
            if call.function.name == "weather":
                jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_text_are_found(client: openai.OpenAI, stream: bool) -> None:
    """The model is made to write a call: what it writes is a choice of texts."""
    text = 'I look.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    fields = {
        **{"model": "scribbler", "messages": USER, "tools": TOOLS},
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    if stream:
        with client.chat.completions.stream(**fields) as events:
            for _ in events:
                pass
            (answer,) = events.get_final_completion().choices
    else:
        (answer,) = client.chat.completions.create(**fields).choices
    assert answer.message.content == "I look."
    assert [call.function.name for call in answer.message.tool_calls] == ["now"]
    assert answer.finish_reason == "tool_calls"
    turns = [*USER, answer.message.to_dict(), {"role": "tool", "tool_call_id": "x", "content": "noon"}]
    for message in turns:
        message.pop("parsed", None)
    assert client.chat.completions.create(model="scribbler", messages=turns, max_tokens=2).choices


def test_errors_are_those_of_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="scribbler", messages=USER, top_logprobs=99, logprobs=True)
    assert wrong.value.param == "top_logprobs" and "20" in wrong.value.message
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="scribbler", prompt="a" * 5000)


def test_many_streams_at_once(client: openai.OpenAI) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as many:

            async def one(seed: int) -> int:
                fields = {"model": "scribbler", "prompt": "the", "max_tokens": 30, "seed": seed}
                whole = await many.completions.create(**fields)
                parts = [part async for part in await many.completions.create(**fields, stream=True)]
                assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
                return len(parts)

            assert sum(await asyncio.gather(*map(one, range(40)))) > 40

    asyncio.run(run())


def test_a_stream_outlives_its_worker(scribbler: Path, tmp_path: Path) -> None:
    """With two workers the stream goes on at the other one, with the same tokens; with one it ends with an error."""
    body = {"model": "m", "prompt": "the", "max_tokens": 800, "seed": 3, "temperature": 1.0}
    more = {"ignore_eos": True, "return_token_ids": True}
    logs = (tmp_path / "one", tmp_path / "two")
    with (
        launch(scribbler, log=logs[0], max_rows=16) as lonely,
        launch(scribbler, log=logs[1], max_rows=16) as other,
        gateway([other.endpoint], served_model_name=("m",)) as one,
    ):
        direct = openai.OpenAI(base_url=f"{one.base_url}/v1", api_key="none", max_retries=0)
        wanted = direct.completions.create(**body, extra_body=more).choices[0].token_ids
        with gateway([lonely.endpoint, other.endpoint], served_model_name=("m",)) as both:
            safe = openai.OpenAI(base_url=f"{both.base_url}/v1", api_key="none", max_retries=0)
            streams = [safe.completions.create(**body, extra_body=more, stream=True) for _ in range(2)]
            found = [[next(stream).choices[0].token_ids] for stream in streams]
            with RolloutClient(lonely.endpoint) as client:
                until(lambda: client.status()["tokens"] > 0, "tokens of the first worker")
            lonely.kill()
            for stream, tokens in zip(streams, found, strict=True):
                tokens += [part.choices[0].token_ids for part in stream]
                assert [token for part in tokens for token in part] == wanted
        stream = direct.completions.create(**body, extra_body=more, stream=True)
        next(stream)
        other.kill()
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError):
            direct.completions.create(**body, extra_body=more)
