"""verl 0.9 with workers of this project: its registry, replicas, server manager, checkpoint managers and agent loops."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
    pytest.skip("verl is not installed: pip install 'rollout-engine[verl]'", allow_module_level=True)

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint
from tests.support.integrations.verl_parts import WORKER, compose_config, start_ray, trainer_ranks
from trainer_bridge.integrations.verl import CheckpointManager, Replica, ServerAdapter

pytestmark = pytest.mark.timeout(900)
_Value = TypeVar("_Value")
TEMPLATE = (Path(__file__).parents[1] / "support" / "integrations" / "hermes.jinja").read_text()
PROMPT = [5, 9, 14, 40]
STANDALONE = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2")
BRIDGE = "actor_rollout_ref.rollout.checkpoint_engine.backend=rollout"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_checkpoint(tmp_path_factory.mktemp("verl") / "model", seed=3, template=TEMPLATE)


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


@pytest.fixture(scope="module")
def trainer(servers: LLMServerManager, checkpoint: Path) -> Any:
    return trainer_ranks(checkpoint, 2)


def run(coroutine: Coroutine[Any, Any, _Value]) -> _Value:
    return asyncio.run(coroutine)


def generate(servers: LLMServerManager, count: int = 1, **changes: Any) -> list[Any]:
    """Completions by verl's own client, one for each of `count` conversations."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **changes}
    client = servers.get_client()

    async def all_of_them() -> list[Any]:
        calls = [client.generate(f"c{i}", prompt_ids=PROMPT, sampling_params=dict(params)) for i in range(count)]
        return await asyncio.gather(*calls)

    return run(all_of_them())


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-softmax of the logits at the tokens of a completion of the prompt, as transformers has it [tokens]."""
    both = torch.tensor([PROMPT + ids])
    logits = model(both[:, :-1]).logits[0, len(PROMPT) - 1 :]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def model_of(checkpoint: Path, weights: dict[str, Any]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    return model.eval()


def difference(model: Any, output: Any) -> float:
    """Between the log-probs of a completion and those of a model."""
    return float((torch.tensor(output.log_probs) - logprobs_of(model, output.token_ids)).abs().max())


def test_verl_finds_the_parts_under_their_name() -> None:
    assert get_rollout_replica_class("rollout") is Replica
    assert get_rollout_class("rollout", "async") is ServerAdapter


@pytest.mark.parametrize("manager", [CheckpointManager, CheckpointEngineManager], ids=["ours", "verl's"])
def test_every_replica_serves_the_weights_that_a_checkpoint_manager_sent(
    servers: LLMServerManager, trainer: Any, config: Any, checkpoint: Path, manager: type
) -> None:
    rollout = config.actor_rollout_ref.rollout
    managed = manager(omega_conf_to_dataclass(rollout.checkpoint_engine), trainer, servers.get_replicas())
    before: Any = None
    for step in (4, 5):
        now = model_of(checkpoint, trainer.change(step)[0])
        managed.update_weights(step)
        outputs = generate(servers, 8, max_tokens=12)
        assert max(difference(now, output) for output in outputs) < 1e-4
        assert before is None or min(difference(before, output) for output in outputs) > 1e-3
        assert {output.extra_fields["global_steps"] for output in outputs} == {step}
        before = now
