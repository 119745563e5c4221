"""verifiers' train client in an environment with tools: the token ids of its traces are the ids that the engine drew.

prime-rl runs environments this way: verifiers serves a harness (here its own chat program) an OpenAI endpoint, renders
each turn to token ids by `renderers`, and asks the engine at `/inference/v1/generate`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

vf = pytest.importorskip("verifiers.v1", reason="make test-integrations installs verifiers")
renderers = pytest.importorskip("renderers", reason="make test-integrations installs renderers")

from verifiers.v1.runtimes.subprocess import SubprocessRuntime  # noqa: E402
from verifiers.v1.utils.loaders import load_environment  # noqa: E402

from tests.support.gateway.harness import gateway  # noqa: E402
from tests.support.integrations.integration_worker import start  # noqa: E402
from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint  # noqa: E402
from trainer_bridge.client.blocking import RolloutClient  # noqa: E402
from trainer_bridge.client.launch import WorkerProcess  # noqa: E402

SUPPORT = Path(__file__).parents[1] / "support" / "integrations"
MARKERS = (
    *("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
TOOL_CALL = r'<tool_call>\n\{"name": "sums_add", "arguments": \{"a": [1-9][0-9]{0,3}, "b": [0-9]\}\}\n</tool_call>'
TURNS, SEED, TOKENS = 3, 5, 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the single tokens that the renderer of Qwen3 writes and looks for."""
    template = (SUPPORT / "hermes.jinja").read_text()
    return make_chat_checkpoint(tmp_path_factory.mktemp("verifiers") / "model", 3, template, MARKERS)


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[WorkerProcess]:
    with start(checkpoint, checkpoint.parent / "worker.log", max_rows=8, max_context_tokens=4096) as worker:
        yield worker


@pytest.fixture
def tokenizer(checkpoint: Path) -> Any:
    return renderers.base.load_tokenizer(str(checkpoint))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers' programs run with the packages of this environment; it would install them by uv for each."""

    async def prepared(self: Any, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
        await self.write("program.py", script.encode())
        return [sys.executable, str(self.workdir / "program.py")]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepared)
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))


def play(url: str, checkpoint: Path, sampling: dict[str, Any]) -> list[Any]:
    """An episode of each task, side by side."""
    env = load_environment(
        vf.SingleAgentEnvConfig(
            taskset={"id": "verifiers_sums"},
            agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": TURNS},
            interception={"type": "server"},
        )
    )
    client = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="NO_KEY",
        renderer=renderers.Qwen3RendererConfig(),
        renderer_model_name=str(checkpoint),
    )
    context = vf.ModelContext("sums", client, vf.Sampling(**sampling))

    async def all_of_them() -> list[Any]:
        async with env.serving():
            return await asyncio.gather(*(env.run_slot(env.slots(task)[0], context) for task in env.taskset))

    return asyncio.run(all_of_them())


def test_token_ids_of_all_turns_are_those_that_the_engine_drew(
    worker: WorkerProcess, checkpoint: Path, tokenizer: Any, programs: None
) -> None:
    # A call that is spelled out instead of opened by its marker is no call to the renderer.
    bias = {str(tokenizer.convert_tokens_to_ids(marker)): 50.0 for marker in ("<tool_call>", "</tool_call>")}
    stop = {"token_ids": [tokenizer.convert_tokens_to_ids(marker) for marker in ("<|im_end|>", "<|endoftext|>")]}
    sampling = {"temperature": 1.0, "seed": SEED, "max_tokens": TOKENS, "logit_bias": bias}
    constraint = {"regex": TOOL_CALL}
    with gateway([worker.endpoint], served_model_name=("sums",), logprobs="processed") as http:
        url = str(http.base_url).rstrip("/")
        episodes = play(url, checkpoint, {**sampling, "structured_outputs": constraint})
    assert len(episodes) == 3
    spelled = []
    with RolloutClient(worker.endpoint) as direct:
        for episode in episodes:
            (trace,) = episode.traces
            assert episode.ok, [error.message for error in trace.errors]
            (branch,) = trace.branches
            ids, logprobs = branch.token_ids, branch.logprobs
            turns, at = 0, 0
            for sampled, run in itertools.groupby(branch.sampled_mask):
                end = at + len(list(run))
                if sampled:
                    again = direct.generate(ids[:at], constraint=constraint, stop=stop, **sampling).completions[0]
                    assert ids[at:end] == again.token_ids.tolist()
                    assert again.drawn_logprobs is not None
                    assert np.allclose(logprobs[at:end], again.drawn_logprobs, atol=1e-4)
                    spelled.append(
                        tokenizer.encode(tokenizer.decode(ids[at:end]), add_special_tokens=False) != ids[at:end]
                    )
                    turns += 1
                at = end
            assert turns == TURNS
            # The last call is not answered, as no turn may follow it.
            assert trace.reward == TURNS - 1
    assert any(spelled)  # there is something to lose
