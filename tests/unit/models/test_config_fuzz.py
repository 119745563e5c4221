"""Configs with keys that are deleted, renamed, null, older or strange: as transformers, or refused, never different."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.kernels.grids import nightly
from tests.support.models.both_ways import NAMES, change_at_random, compare, edit, make

#: One of each form of configs: windows, experts, latents, linear attention, layer types, a language model inside.
_QUICK = (
    *("llama", "qwen2", "qwen3_moe", "Mistral", "Gemma3", "Phi3", "Glm4Moe", "GptOss", "Qwen3_5", "DeepseekV3"),
    *("images: Gemma 3", "Qwen2.5-VL"),
)


@pytest.mark.parametrize(
    ("name", "cases"), [*((name, 5) for name in _QUICK), *nightly(*((name, 200) for name in NAMES))]
)
def test_a_changed_config_is_as_in_transformers_or_refused(name: str, cases: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make(name, tmp_path / "good")
    assert compare(tmp_path / "good") == "equal"
    outcomes: Counter[str] = Counter()
    for case in range(cases):
        rng = random.Random(f"{name} {case}")
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / "changed", dirs_exist_ok=True))
        changes: list[str] = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            edit(folder, lambda content, rng=rng, changes=changes: changes.append(change_at_random(content, rng)))
        outcome = compare(folder)
        assert outcome != "differ", changes
        outcomes[outcome] += 1
    assert outcomes["equal"] > cases / 10 and outcomes["refused"]
