"""verl 0.9 with workers of this project: its registry, replicas, server manager, checkpoint managers, agent loop."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
    pytest.skip("verl is not installed: pip install '.[verl]'", allow_module_level=True)

import ray
import torch
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

from tests.support.integrations.tiny_checkpoints import logprobs_of, make_chat_checkpoint
from tests.support.integrations.verl_parts import TEMPLATE, compose_config, start_ray, trainer_ranks
from trainer_bridge.integrations.verl import CheckpointManager, Replica, ServerAdapter, serve_flags

pytestmark = pytest.mark.timeout(900)
PROMPT = [5, 9, 14, 40]
CONVERSATIONS = itertools.count()
STANDALONE = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2")
BRIDGE = "actor_rollout_ref.rollout.checkpoint_engine.backend=rollout"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_checkpoint(tmp_path_factory.mktemp("verl") / "model", seed=3, template=TEMPLATE.read_text())


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> Any:
    return compose_config(checkpoint, *STANDALONE, BRIDGE)


@pytest.fixture(scope="module")
def servers(config: Any) -> Iterator[LLMServerManager]:
    """Two standalone replicas, as verl's server manager starts them."""
    start_ray(gpus=2)
    try:
        yield LLMServerManager.create(config=config)
    finally:
        ray.shutdown()


def managed_by(manager: type, servers: LLMServerManager, trainer: Any, config: Any) -> Any:
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    return manager(engine, trainer, servers.get_replicas())


@pytest.fixture(scope="module")
def trainer(servers: LLMServerManager, checkpoint: Path, config: Any) -> Any:
    """Two ranks with a model, whose weights the replicas have: before that they generate nothing."""
    ranks = trainer_ranks(checkpoint, 2)
    managed_by(CheckpointManager, servers, ranks, config).update_weights(1)
    return ranks


def generate(servers: LLMServerManager, count: int = 1, client: type | None = None, **changes: Any) -> list[Any]:
    """Completions by verl's own client, one for each of `count` conversations."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **changes}
    asking = servers.get_client(client)
    numbers = [next(CONVERSATIONS) for _ in range(count)]

    async def all_of_them() -> list[Any]:
        calls = [asking.generate(f"c{i}", prompt_ids=PROMPT, sampling_params=dict(params)) for i in numbers]
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


def generate_aside(servers: LLMServerManager, *given: Any, **changes: Any) -> Future[list[Any]]:
    """The same in a thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(generate, servers, *given, **changes)
    pool.shutdown(wait=False)
    return future


def model_of(checkpoint: Path, weights: dict[str, Any]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    return model.eval()


def difference(model: Any, output: Any) -> float:
    """Between the log-probs of a completion and those of a model."""
    return float((torch.tensor(output.log_probs) - logprobs_of(model, PROMPT, output.token_ids)).abs().max())


def test_verl_finds_the_parts_under_their_name() -> None:
    assert get_rollout_replica_class("rollout") is Replica
    assert get_rollout_class("rollout", "async") is ServerAdapter


BOTH = pytest.mark.parametrize("manager", [CheckpointManager, CheckpointEngineManager], ids=["ours", "verl's"])


@BOTH
def test_every_replica_serves_the_weights_that_a_checkpoint_manager_sent(
    servers: LLMServerManager, trainer: Any, config: Any, checkpoint: Path, manager: type
) -> None:
    managed = managed_by(manager, servers, trainer, config)
    before: Any = None
    for step in (4, 5):
        now = model_of(checkpoint, trainer.change(step)[0])
        managed.update_weights(step)
        outputs = generate(servers, 8, max_tokens=12)
        assert max(difference(now, output) for output in outputs) < 1e-4
        assert before is None or min(difference(before, output) for output in outputs) > 1e-3
        assert {output.extra_fields["global_steps"] for output in outputs} == {step}
        before = now


@BOTH
def test_updates_abort_nothing_and_tokens_know_their_steps(
    servers: LLMServerManager, trainer: Any, config: Any, manager: type
) -> None:
    managed = managed_by(manager, servers, trainer, config)
    managed.update_weights(10)
    running = generate_aside(servers, 4, max_tokens=1000, ignore_eos=True)
    steps = itertools.count(11)
    while not running.done():
        trainer.change(next(steps))
        managed.update_weights(next(steps))
    outputs = running.result()
    assert all(output.stop_reason == "completed" and len(output.token_ids) == 1000 for output in outputs)
    spans = [(output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) for output in outputs]
    assert max(last - first for first, last in spans) > 0
    newest = next(steps)
    assert all(10 <= first <= last < newest for first, last in spans)


def test_requests_wait_while_generation_is_paused(servers: LLMServerManager, trainer: Any) -> None:
    replicas = servers.get_replicas()
    for replica in replicas:
        asyncio.run(replica.abort_all_requests())
    waiting = generate_aside(servers, 4, max_tokens=20, ignore_eos=True)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=1.0)
    for replica in replicas:
        asyncio.run(replica.resume_generation())
    assert [len(output.token_ids) for output in waiting.result()] == [20] * 4


