"""verl's configuration for a tiny model on a CPU, a trainer's rank with such a model, and a loop that calls tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import register as register_loop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from tests.support.integrations.integration_worker import worker_environment

#: A chat template whose tool calls are Hermes's.
TEMPLATE = Path(__file__).with_name("hermes.jinja")
#: Flags of the workers: little memory, and float32 as the model has it.
FLAGS = {"device": "cpu", "kv_pages": 512, "dtype": "float32", "max_rows": 16}


def start_ray(gpus: int) -> None:
    """A Ray of this process, with GPUs that are not there. Its workers have the environment of the tests' workers."""
    env = {name: value for name, value in worker_environment().items() if value is not None}
    ray.init(num_cpus=16, num_gpus=gpus, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": env})


def compose_config(checkpoint: Path, *overrides: str) -> DictConfig:
    """The configuration of verl's PPO trainer, for a model and workers of this project."""
    flags = [f"+actor_rollout_ref.rollout.engine_kwargs.rollout.{name}={value}" for name, value in FLAGS.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={checkpoint}",
                "actor_rollout_ref.rollout.name=rollout",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.prompt_length=512",
                "actor_rollout_ref.rollout.response_length=1024",
                *flags,
                *overrides,
            ],
        )


class TrainerRank(Worker):
    """A rank that has the model and publishes it by verl's checkpoint engine, as verl's own trainers do."""

    def __init__(self, checkpoint: str, engine: dict[str, Any]) -> None:
        super().__init__()
        has_images = hasattr(AutoConfig.from_pretrained(checkpoint), "vision_config")
        kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        self.model = kind.from_pretrained(checkpoint, dtype=torch.float32)
        self.checkpoint_engine = CheckpointEngineRegistry.new("rollout", is_master=self.rank == 0, **engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int) -> dict[str, Any]:
        """Other weights; they are returned."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        return await self.checkpoint_engine.send_weights(self._tensors(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()


def trainer_ranks(checkpoint: Path, ranks: int) -> RayWorkerGroup:
    """A group of such ranks, without GPUs."""
    made = RayClassWithInitArgs(ray.remote(TrainerRank), checkpoint=str(checkpoint), engine={"bucket_size": 1 << 20})
    return RayWorkerGroup(RayResourcePool([ranks], use_gpu=False, max_colocate_count=1), made, device_name="cpu")


TOOL_CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9][0-9]{0,3}, "b": [0-9]\}\}\n</tool_call>'


@register_loop("calling_agent")
class CallingLoop(ToolAgentLoop):
    """verl's loop with tools, whose model can say nothing but calls of `add`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await super().run({**sampling_params, "constraint": {"regex": TOOL_CALL}}, **kwargs)
