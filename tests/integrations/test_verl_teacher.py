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
from trainer_bridge.integrations.verl import VerlServer
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
