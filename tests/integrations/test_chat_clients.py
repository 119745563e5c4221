"""The packages `anthropic` and `openai`, and agents on them, against a worker: the tokens that are read back are drawn.

The model thinks, and calls a tool after it. Its template leaves the thoughts of earlier turns out, and its own tokens
for a text differ from the tokenizer's: only kept tokens can be right.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import gateway
from tests.support.integrations.integration_worker import start
from tests.support.integrations.thinking_model import MOST, SCHEMA, ThinkingModel
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess

anthropic = pytest.importorskip("anthropic", reason="make test-integrations installs anthropic")
openai = pytest.importorskip("openai", reason="make test-integrations installs openai")

KEY = "0123456789abcdef"
TURNS = 3
TOOL = {"name": "add", "description": "adds two numbers", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "add", "description": "adds two numbers", "parameters": SCHEMA, "strict": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ThinkingModel:
    return ThinkingModel.make(tmp_path_factory.mktemp("thinking") / "model")


@pytest.fixture(scope="module")
def worker(model: ThinkingModel) -> Iterator[WorkerProcess]:
    with start(model.folder, model.folder / "log", max_rows=8, max_context_tokens=4096) as worker:
        yield worker


@pytest.fixture(scope="module")
def http(worker: WorkerProcess) -> Iterator[httpx.Client]:
    settings = {"served_model_name": ("sums",), "reasoning_parser": "think", "logprobs": "processed"}
    with gateway([worker.endpoint], keys=(KEY.encode(),), **settings) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


@pytest.fixture
def direct(worker: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(worker.endpoint) as client:
        yield client


def claude(http: httpx.Client, session: str, key: str = KEY) -> Any:
    headers = {"X-Session-ID": session}
    return anthropic.Anthropic(base_url=str(http.base_url), api_key=key, max_retries=0, default_headers=headers)


def gpt(http: httpx.Client, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0)


def trajectory(http: httpx.Client, name: str) -> dict[str, Any]:
    answer = http.get(f"/v1/trajectories/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def one_branch(found: dict[str, Any]) -> None:
    """Each turn goes on with the tokens of the turn before."""
    assert [turn["parent"] for turn in found["turns"]] == [None, *range(len(found["turns"]) - 1)]
    assert len(found["branches"]) == 1


# --- Anthropic's Messages API -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_tools_over_several_turns_by_messages(
    http: httpx.Client, model: ThinkingModel, direct: RolloutClient, stream: bool
) -> None:
    session = f"messages-{stream}"
    client = claude(http, session)
    messages: list[Any] = [{"role": "user", "content": "add 1"}]
    used = []
    for _ in range(TURNS):
        fields = {"model": "sums", "max_tokens": MOST, "tools": [TOOL], "system": "be kind", "messages": messages}
        counted = client.messages.count_tokens(
            **{each: fields[each] for each in ("model", "tools", "system", "messages")}
        )
        if stream:
            with client.messages.stream(**fields, extra_body=model.sampling) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**fields, extra_body=model.sampling)
        assert answer.stop_reason == "tool_use" and [block.type for block in answer.content] == ["thinking", "tool_use"]
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
        used.append(usage.output_tokens)
        call = answer.content[-1]
        assert call.name == "add" and set(call.input) == {"a", "b"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    found = trajectory(http, session)
    one_branch(found)
    assert [len(tokens) for tokens in model.check(direct, found)] == used


def test_whole_and_streamed_messages_are_equal(http: httpx.Client, model: ThinkingModel) -> None:
    client, fields = claude(http, "equal"), {"model": "sums", "max_tokens": MOST, "tools": [TOOL]}
    fields |= {"messages": [{"role": "user", "content": "add 1"}], "extra_body": model.sampling}
    whole = client.messages.create(**fields).to_dict()
    with client.messages.stream(**fields) as events:
        streamed = events.get_final_message().to_dict()
    for each in (whole, streamed):
        each.pop("id"), each["content"][-1].pop("id"), each.pop("usage")
    assert whole == streamed


def test_errors_of_messages(http: httpx.Client) -> None:
    client, user = claude(http, "errors"), [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=2, messages=user)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="sums", max_tokens=2, messages=[])
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="sums", max_tokens=2, messages=user, stream=True, extra_body={"temperature": -1})
    with pytest.raises(anthropic.AuthenticationError):
        claude(http, "errors", "x" * 16).messages.create(model="sums", max_tokens=2, messages=user)


def test_the_tool_runner_of_anthropic(http: httpx.Client, model: ThinkingModel, direct: RolloutClient) -> None:
    """The package's own agent loop: it runs functions, and sends their results."""
    from anthropic import beta_tool

    asked: list[tuple[int, int]] = []

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        asked.append((a, b))
        return str(a + b)

    runner = claude(http, "runner").beta.messages.tool_runner(
        model="sums",
        max_tokens=MOST,
        tools=[add],
        messages=[{"role": "user", "content": "add 2"}],
        max_iterations=TURNS,
        extra_body=model.sampling,
    )
    said = list(runner)
    found = trajectory(http, "runner")
    one_branch(found)
    assert len(said) == len(found["turns"]) == TURNS
    calls = [message.content[-1].input for message in said]
    assert [(call["a"], call["b"]) for call in calls][: len(asked)] == asked and len(asked) >= TURNS - 1
    model.check(direct, found)


