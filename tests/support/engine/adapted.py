"""What tests of adapters share: weights, what PEFT makes of them, engines that know them, checks of what was said."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from rollout.engine.features.adapters.feature import AdaptersFeature as AdapterFeature
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.messages.to_engine import PutAdapter
from rollout.engine.messages.to_service import Delta
from rollout.engine.schedule.step_feature import find_feature
from rollout.models.lora_slots import AdapterWeights
from rollout.models.peft_tensors import load_peft_folder
from tests.support.engine.harness import Bench, load
from tests.support.peft_adapters import ALL, make_adapter, merged

SOME = ("q_proj", "up_proj")

Adapters = list[tuple[AdapterWeights, Qwen3ForCausalLM]]


def make_adapters(
    base: Qwen3ForCausalLM,
    folder: Path,
    tmp: pytest.TempPathFactory,
    targets: Sequence[tuple[str, ...]] = (SOME, ALL, SOME),
    seed: int = 0,
) -> Adapters:
    """Weights for slots of rank 16, one for each of `targets`, and the model that PEFT merges of each.

    `folder` has `base` as a checkpoint.
    """
    spec, found = load(folder).spec, []
    for i, names in enumerate(targets):
        adapter = make_adapter(base, tmp.mktemp("adapter"), seed + i, names)
        found.append((load_peft_folder(adapter, spec, 16, torch.float32), merged(base, adapter)))
    return found


def bench_of(model, adapters, count: int = 0, slots: int = 8, **engine) -> Bench:
    bench = Bench(model, adapter_slots=slots, adapter_rank=16, **engine)
    for i in range(count):
        bench.engine.inbox.put(PutAdapter(f"a{i}", adapters[i][0], token=i))
    return bench


def table_of(bench: Bench):
    return find_feature(bench.engine.roster.features, AdapterFeature).table


def slots_of(bench: Bench):
    return find_feature(bench.engine.executor.step.features, AdapterMemory).slots


def versions_of(bench: Bench, name: str, index: int = 0) -> list[int]:
    """Of each token."""
    deltas = [event for event in bench.events if isinstance(event, Delta) and event.key[1] == name]
    marks = [delta for delta in deltas if delta.index == index][-1].adapter_versions
    ends = [*(at for at, _ in marks[1:]), len(bench.tokens(name, index))]
    return [version for (at, version), end in zip(marks, ends, strict=True) for _ in range(at, end)]


def greedy_is(reference, prompt: list[int], got: list[int]) -> None:
    """Each token is the likeliest, or within rounding of it, after those before."""
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *got]])).logits[0, len(prompt) - 1 : -1]
    best, took = logits.max(-1).values, logits[torch.arange(len(got)), torch.tensor(got)]
    assert len(got) > 0 and (best - took).max() < 1e-3
