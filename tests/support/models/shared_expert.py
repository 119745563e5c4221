"""A family with a dense MLP beside its experts: Qwen2-MoE, which the registry does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.models.registry import FAMILIES, Family, Key, MoEFamily, sparse_by_step

ARCHITECTURE = "MadeUpQwen2MoeForCausalLM"
FAMILY = Family(
    model_type="qwen2_moe",
    qkv_bias=True,
    moe=MoEFamily(
        experts=Key("num_experts"),
        intermediate=Key("moe_intermediate_size"),
        renormalize=Key("norm_topk_prob"),
        sparse=sparse_by_step,
        shared_intermediate=Key("shared_expert_intermediate_size"),
        shared_gate=True,
    ),
)


def declare(patch: pytest.MonkeyPatch) -> None:
    """Add the family, as the recipe of docs/architecture.md does."""
    patch.setitem(FAMILIES, ARCHITECTURE, FAMILY)


def rename(folder: Path) -> None:
    """Turn a checkpoint of transformers' Qwen2-MoE into one of this family."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURE]}))
