"""Weights that arrive over the bridge at a model whose weights are kept as codes: real sockets, threads and staging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import Decoder, load_model
from rollout.models.coded import SCALES, CodedView
from rollout.weights.parameter_map import UpdateNames
from tests.support.bridge.harness import Worker
from tests.support.models.families import make_checkpoint
from tests.support.models.mxfp4 import make_mxfp4
from trainer_bridge import quantize_fp8_block
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}
CODED = ["mxfp8", "fp8_row", "fp8_block"]


class Served:
    """A decoder as the harness takes it."""

    def __init__(self, folder: Path, weights: str, device: str = "cpu", dtype: str = "bfloat16") -> None:
        settings = ModelSettings(path=str(folder), dtype=dtype)
        loaded = load_model(settings, torch.device(device), weights=weights)
        self.model: Decoder = loaded.model
        self.views, self.scales = loaded.trainer_views(), frozenset(loaded.scale_views())

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


def worker_of(served: Served, **settings: Any) -> Worker:
    return Worker(model=served, names=UpdateNames(scales=served.scales), **settings)


def check_update(checkpoints, format: str, stacked: bool, device: str) -> None:
    old, new, tensors = checkpoints
    served, fresh = Served(old, format, device), Served(new, format, device)
    assert not served.equals(fresh)
    sent = tensors if stacked else one_by_one(tensors)
    assert any("experts." in name and "_proj" in name for name in sent) == stacked
    with (
        Worker(model=served, names=UpdateNames(scales=served.scales)) as worker,
        WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher,
    ):
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


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Two folders of a model without experts, whose modules end within blocks, and the second one's weights."""
    base = tmp_path_factory.mktemp("qwen3")
    sizes = {"hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 2}
    make_checkpoint("qwen3", base / "old", **sizes)
    return base / "old", base / "new", make_checkpoint("qwen3", base / "new", 5, **sizes).state_dict()


def as_codes(tensors: dict[str, torch.Tensor], served: Served) -> dict[str, torch.Tensor]:
    """The same update with codes and scales in the place of the weights that the worker keeps as codes."""
    sent = {}
    for name, tensor in tensors.items():
        if isinstance(served.model.hf_views().get(name), CodedView):
            sent[name], sent[name + SCALES] = quantize_fp8_block(tensor)
        else:
            sent[name] = tensor
    return sent


def check_codes(folders, tensors, device: str, **settings: Any) -> None:
    """Codes, then weights, then codes again: each time as a worker that starts with these weights."""
    old, new = folders
    served, fresh, before = (Served(folder, "fp8_block", device) for folder in (old, new, old))
    was = {name: view.clone() for name, view in Served(old, "plain", "cpu", "float32").views.items()}
    assert not served.equals(fresh)
    codes = {name: tensor.to(device) for name, tensor in as_codes(tensors, served).items()}
    with (
        Worker(model=served, names=UpdateNames(scales=served.scales)) as worker,
        WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher,
    ):
        publisher.publish(codes, 1).applied(60)
        assert served.equals(fresh), "as if it had been loaded with them"
        back = {name: was[name].to(device) for name in tensors if name in was}
        publisher.publish(back, 2).applied(60)
        assert served.equals(before), "weights after codes"
        publisher.publish(codes, 3).applied(60)
        assert served.equals(fresh), "codes after weights"
        name = next(name for name in codes if name.endswith(SCALES))
        with pytest.raises(WeightsRejected, match="codes without scales"):
            publisher.publish({n: tensor for n, tensor in codes.items() if n != name}, 4).applied(60)
        weight = name.removesuffix(SCALES)
        with pytest.raises(WeightsRejected, match="scales without codes"):
            publisher.publish(codes | {weight: tensors[weight].to(device)}, 5).applied(60)
        wrong = codes | {name: codes[name][:0]}
        with pytest.raises(WeightsRejected, match="wrong shapes"):
            publisher.publish(wrong, 6).applied(60)
        assert served.equals(fresh)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_update_may_be_codes_and_scales(dense, apply):
    old, new, tensors = dense
    check_codes((old, new), tensors, "cpu", apply=apply)


def test_codes_of_experts_may_be_sent(checkpoints):
    old, new, tensors = checkpoints
    check_codes((old, new), one_by_one(tensors), "cpu")


def test_codes_are_refused_by_a_worker_that_keeps_weights(dense):
    old, _, tensors = dense
    served, coded = Served(old, "plain"), Served(old, "fp8_block")
    for other in (served, Served(old, "fp8_row")):
        with (
            Worker(model=other, names=UpdateNames(scales=other.scales)) as worker,
            WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher,
        ):
            with pytest.raises(WeightsRejected, match="unknown tensors|codes"):
                publisher.publish(as_codes(tensors, coded), 1).applied(60)
            only_codes = {name: t for name, t in as_codes(tensors, coded).items() if not name.endswith(SCALES)}
            with pytest.raises(WeightsRejected, match="set its weight_dtype"):
                publisher.publish(only_codes, 2).applied(60)


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory):
    """Two checkpoints with experts in MXFP4, and the second one's weights as a trainer in bf16 holds them."""
    base = tmp_path_factory.mktemp("gpt_oss")
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    make_mxfp4(base / "old", **sizes)
    tensors = make_mxfp4(base / "new", 1, **sizes).state_dict()
    return base / "old", base / "new", {name: tensor.bfloat16() for name, tensor in tensors.items()}


