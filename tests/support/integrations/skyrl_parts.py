"""What the tests take from SkyRL, and gloo in the place of the NCCL engine that its sender imports from vLLM."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterable
from datetime import timedelta
from threading import Event
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typing_extensions

from tests.support.patience import PATIENCE_S
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup

with pytest.MonkeyPatch.context() as patch:
    if sys.version_info < (3, 12):  # pydantic refuses typing's TypedDict there, and SkyRL uses it
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.inference_servers.setup import InferenceServerSetup, build_new_inference_client
    from skyrl.backends.skyrl_train.weight_sync import BroadcastTransferStrategy, get_transfer_strategy_cls
    from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk
    from skyrl.train.config import SkyRLTrainConfig

__all__ = [
    "BroadcastTransferStrategy",
    "GlooEngine",
    "InferenceServerSetup",
    "RemoteInferenceClient",
    "SkyRLTrainConfig",
    "WeightChunk",
    "build_new_inference_client",
    "get_sampling_params_for_backend",
    "get_transfer_strategy_cls",
    "use_gloo_engine",
]


class GlooEngine:
    """The trainer's side of vLLM's engine, by gloo: the two methods that SkyRL calls. It packs all tensors into one."""

    @staticmethod
    def trainer_init(init_info: dict[str, Any]) -> BroadcastGroup:
        """Rank 0 of the group; returns when the workers are there."""
        host, port, size = (init_info[name] for name in ("master_address", "master_port", "world_size"))
        store = dist.TCPStore(host, port, size, is_master=True, timeout=timedelta(seconds=PATIENCE_S))
        name = "vllm weight transfer"  # the gateway's name for the group
        return BroadcastGroup(store, f"{name}/{name}//cpu/", 0, size, host, torch.device("cpu"), PATIENCE_S)

    @staticmethod
    def trainer_send_weights(iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]) -> None:
        """Broadcast the tensors, which have less than vLLM's buffer of 1 GiB together."""
        assert trainer_args["packed"]
        packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in iterator])
        trainer_args["group"].broadcast(packed).wait(Event())


def use_gloo_engine(patch: pytest.MonkeyPatch) -> None:
    """Have SkyRL find `GlooEngine` where it imports vLLM's engine."""
    path = "vllm.distributed.weight_transfer.nccl_engine"
    names = path.split(".")
    for end in range(1, len(names) + 1):
        patch.setitem(sys.modules, ".".join(names[:end]), ModuleType(".".join(names[:end])))
    patch.setattr(sys.modules[path], "NCCLWeightTransferEngine", GlooEngine, raising=False)
