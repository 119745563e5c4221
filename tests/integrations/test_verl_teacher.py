"""verl's own teacher client asks a server of the integration for log-probs. Ray is installed, but does not run."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
    pytest.skip("verl is not installed: pip install '.[verl]'", allow_module_level=True)

import torch
from transformers import AutoModelForCausalLM
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutMode

from tests.support.integrations.tiny_checkpoints import logprobs_of, make_chat_checkpoint
from tests.support.integrations.verl_parts import TEMPLATE, compose_config
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.integrations.verl import VerlServer, serve_flags
from trainer_bridge.integrations.verl_media import ProcessorSource

SEQUENCE = [5, 9, 14, 40, 7, 3, 22]


class DirectClient:
    """verl's client of servers without its load balancer and Ray: it passes the same arguments on."""

    def __init__(self, server: VerlServer) -> None:
        self.server = server

    async def generate(self, request_id: str, *, mm_processor_output: Any = None, **fields: Any) -> Any:
        assert mm_processor_output is None
        return await self.server.generate(request_id=request_id, **fields)


def manager_of(client: DirectClient, top: int) -> AsyncTeacherLLMServerManager:
    """verl's manager with one teacher; its constructor needs a whole configuration of a distillation."""
    manager = object.__new__(AsyncTeacherLLMServerManager)
    inference = SimpleNamespace(temperature=1.0, max_model_len=256)
    manager.teacher_model_configs = {"teacher": SimpleNamespace(inference=inference)}
    manager.teacher_client = {"teacher": client}
    manager.teacher_key = "data_source"
    manager.distillation_loss_config = SimpleNamespace(topk=top, loss_settings=SimpleNamespace(use_topk=top > 0))
    return manager


def test_a_teacher_of_verl_scores_a_sequence(tmp_path: Path) -> None:
    checkpoint = make_chat_checkpoint(tmp_path / "model", seed=3, template=TEMPLATE.read_text())
    config = compose_config(checkpoint, "actor_rollout_ref.rollout.load_format=auto")
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    server = VerlServer(
        rollout, str(checkpoint), RolloutMode.STANDALONE, 0, None, ProcessorSource(str(checkpoint), None)
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([SEQUENCE])).logits[0, :-1].log_softmax(-1)

    async def scores() -> list[tuple[torch.Tensor, torch.Tensor]]:
        client = AsyncRolloutClient(await server.launch())
        managers = [manager_of(DirectClient(server), top) for top in (0, 5)]
        try:
            return [await manager.compute_teacher_logprobs_single(SEQUENCE) for manager in managers]
        finally:
            await client.shutdown("now")
            await client.close()

    (own_ids, own), (ids, logprobs) = asyncio.run(scores())
    assert own_ids[:, 0].tolist() == [*SEQUENCE[1:], 0] and ids.shape == logprobs.shape == (len(SEQUENCE), 5)
    torch.testing.assert_close(own[:-1, 0], logprobs_of(model, SEQUENCE[:1], SEQUENCE[1:]), atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs[:-1], expected.topk(5).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs[:-1], expected.gather(-1, ids[:-1].long()), atol=1e-4, rtol=0)
    assert not logprobs[-1].any() and not ids[-1].any(), "the last row is padding"


@pytest.mark.parametrize("loss", ["k3", "forward_kl_topk"])
def test_verl_takes_a_worker_as_the_teacher_of_each_loss(tmp_path: Path, loss: str) -> None:
    settings = {
        "enabled": True,
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "distillation_loss.loss_mode": loss,
        "distillation_loss.topk": 5,
        "distillation_loss.use_policy_gradient": False,
        "teacher_models.teacher_model.model_path": tmp_path,
        "teacher_models.teacher_model.inference.tensor_model_parallel_size": 1,
    }
    overrides = [f"distillation.{name}={value}" for name, value in settings.items()]
    distillation = omega_conf_to_dataclass(compose_config(tmp_path, *overrides).distillation)
    (teacher,) = distillation.teacher_models.values()
    room = teacher.inference.prompt_length + 1
    assert serve_flags(teacher.inference, RolloutMode.COLOCATED)["max_context_tokens"] == room


def test_verl_refuses_teachers_of_engines_that_it_does_not_know(tmp_path: Path) -> None:
    overrides = ["distillation.enabled=True", "distillation.teacher_models.teacher_model.inference.name=other"]
    overrides += ["distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.nnodes=1"]
    overrides += [f"distillation.teacher_models.teacher_model.model_path={tmp_path}"]
    with pytest.raises(Exception, match="does not support inference engine other"):
        omega_conf_to_dataclass(compose_config(tmp_path, *overrides).distillation)