def check_mxfp4(folders, device: str, **settings: Any) -> None:
    old, new, tensors = folders
    served, fresh = Served(old, "auto", device), Served(new, "auto", device)
    assert served.model.format == "mxfp8" and not served.equals(fresh)
    with worker_of(served, **settings) as worker, WeightPublisher(worker.endpoint, bucket_bytes=1 << 14) as publisher:
        publisher.publish({name: tensor.to(device) for name, tensor in tensors.items()}, 1).applied(60)
        assert served.equals(fresh), "as if it had been loaded with them"
        name = "model.layers.0.mlp.experts.down_proj"
        with pytest.raises(WeightsRejected, match="send 16-bit weights"):
            publisher.publish(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, 2).applied(60)
        assert served.equals(fresh)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_update_in_bf16_reaches_experts_in_mxfp4(in_mxfp4, apply):
    check_mxfp4(in_mxfp4, "cpu", apply=apply)


@pytest.mark.gpu
def test_an_update_in_bf16_reaches_experts_in_mxfp4_on_a_gpu(in_mxfp4):
    check_mxfp4(in_mxfp4, "cuda")


@pytest.mark.gpu
def test_codes_are_sent_to_a_gpu(dense):
    old, new, tensors = dense
    check_codes((old, new), tensors, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("format", CODED)
def test_an_update_is_quantised_on_a_gpu(checkpoints, format, stacked):
    check_update(checkpoints, format, stacked, "cuda")


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("format", CODED)
def test_changes_are_quantised_as_a_whole_update_and_in_place_come_whole(checkpoints, format, apply):
    """Staged, the last update is kept as it was sent; in place the parameters have codes, which cannot be changed."""
    old, new, tensors = checkpoints
    served, fresh = Served(old, format), Served(new, format)
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in first.values():
        tensor.view(-1)[::50] += 1
    how: dict[str, Any] = {"transport": "zmq", "bucket_bytes": 1 << 14, "deltas": "host"}
    with worker_of(served, apply=apply) as worker, WeightPublisher(worker.endpoint, **how) as publisher:
        publisher.publish(first, 1).applied(60)
        assert not served.equals(fresh)
        (report,) = publisher.publish(tensors, 2).applied(60)
        assert served.equals(fresh) and (report.sent_nbytes < report.nbytes) == (apply == "staged")


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_codes_and_weights_may_come_as_changes_to_the_last_update_of_their_kind(dense, apply):
    old, new, tensors = dense
    served, fresh = Served(old, "fp8_block"), Served(new, "fp8_block")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # none is another one's memory
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in first.values():
        tensor.view(-1)[::50] = 0  # the largest of most blocks, and so the scales, stay
    how: dict[str, Any] = {"transport": "zmq", "bucket_bytes": 1 << 14, "deltas": "host"}
    versions = [as_codes(first, served), as_codes(tensors, served), first, tensors, as_codes(tensors, served)]
    sent_whole = []
    with worker_of(served, apply=apply) as worker, WeightPublisher(worker.endpoint, **how) as publisher:
        for version, sent in enumerate(versions, 1):
            (report,) = publisher.publish(sent, version).applied(60)
            sent_whole.append(report.sent_nbytes == report.nbytes)
            assert served.equals(fresh) == (sent is not versions[0] and sent is not first)
    assert sent_whole == ([True, False, True, False, True] if apply == "staged" else [True] * 5)