def test_requests_of_a_replica_that_leaves_go_on_at_another(servers: LLMServerManager, trainer: Any) -> None:
    leaving = servers.get_replicas()[0]
    running = generate_aside(servers, 6, FullyAsyncLLMServerClient, max_tokens=900, ignore_eos=True)
    balancer = servers.global_load_balancer
    while ray.get(balancer.get_total_inflight.remote()) < 6:
        pass
    ray.get(balancer.remove_servers.remote([leaving.server_address]))
    ended = ray.get(leaving.server_handle.abort_all_requests.remote(reject_request=True))
    outputs = running.result()
    asyncio.run(leaving.resume_generation())
    ray.get(balancer.add_servers.remote({leaving.server_address: leaving.server_handle}))
    assert ended["aborted_count"] > 0
    assert all(len(output.token_ids) == len(output.log_probs) == 900 for output in outputs)


def test_what_cannot_be_served_is_refused(servers: LLMServerManager, config: Any) -> None:
    server = servers.get_replicas()[0].server_handle
    for given, problem in (
        (([5], {"beam_width": 4}, "a"), "beam_width"),
        (([5], {}, "b", ["an image"]), "image_data"),
        (([5] * 3000, {}, "c"), "no room"),
    ):
        with pytest.raises(ValueError, match=problem):
            ray.get(server.generate.remote(*given))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    for changes, problem in (
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size"),
        ({"quantization": "fp8"}, "quantization"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
    ):
        with pytest.raises(ValueError, match=problem):
            serve_flags(dataclasses.replace(rollout, **changes), RolloutMode.STANDALONE)


def test_tool_calls_train_on_the_tokens_that_the_engine_drew(
    servers: LLMServerManager, trainer: Any, checkpoint: Path
) -> None:
    tools = Path(__file__).parents[1] / "support" / "integrations" / "verl_tools.py"
    config = compose_config(
        checkpoint,
        *STANDALONE,
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tools}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    )
    drawn: list[tuple[list[int], Any]] = []
    client = servers.get_client()
    plain = client.generate

    async def recorded(request_id: str, *, prompt_ids: list[int], **given: Any) -> Any:
        before = list(prompt_ids)
        drawn.append((before, await plain(request_id, prompt_ids=before, **given)))
        return drawn[-1][1]

    client.generate = recorded
    prompts = np.empty(4, dtype=object)
    prompts[:] = [[{"role": "user", "content": f"add {n}"}] for n in range(4)]
    batch = DataProto(non_tensor_batch={"raw_prompt": prompts, "agent_name": np.array(["calling_agent"] * 4, object)})

    async def loop() -> Any:
        return await AgentLoopWorker(config, client).generate_sequences(batch)

    output = asyncio.run(loop())
    assert len(drawn) == 12
    for i in range(4):
        there = output.batch["attention_mask"][i].bool()
        ids, said = output.batch["input_ids"][i][there].tolist(), output.batch["response_mask"][i].bool()
        responses = output.batch["responses"][i]
        turns = [(before, turn.token_ids) for before, turn in drawn if ids[: len(before)] == before]
        assert len(turns) == 3
        assert all(ids[len(before) :][: len(turn)] == turn for before, turn in turns)
        assert responses[said].tolist() == [token for _, turn in turns for token in turn]
        logprobs = [value for before, turn in drawn if ids[: len(before)] == before for value in turn.log_probs]
        assert np.allclose(output.batch["rollout_log_probs"][i][said].tolist(), logprobs)
