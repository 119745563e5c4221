"""The HTTP gateway, used by the HTTP clients of trainers: TRL's `VLLMClient`, and the client of `renderers`."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.gateway.harness import gateway
from tests.support.worker.harness import EOS, ONES, launch, text_of, token_ids
from trainer_bridge.client.blocking import RolloutClient


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, httpx.Client]]:
    """A worker's endpoint, and a client of its gateway."""
    log = tmp_path_factory.mktemp("trainers") / "log"
    with (
        launch(ONES, log=log, max_rows=8, max_context_tokens=512) as worker,
        gateway([worker.endpoint], served_model_name=("ones",), logprobs="processed") as client,
    ):
        yield worker.endpoint, client


def test_the_client_of_trl(served: tuple[str, httpx.Client], vllm_client: Any) -> None:
    endpoint, http = served
    client = vllm_client.VLLMClient(base_url=str(http.base_url).rstrip("/"))
    assert client.model == "ones" and client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    options: dict[str, Any] = {"n": 2, "max_tokens": 12, "temperature": 2.5, "top_p": 0.9, "logprobs": 2}
    prompts = [token_ids("17:"), token_ids("98:")]
    found = client.generate(prompts, generation_kwargs={"seed": 3}, **options)
    assert found["prompt_ids"] == prompts
    with RolloutClient(endpoint) as direct:
        fields = {**options, "seed": 3}
        truth = [c for prompt in prompts for c in direct.generate(prompt, **fields).completions]
    assert found["completion_ids"] == [completion.token_ids.tolist() for completion in truth]
    for ids, values, completion in zip(found["logprob_token_ids"], found["logprobs"], truth, strict=True):
        assert [set(row) for row in ids] == [
            {token, *top} for token, top in zip(completion.token_ids.tolist(), completion.top_ids.tolist(), strict=True)
        ]
        assert all(row == sorted(row, reverse=True) for row in values)
    chat = client.chat([[{"role": "user", "content": "17:"}]], max_tokens=6, structured_outputs_regex=" 18 .*")
    assert text_of(chat["completion_ids"][0]).startswith(" 18 ") and len(chat["logprobs"][0]) == 6


def test_the_client_of_renderers(served: tuple[str, httpx.Client]) -> None:
    renderers, openai = pytest.importorskip("renderers.client"), pytest.importorskip("openai")
    renderer = SimpleNamespace(
        supports_tools=True,
        get_stop_token_ids=lambda: [EOS],
        parse_response=lambda ids, **_: SimpleNamespace(
            tool_calls=[], content=text_of(ids), reasoning_content=None, reasoning_complete=True
        ),
    )

    async def ask(prompt: str, **params: Any) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=f"{served[1].base_url}/v1", api_key="none") as client:
            given = {"client": client, "renderer": renderer, "messages": [], "model": "ones", "cache_salt": "3"}
            headers = {"X-Session-ID": "rollout-1"}
            answer: dict[str, Any] = await renderers.generate(
                **given, prompt_ids=token_ids(prompt), sampling_params=params, extra_headers=headers, priority=0
            )
            return answer

    said = asyncio.run(ask("17:", max_tokens=6, temperature=1.0))
    assert said["content"] == " 18 19" and said["finish_reason"] == "length"
    assert len(said["completion_logprobs"]) == 6 and all(value <= 0 for value in said["completion_logprobs"])
    with pytest.raises(renderers.OverlongPromptError):  # it asks /v1/models for the context
        asyncio.run(ask("1" * 600))


def test_the_request_of_rllms_engine(served: tuple[str, httpx.Client]) -> None:
    """Its `OpenAIEngine`: a text, the drawn ids from `token_ids`, and the prompt's log-probs by id."""
    openai = pytest.importorskip("openai")
    more = {"return_token_ids": True, "prompt_logprobs": 0}
    with openai.OpenAI(base_url=f"{served[1].base_url}/v1", api_key="none") as client:
        (choice,) = client.completions.create(
            model="ones", prompt="17: 18", max_tokens=3, logprobs=0, extra_body=more
        ).choices
    with RolloutClient(served[0]) as direct:
        truth = direct.generate("17: 18", max_tokens=3, prompt_logprobs=True)
    (completion,) = truth.completions
    assert choice.token_ids == completion.token_ids.tolist() == token_ids(choice.text)
    assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs.tolist(), abs=1e-5)
    assert truth.prompt_logprobs is not None and choice.prompt_logprobs[0] is None
    own = zip(token_ids("17: 18"), choice.prompt_logprobs, strict=True)
    scored = [entry[str(token)]["logprob"] for token, entry in list(own)[1:]]
    assert scored == pytest.approx(truth.prompt_logprobs[1:].tolist(), abs=1e-5)
