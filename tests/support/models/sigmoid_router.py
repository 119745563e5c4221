"""A family whose router the kernels do not have, in a plain model: chosen by sigmoid plus a bias, weighted by sigmoid.

Otherwise it is Qwen3-MoE. transformers' Qwen3-MoE, with its routers replaced, is what it is held against.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.models.families import FAMILIES
from rollout.models.families.declare import Family, Key, MoEFamily, sparse_by_step
from rollout.models.spec import RouterSpec

ARCHITECTURE = "SigmoidMoeForCausalLM"
FAMILY = Family(
    model_type="qwen3_moe",
    qk_norm="head",
    moe=MoEFamily(
        experts=Key("num_experts"),
        intermediate=Key("moe_intermediate_size"),
        renormalize=True,
        scoring="sigmoid",
        router_bias=True,
        router_float32=True,
        sparse=sparse_by_step,
    ),
)


def route_by_sigmoid(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, router: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule of DeepSeek-V3's paper (arXiv 2412.19437, section 2.1.2), without groups."""
    assert bias_E is not None and router.renormalize
    scores_TE = logits_TE.float().sigmoid()
    experts_TK = (scores_TE + bias_E).topk(router.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    return weights_TK / weights_TK.sum(1, keepdim=True), experts_TK


def declare(patch: pytest.MonkeyPatch) -> None:
    """Add the family, as the recipe of docs/recipes.md does."""
    patch.setitem(FAMILIES, ARCHITECTURE, FAMILY)


def give_biases(folder: Path, reference: Any) -> None:
    """Turn a checkpoint of Qwen3-MoE into one of this family, and let its transformers model choose experts by it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [ARCHITECTURE]}))
    tensors = load_file(folder / "model.safetensors")
    router = RouterSpec("softmax", reference.config.num_experts_per_tok, renormalize=True)
    generator = torch.Generator().manual_seed(7)
    for index, layer in enumerate(reference.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue
        bias_E = 0.3 * torch.randn(reference.config.num_experts, generator=generator)
        tensors[f"model.layers.{index}.mlp.gate.e_score_correction_bias"] = bias_E
        gate = layer.mlp.gate

        def choose(
            x: torch.Tensor, weight: torch.Tensor = gate.weight, bias_E: torch.Tensor = bias_E
        ) -> tuple[torch.Tensor, ...]:
            logits_TE = x.reshape(-1, weight.shape[1]).float() @ weight.float().T
            return logits_TE, *route_by_sigmoid(logits_TE, bias_E.to(x.device), router)

        gate.forward = choose
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
