"""Weights that arrive over the bridge at a model whose weights are kept as codes: real sockets, threads and staging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import Decoder, load_model
from tests.support.bridge.harness import Worker
from tests.support.models.families import make_checkpoint
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}
CODED = ["mxfp8", "fp8_row", "fp8_block"]


class Served:
    """A decoder as the harness takes it."""

    def __init__(self, folder: Path, weights: str, device: str = "cpu", dtype: str = "bfloat16") -> None:
        settings = ModelSettings(path=str(folder), dtype=dtype)
        self.model: Decoder = load_model(settings, torch.device(device), weights=weights).model
        self.views = self.model.hf_views()

    def equals(self, other: Served) -> bool:
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two folders of one shape, and the second one's weights as a trainer holds them."""
    base = tmp_path_factory.mktemp("mixtral")
    make_checkpoint("mixtral", base / "old", **SIZES)
    return base / "old", base / "new", make_checkpoint("mixtral", base / "new", 5, **SIZES).state_dict()


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with a tensor for each expert's projections."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.replace("mlp.experts.gate_up_proj", "").replace("mlp.experts.down_proj", "")
        for expert, weights in enumerate(tensor) if stem != name else ():
            target = f"{stem}block_sparse_moe.experts.{expert}"
            if name.endswith("down_proj"):
                found[f"{target}.w2.weight"] = weights
            else:
                found[f"{target}.w1.weight"], found[f"{target}.w3.weight"] = weights.chunk(2)
        if stem == name:
            found[name] = tensor
    return found


def check_update(checkpoints, format: str, stacked: bool, device: str) -> None:
    old, new, tensors = checkpoints
    served, fresh = Served(old, format, device), Served(new, format, device)
    assert not served.equals(fresh)
    sent = tensors if stacked else one_by_one(tensors)
    assert any("experts." in name and "_proj" in name for name in sent) == stacked
    with Worker(model=served) as worker, WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher:
        publisher.publish({name: tensor.to(device) for name, tensor in sent.items()}, 1).applied(60)
        assert served.equals(fresh), "as if it had been loaded with them"
        half = {name: tensor for name, tensor in sent.items() if "experts.1." not in name or stacked}
        if not stacked:
            with pytest.raises(WeightsRejected, match="missing tensors"):
                publisher.publish(half, 2).applied(60)
        assert served.equals(fresh)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("format", CODED)
def test_an_update_is_quantised_as_the_checkpoint_would_be(checkpoints, format, stacked):
    check_update(checkpoints, format, stacked, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("format", CODED)
def test_an_update_is_quantised_on_a_gpu(checkpoints, format, stacked):
    check_update(checkpoints, format, stacked, "cuda")
