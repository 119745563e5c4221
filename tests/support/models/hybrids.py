"""Tiny random checkpoints of families that mix attention with linear attention."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.models.families import make_model

_COMMON: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "rms_norm_eps": 1e-2,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_OF_DELTA_NET = {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": _PARTIAL_ROPE,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 22,
}
#: Their norms are stored less 1.
_OFFSET_NORMS = {"Qwen3_5", "Qwen3_5Moe", "Qwen3Next"}
_WITH_DELTA_NET = _OFFSET_NORMS | {"OlmoHybrid"}
#: By the stem of transformers' classes, and a word where one has two configs.
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"head_dim": 16, "intermediate_size": 64, "rope_parameters": _PARTIAL_ROPE},
    # The shared expert is as wide as the others here, and another width in Qwen3Next.
    "Qwen3_5Moe": {**_EXPERTS, "shared_expert_intermediate_size": 18},
    "Qwen3Next": {**_EXPERTS, "intermediate_size": 40, "mlp_only_layers": [1], "linear_num_value_heads": 6},
    "OlmoHybrid": {"intermediate_size": 64, "linear_num_key_heads": 4},
    "KimiLinear": {
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 10,
        "kv_lora_rank": 18,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "routed_scaling_factor": 1.7,
    },
}
#: As Ling-3: Kimi-Linear with gates of latent attention and bounded decays that no latent makes.
HYBRIDS["BailingHybrid"] = {
    **{name: value for name, value in HYBRIDS["KimiLinear"].items() if not name.startswith("linear_")},
    "head_dim": 10,
    "kda_lower_bound": -3.0,
}
HYBRIDS["BailingHybrid limited"] = HYBRIDS["BailingHybrid"] | {
    "expert_swiglu_limit_list": [0, None, 0.2, 0.1], "share_expert_swiglu_limit_list": [0.0, 0.15, 0, 0.1],
}  # fmt: skip
HYBRIDS["BailingHybrid unbounded"] = HYBRIDS["BailingHybrid"] | {"kda_safe_gate": False, "q_lora_rank": 22}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16, "shared_intermediate_size": 40, "attention_multiplier": 0.2,
    "residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 2.5,
}  # fmt: skip
HYBRIDS["GraniteMoeHybrid"] = _MAMBA2 | {
    "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 18, "position_embedding_type": "rope",
    "mamba_proj_bias": True,
}  # fmt: skip
#: As Granite 4's small ones: no experts, no positions, one group; steps have bounds.
HYBRIDS["GraniteMoeHybrid dense"] = _MAMBA2 | {
    "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1, "mamba_conv_bias": False,
    "time_step_limit": [0.1, 1.2],
}  # fmt: skip
HYBRIDS["NemotronH"] = {
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 10, "intermediate_size": 56,
    "time_step_min": 0.1, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 36, "head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    "layer_norm_epsilon": 1e-2,
}  # fmt: skip
HYBRIDS["NemotronH latent"] = HYBRIDS["NemotronH"] | {"moe_latent_size": 30, "use_bias": True, "use_conv_bias": False}
_OF_LLAMA = {"num_hidden_layers", "rms_norm_eps"}


@dataclass(frozen=True)
class _Bounded:
    """An activated gate whose product with values bounds both, by the rule of Ling 3's makers."""

    gate: torch.Tensor
    limit: float

    def __mul__(self, up: torch.Tensor) -> torch.Tensor:
        return self.gate.clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class _LimitedSiLU(torch.nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: torch.Tensor) -> Any:
        return _Bounded(torch.nn.functional.silu(gate), self.limit)


def limit_activations(model: Any) -> None:
    """Have transformers' module use the limits that its config has and its code leaves out."""
    for part in ("expert", "share_expert"):
        limits = getattr(model.config.get_text_config(), f"{part}_swiglu_limit_list", None) or []
        for index, limit in enumerate(limits):
            if limit:
                block = model.get_decoder().layers[index].mlp
                block = block.experts if part == "expert" else block.shared_experts
                block.act_fn = _LimitedSiLU(limit)


def make_hybrid(stem: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Save a random model to `folder`, under the names of its state_dict, and return it.

    A norm of small values multiplies rounding errors; weights and eps are such that few values are small.
    """
    config = {**_COMMON, **HYBRIDS[stem], **overrides}
    stem = stem.split()[0]
    if stem not in _WITH_DELTA_NET:  # they have other names for these
        config = {name: value for name, value in config.items() if name not in _OF_DELTA_NET}
    if stem == "NemotronH":
        config = {name: value for name, value in config.items() if name not in _OF_LLAMA}
    model = make_model(stem, seed, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and ".linear_attn." not in name and stem in _OFFSET_NORMS:
                parameter.sub_(1.0)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight", "out_proj.weight")):
                parameter.mul_(0.6)
        model.lm_head.weight.mul_(0.3)
    limit_activations(model)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return model
