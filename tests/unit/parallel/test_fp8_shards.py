"""A shard of a model whose weights are codes of blocks: its parts of codes and scales, from files and from updates."""

import json
from pathlib import Path

import torch
from rollout_kernels.parallel import TensorGroup
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from rollout.models.coded import SCALES, CodedView
from rollout.models.cut import CutView
from rollout.weights.delta_staging import DeltaStaging
from rollout.weights.kept_memory import InPlaceMemory, StagedMemory
from rollout.weights.parameter_map import ParameterMap, update_names
from rollout.weights.staged_weights import SwapCopies
from rollout.weights.staging import WeightStaging
from tests.support.models.families import make_checkpoint
from trainer_bridge import quantize_fp8_block
from trainer_bridge.transports.changed_words import changed_words
from trainer_bridge.wire.delta import WeightDelta
from trainer_bridge.wire.manifest import Manifest, pack

CPU = torch.device("cpu")
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def load(folder: Path, weights: str = "auto", group: TensorGroup | None = None) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), dtype="float32"), CPU, weights=weights, group=group)


def codes_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" in name:
            made[name], made[name + SCALES] = quantize_fp8_block(tensor)
    return made


def parameters(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in loaded.model.named_parameters()}


def _load_shard(group: TensorGroup, folder: Path) -> int:
    """The number of tensors whose codes and scales are the shard's parts of the whole ones."""
    whole, ours, equal = load(folder), load(folder, group=group), 0
    scales, whole_scales = ours.scale_views(), whole.scale_views()
    for name, codes in whole.model.hf_views().items():
        view = ours.model.hf_views()[name]
        if isinstance(codes, CodedView) and isinstance(view, CutView):
            kept, part = torch.as_tensor(view.kept_part), view.cut.take(torch.as_tensor(codes))
            of_scales = scales[name + SCALES]
            assert isinstance(of_scales, CutView)
            same = torch.equal(of_scales.kept_part, of_scales.cut.take(whole_scales[name + SCALES]))
            equal += same and torch.equal(kept.as_subclass(torch.Tensor), part.as_subclass(torch.Tensor))
    return equal


def packed(version: int, tensors: dict[str, torch.Tensor]) -> tuple[Manifest, torch.Tensor]:
    rows = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    manifest = pack(version, rows, 1 << 20)
    stream = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for entry in manifest.tensors:
        stream[entry.offset : entry.end] = tensors[entry.name].contiguous().view(torch.uint8).flatten()
    return manifest, stream


def _change_shard(group: TensorGroup, old: Path, new: Path) -> bool:
    """Codes, then changes to them: as a shard that was loaded with them."""
    ours, fresh = load(old, "fp8_block", group), load(new, "fp8_block", group)
    names = ParameterMap(ours.trainer_views(), update_names(ModelSettings(), ours))
    staging = WeightStaging(StagedMemory(names.views, "host", shard=True))
    tensors = [codes_of(load_file(folder / "model.safetensors")) for folder in (old, new)]
    (first, before), (second, after) = (packed(version, found) for version, found in enumerate(tensors, 1))
    staging.open(first, names.check(first))
    staging.take(0, before)
    staging.check()
    staging.base.verified("a" * 32)
    codes = {}
    for bucket in range(second.bucket_count):
        start, end = second.bucket_span(bucket)
        codes |= {f"{bucket}.{part}": code for part, code in changed_words(before[start:end], after[start:end]).items()}
    manifest, stream = packed(2, codes)
    changes = DeltaStaging(staging, second, WeightDelta("a" * 32, manifest, (0,) * second.bucket_count))
    changes.take(0, stream)
    while not changes.copied():
        pass
    changes.check()
    SwapCopies().enqueue(staging.memory.copies())
    got, expected = parameters(ours), parameters(fresh)
    return all(torch.equal(got[name], expected[name]) for name in expected)


def _update_shard(group: TensorGroup, old: Path, new: Path, in_place: bool) -> bool:
    """Codes, then weights: each time as a shard that was loaded with them."""
    ours, fresh = load(old, "fp8_block", group), load(new, "fp8_block", group)
    before = parameters(ours)
    names = ParameterMap(ours.trainer_views(), update_names(ModelSettings(), ours))
    memory = InPlaceMemory(names.views) if in_place else StagedMemory(names.views, "host", shard=True)
    staging = WeightStaging(memory)
    for version, tensors, expected in (
        (1, codes_of(load_file(new / "model.safetensors")), parameters(fresh)),
        (2, load_file(old / "model.safetensors"), before),
    ):
        manifest, stream = packed(version, tensors)
        staging.open(manifest, names.check(manifest))
        for start in range(0, len(stream), 50_000):
            staging.take(start, stream[start : start + 50_000])
        staging.check()
        SwapCopies().enqueue(staging.memory.copies())
        got = parameters(ours)
        if not all(torch.equal(got[name], expected[name]) for name in expected):
            return False
    return True


def test_ranks_keep_parts_of_codes_and_scales(tmp_path, start_ranks):
    make_checkpoint("qwen3", tmp_path, **SIZES, num_hidden_layers=2)
    file = tmp_path / "model.safetensors"
    save_file(codes_of(load_file(file)), file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": QUANTIZED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert start_ranks(2).run(_load_shard, tmp_path) == [14, 14]


def test_codes_and_weights_fill_a_shard_as_a_fresh_start_does(tmp_path, start_ranks):
    for seed in range(2):
        make_checkpoint("qwen3", tmp_path / str(seed), seed, **SIZES, num_hidden_layers=2)
    for in_place in (False, True):
        assert all(start_ranks(2).run(_update_shard, tmp_path / "0", tmp_path / "1", in_place))


def test_changes_to_codes_fill_a_shard_as_a_fresh_start_does(tmp_path, start_ranks):
    for seed in range(2):
        make_checkpoint("qwen3", tmp_path / str(seed), seed, **SIZES, num_hidden_layers=2)
    assert all(start_ranks(2).run(_change_shard, tmp_path / "0", tmp_path / "1"))
