"""Weights over a trainer's own NCCL group, ordered over HTTP: a worker on one GPU, a trainer on another one."""

from pathlib import Path

import pytest
import torch

from tests.support.bridge.group_trainer import trainer
from tests.support.gateway.harness import gateway, post, refused
from tests.support.ports import free_port
from tests.support.worker.harness import ONES, TWOS, launch, tensors
from trainer_bridge.client.blocking import RolloutClient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
FILES = {1: ONES / "model.safetensors", 2: TWOS / "model.safetensors"}
TEXT = {1: " 18 19", 2: " 19 21"}
UPDATE, JOIN, LEAVE = "/update_weights_from_distributed", "/init_weights_update_group", "/destroy_weights_update_group"


def test_updates_over_nccl_ordered_over_http(tmp_path: Path) -> None:
    """As slime orders them: in one part and in two, a wrong one, and a new group after the first."""
    names, found = sorted(tensors(1)), tensors(1)
    env = {"CUDA_VISIBLE_DEVICES": "1"}
    with (
        launch(log=tmp_path / "log", env=env, device="cuda") as worker,
        trainer(DEVICE="cuda:0") as sender,
        gateway([worker.endpoint]) as client,
        RolloutClient(worker.endpoint, timeout_s=60.0) as direct,
    ):

        def told(some: list[str], group: str) -> dict[str, object]:
            dtypes = [str(found[name].dtype).removeprefix("torch.") for name in some]
            shapes = [list(found[name].shape) for name in some]
            return {"names": some, "dtypes": dtypes, "shapes": shapes, "group_name": group}

        def counted() -> str:
            text: str = post(client, "/v1/completions", {"prompt": "17:", "max_tokens": 6})["choices"][0]["text"]
            return text

        version = 0
        for group in ("first", "second"):
            port = free_port()
            sender.join(port, 2, group, backend="nccl")
            where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            assert post(client, JOIN, where | {"group_name": group, "backend": "nccl"})["success"]
            assert sender.done() == {"ok": True}
            for step, parts in ((2, [names]), (1, [names[::2], names[1::2]]), (2, [names[:3], names[3:]])):
                for some in parts:
                    assert direct.status()["weights_version"] == version
                    sender.broadcast(group, FILES[step], some)
                    assert post(client, UPDATE, told(some, group))["success"] and sender.done() == {"ok": True}
                version += 1
                assert direct.status()["weights_version"] == version and counted() == TEXT[step]
            sender.broadcast(group, FILES[1], names)
            refused(client, UPDATE, told(names, group) | {"weight_version": version}, 409)  # it is not newer
            assert sender.done() == {"ok": True} and counted() == TEXT[2]
            assert post(client, LEAVE, {"group_name": group})["success"]
            sender.start("leave", name=group)
            assert sender.done() == {"ok": True}
        refused(client, UPDATE, told(names, "second"), 404)