# --- null ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "module", "required"),
    [
        ("/v1/completions", "openai.types.completion_create_params", {"prompt": "add 1"}),
        (
            "/v1/chat/completions",
            "openai.types.chat.completion_create_params",
            {"messages": [{"role": "user", "content": "add 1"}]},
        ),
        ("/v1/responses", "openai.types.responses.response_create_params", {"input": "add 1"}),
        (
            "/v1/messages",
            "anthropic.types.message_create_params",
            {"messages": [{"role": "user", "content": "add 1"}], "max_tokens": 2, "model": "sums"},
        ),
    ],
)
def test_every_optional_field_may_be_null(http: httpx.Client, path: str, module: str, required: dict[str, Any]) -> None:
    """Clients of other languages send null for what was not set."""
    found = importlib.import_module(module)
    base = next(getattr(found, name) for name in dir(found) if name.endswith("CreateParamsBase"))
    headers = {"betas", "anthropic_beta", "user_profile_id", "workspace_id"}  # of the package's own call
    fields = {name: None for name in base.__annotations__ if name not in headers} | {"stream": None} | required
    short = {"max_output_tokens": 2} if path == "/v1/responses" else {"max_tokens": 2}
    assert len(fields) > 12
    answer = http.post(path, json=fields | short)
    assert answer.status_code == 200, answer.text


# --- OpenAI's Responses API -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_tools_over_several_turns_by_responses(
    http: httpx.Client, model: ThinkingModel, direct: RolloutClient, stream: bool, stored: bool
) -> None:
    session = f"responses-{stream}-{stored}"
    client, items, before, used = gpt(http), [{"role": "user", "content": "add 1"}], None, []
    headers = {} if stored else {"X-Session-ID": session}
    for _ in range(TURNS):
        fields = {"model": "sums", "max_output_tokens": MOST, "tools": [FUNCTION], "instructions": "be kind"}
        fields |= {"input": items, "store": stored, "extra_body": model.sampling, "extra_headers": headers}
        if stored:
            fields["previous_response_id"] = before
        if stream:
            with client.responses.stream(**fields) as events:
                numbers = [event.sequence_number for event in events]
                assert numbers == list(range(len(numbers)))
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**fields)
        assert answer.status == "completed" and [item.type for item in answer.output] == ["reasoning", "function_call"]
        details = answer.usage.output_tokens_details
        assert 0 < details.reasoning_tokens < answer.usage.output_tokens
        used.append(answer.usage.output_tokens)
        call, before = answer.output[-1], answer.id
        total = str(sum(json.loads(call.arguments).values()))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": total}
        items = [result] if stored else [*items, *[item.to_dict() for item in answer.output], result]
    found = trajectory(http, before if stored else session)
    one_branch(found)
    assert [len(tokens) for tokens in model.check(direct, found)] == used
    if stored:
        assert client.responses.retrieve(before).id == before
        client.responses.delete(before)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(before)


def test_errors_of_responses(http: httpx.Client) -> None:
    client = gpt(http)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model="sums", input="x", previous_response_id="resp_x")
    assert unknown.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="sums", input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x", stream=True)
    with pytest.raises(openai.AuthenticationError):
        gpt(http, "x" * 16).responses.create(model="sums", input="x")


def test_an_answer_of_a_schema(http: httpx.Client, model: ThinkingModel) -> None:
    """The constraint begins after the thoughts."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    fields = {"logit_bias": model.sampling["logit_bias"], "seed": 1}
    answer = gpt(http).responses.create(
        model="sums", input="a city", max_output_tokens=500, text={"format": form}, extra_body=fields
    )
    assert answer.status == "completed" and json.loads(answer.output_text)["city"] in ("Oslo", "Rome")
    said = claude(http, "schema").messages.create(
        model="sums",
        max_tokens=500,
        messages=[{"role": "user", "content": "a city"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body=fields,
    )
    assert said.stop_reason == "end_turn" and json.loads(said.content[-1].text)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_of_openai_agents(
    http: httpx.Client, model: ThinkingModel, direct: RolloutClient, stream: bool, stored: bool
) -> None:
    agents = pytest.importorskip("agents", reason="make test-integrations installs openai-agents")
    agents.set_tracing_disabled(True)
    session, asked = f"agents-{stream}-{stored}", []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        asked.append((a, b))
        return str(a + b)

    def ends(context: Any, results: list[Any]) -> Any:
        last = len(asked) == TURNS
        return agents.ToolsToFinalOutputResult(is_final_output=last, final_output=results[-1].output if last else None)

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0)
        agent = agents.Agent(
            name="sums",
            instructions="be kind",
            model=agents.OpenAIResponsesModel(model="sums", openai_client=client),
            tools=[add],
            tool_use_behavior=ends,
            model_settings=agents.ModelSettings(
                max_tokens=MOST,
                store=stored,
                extra_body=model.sampling,
                extra_headers={"X-Session-ID": session},
            ),
        )
        options = {"auto_previous_response_id": True} if stored else {}
        if not stream:
            return str((await agents.Runner.run(agent, "add 3", **options)).final_output)
        running = agents.Runner.run_streamed(agent, "add 3", **options)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    assert asyncio.run(run()) == str(sum(asked[-1]))
    found = trajectory(http, session)
    assert len(found["turns"]) == len(asked) == TURNS
    one_branch(found)
    model.check(direct, found)
