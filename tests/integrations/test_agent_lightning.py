"""Agent Lightning's LLM proxy and store in front of the gateway: its triplets hold the tokens that the engine drew."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

agentlightning = pytest.importorskip("agentlightning", reason="make test-integrations installs Agent Lightning")
openai = pytest.importorskip("openai")

from agentlightning.utils.server_launcher import PythonServerLauncherArgs  # noqa: E402

from tests.support.gateway.harness import gateway  # noqa: E402
from tests.support.integrations.integration_worker import start  # noqa: E402
from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402
from trainer_bridge.client.blocking import RolloutClient  # noqa: E402
from trainer_bridge.client.launch import WorkerProcess  # noqa: E402

TEMPLATE = Path(__file__).parents[1] / "support" / "integrations" / "hermes.jinja"
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9][0-9]{0,3}, "b": [0-9]\}\}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
KEY = "sk-" + secrets.token_hex(32)
TURNS, SAMPLING = 3, {"temperature": 1.0, "seed": 5, "max_tokens": 200}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("lightning")
    checkpoint = make_chat_checkpoint(folder / "model", 3, TEMPLATE.read_text())
    with start(checkpoint, folder / "worker.log", max_rows=8, max_context_tokens=4096) as worker:
        yield worker


def agent(task: str, llm: Any) -> list[str]:
    """An agent as Agent Lightning's users write them: it speaks OpenAI's API, and calls a tool in each turn."""
    client = openai.OpenAI(base_url=llm.endpoint + "/v1", api_key=KEY, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task}]
    said = []
    for _ in range(TURNS):
        answer = client.chat.completions.create(
            model=llm.model,
            messages=messages,
            tools=[TOOL],
            extra_body={"structured_outputs": {"regex": CALL}},
            **llm.sampling_parameters,
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        total = sum(json.loads(call.function.arguments).values())
        said.append(call.function.arguments)
        messages += [
            {"role": "assistant", "content": message.content or "", "tool_calls": [call.to_dict()]},
            {"role": "tool", "tool_call_id": call.id, "content": str(total)},
        ]
    return said


async def rollouts(url: str, tasks: list[str]) -> list[tuple[list[Any], list[str]]]:
    """The spans of a rollout of each task, and the arguments of the calls that the agent saw."""
    store = agentlightning.InMemoryLightningStore(thread_safe=True)
    launcher = PythonServerLauncherArgs(
        host="127.0.0.1", launch_mode="thread", startup_timeout=PATIENCE_S, healthcheck_url="/health/liveliness"
    )
    proxy = agentlightning.LLMProxy(
        store=store,
        launcher_args=launcher,  # the default health check sends no key
        model_list=[{"model_name": "sums", "litellm_params": {"model": "hosted_vllm/sums", "api_base": f"{url}/v1/"}}],
        callbacks=["return_token_ids", "logprobs", "opentelemetry"],
        litellm_config={"general_settings": {"master_key": KEY}},  # litellm does not start without
    )
    await proxy.start()
    try:
        found = []
        for task in tasks:
            rollout = await store.start_rollout(task)
            attempt = rollout.attempt.attempt_id
            llm = proxy.as_resource(rollout.rollout_id, attempt, sampling_parameters=dict(SAMPLING))
            said = await asyncio.to_thread(agent, task, llm)
            found.append((await spans_of(store, rollout.rollout_id, attempt), said))
        return found
    finally:
        await proxy.stop()


async def spans_of(store: Any, rollout: str, attempt: str) -> list[Any]:
    """The spans of an attempt, when all requests are there: litellm exports them after its answer."""
    while True:
        spans = list(await store.query_spans(rollout, attempt))
        if sum(span.name == "raw_gen_ai_request" for span in spans) == TURNS:
            return spans
        await asyncio.sleep(0.1)


def test_triplets_of_all_turns_hold_the_tokens_that_the_engine_drew(worker: WorkerProcess) -> None:
    with gateway([worker.endpoint], served_model_name=("sums",), logprobs="processed") as http:
        url = str(http.base_url).rstrip("/")
        found = asyncio.run(rollouts(url, ["add 1", "add 2"]))
    adapter = agentlightning.LlmProxyTraceToTriplet()
    with RolloutClient(worker.endpoint) as direct:
        for spans, said in found:
            triplets = adapter.adapt(spans)
            assert len(triplets) == TURNS
            for triplet, arguments in zip(triplets, said, strict=True):
                prompt, drawn = triplet.prompt["token_ids"], triplet.response["token_ids"]
                again = direct.generate(prompt, constraint={"regex": CALL}, return_text=True, **SAMPLING).completions[0]
                assert drawn == again.token_ids.tolist()
                assert json.loads(arguments) == json.loads(again.text.split("\n")[1])["arguments"]
