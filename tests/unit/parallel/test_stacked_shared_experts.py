"""Shared experts that a checkpoint has as one block: stored as several of the others, alone and with two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.parallel import TensorGroup

from rollout.config import ModelSettings
from rollout.models import LoadedModel, load_model
from rollout.models.cut import kept_values
from rollout.models.joined import JoinedView
from rollout.models.layers import SparseFeedForward
from rollout.weights.kept_memory import InPlaceMemory, StagedMemory
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from rollout.weights.staging import WeightStaging
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.models.latent import make_latent
from tests.support.models.paged import PROMPT, PagedRunner, check
from tests.support.parallel.logits import join_logits
from tests.support.parallel.ranks import Ranks
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")
EXPERTS = 8
_GATED: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": EXPERTS, "num_experts_per_tok": 3, "num_hidden_layers": 2,
}  # fmt: skip
_MOONLIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8}
#: Those of one rank, and of each of two: by the widths that it keeps.
MODELS: dict[str, tuple[int, int, Callable[[Path, int], Any]]] = {
    "moonlight": (2, 1, lambda folder, seed: make_latent("DeepseekV3 moonlight", folder, seed, **_MOONLIGHT)),
    "gated": (
        4, 2, lambda folder, seed: make_checkpoint(
            "Qwen2Moe", folder, seed, **_GATED, moe_intermediate_size=18, shared_expert_intermediate_size=72
        ),
    ),
    "cut by width": (
        2, 2, lambda folder, seed: make_checkpoint(
            "Qwen2Moe", folder, seed, **_GATED, moe_intermediate_size=256, shared_expert_intermediate_size=512
        ),
    ),
    "apart with two ranks": (
        1, 0, lambda folder, seed: make_checkpoint(
            "Qwen2Moe", folder, seed, **_GATED, moe_intermediate_size=18, shared_expert_intermediate_size=18
        ),
    ),
    "another width": (
        0, 0, lambda folder, seed: make_checkpoint(
            "Qwen2Moe", folder, seed, **_GATED, moe_intermediate_size=18, shared_expert_intermediate_size=28
        ),
    ),
}  # fmt: skip


def _load(folder: Path, group: TensorGroup | None = None) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder)), CPU, group=group)


def _stacked(loaded: LoadedModel) -> set[int]:
    """Experts that the sparse layers hold besides those of the router that they keep; those apart do not count."""
    blocks = [block for block in loaded.model.modules() if isinstance(block, SparseFeedForward)]
    assert all(len(block.down) == len(block.gate_up) for block in blocks)
    assert all((block.shared is None) == (len(block.down) > len(block.spec.kept_experts)) for block in blocks)
    return {len(block.down) - len(block.spec.kept_experts) for block in blocks}


def _stream(folder: Path, loaded: LoadedModel) -> tuple[Any, Any, torch.Tensor]:
    """A checkpoint as an update: its manifest, what of it fits, and its bytes."""
    tensors = {name: kept_values(view).contiguous() for name, view in _load(folder).trainer_views().items()}
    names = [name for region in loaded.model.hf_regions() for name in region.alternatives[0]]
    manifest = pack(1, [(name, "float32", list(tensors[name].shape)) for name in names], 1 << 20)
    stream = torch.zeros(max(entry.end for entry in manifest.tensors), dtype=torch.uint8)
    for entry in manifest.tensors:
        stream[entry.offset : entry.end] = tensors[entry.name].view(-1).view(torch.uint8)
    parameters = ParameterMap(loaded.trainer_views(), UpdateNames(loaded.kept_if_absent(), loaded.spec.unused))
    return manifest, parameters.check(manifest), stream


def _update(loaded: LoadedModel, folder: Path, staged: bool) -> None:
    """Its bytes arrive in pieces: staged as a rank of several stages them, or in the parameters."""
    manifest, fit, stream = _stream(folder, loaded)
    views = loaded.trainer_views()
    staging = WeightStaging(StagedMemory(views, shard=True) if staged else InPlaceMemory(views))
    staging.open(manifest, fit)
    for start in range(0, len(stream), 4096):
        staging.take(start, stream[start : start + 4096])
    staging.check()
    staging.swap_copies.enqueue(staging.memory.copies())


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_before_and_after_an_update(name: str, staged: bool, tmp_path: Path) -> None:
    count, _, make = MODELS[name]
    references = [make(tmp_path / str(seed), seed) for seed in range(2)]
    loaded = _load(tmp_path / "0")
    assert _stacked(loaded) == {count}
    joined = [view for view in loaded.trainer_views().values() if isinstance(view, JoinedView)]
    assert bool(joined) == (count > 1)
    check(loaded, references[0], fused=False)
    _update(loaded, tmp_path / "1", staged)
    check(loaded, references[1], fused=False)


def _run_ranks(group: TensorGroup, old: Path, new: Path, staged: bool) -> tuple[set[int], list[torch.Tensor]]:
    loaded = _load(old, group)
    logits = []
    for update in (False, True):
        if update:
            _update(loaded, new, staged)
        runner = PagedRunner(loaded.model, rows=1, max_tokens=len(PROMPT))
        found = [runner.prefill({0: PROMPT[:11]})[0], *(runner.decode({0: token})[0][None] for token in PROMPT[11:])]
        logits.append(join_logits(loaded.model, torch.cat(found)))
    return _stacked(loaded), logits


@pytest.mark.parametrize("staged", [True, *nightly(False)])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_the_logits_of_transformers_before_and_after_an_update(
    name: str, staged: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    _, count, make = MODELS[name]
    references = [make(tmp_path / str(seed), seed) for seed in range(2)]
    for stacked, logits in start_ranks(2).run(_run_ranks, tmp_path / "0", tmp_path / "1", staged):
        assert stacked == {count}
        for found, reference in zip(logits, references, strict=True):
            with torch.no_grad():
                exact = reference(torch.tensor([PROMPT])).logits[0]
            assert (found - exact).abs().max() < 1e-4
