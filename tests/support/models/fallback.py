"""Tiny random checkpoints of architectures that run through transformers' own code."""

from pathlib import Path
from typing import Any

import torch
import transformers

_TOKENS: dict[str, Any] = {"vocab_size": 89, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_BASE: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_HEADS: dict[str, Any] = {**_BASE, "head_dim": 12}
_MOE: dict[str, Any] = {
    **_HEADS,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA: dict[str, Any] = {
    **{name: value for name, value in _MOE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}
_GPT2: dict[str, Any] = {**_TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 19}
_MAMBA: dict[str, Any] = {
    "mamba_d_state": 6,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}

#: Architecture: what its config has. Windows are smaller than the prompts, so that they matter.
CONFIGS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**_MOE, **_WINDOWS, "num_dense_layers": 1, "num_shared_experts": 1},
    "ApertusForCausalLM": _BASE,
    "BloomForCausalLM": {**_TOKENS, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "DiffLlamaForCausalLM": {**_HEADS, "head_dim": 8},
    "FalconH1ForCausalLM": {**_HEADS, **_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "Gemma3nForCausalLM": {
        **_HEADS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "sliding_window": 19,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 89,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 6,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "GraniteMoeHybridForCausalLM": {
        **_MOE,
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 20,
    },
    "KimiLinearForCausalLM": {
        **_MLA,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "HYV4ForCausalLM": {
        **_MLA,
        "routed_scaling_factor": 1.3,
        "n_group": 1,
        "index_topk": 6,
        "index_head_dim": 16,
        "index_n_heads": 24,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "MiniMaxM3VLForCausalLM": {
        **_HEADS,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 40,
        "shared_intermediate_size": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    "Qwen4ExpForCausalLM": {
        **_HEADS,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hc_lowrank"), 8),
        **dict.fromkeys(("num_experts", "num_experts_per_tok"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 20),
        # With so many heads few scores are 0; more tokens than the budget.
        **{"indexer_n_heads": 24, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4, "rms_norm_eps": 1e-2},  # small values are normalised
    },
    "Lfm2ForCausalLM": {**_HEADS, "layer_types": ["conv", "full_attention", "conv"]},
    "MambaForCausalLM": {**_BASE, "state_size": 4, "time_step_rank": 4},
    "Mamba2ForCausalLM": {**_BASE, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "StableLmForCausalLM": {**_BASE, "partial_rotary_factor": 0.5},
    "ArceeForCausalLM": {**_HEADS, "attention_bias": True},
    "CohereForCausalLM": {**_BASE, "logit_scale": 0.5, "use_qk_norm": True},
    "Cohere2ForCausalLM": {**_BASE, **_WINDOWS, "logit_scale": 0.5},
    "CwmForCausalLM": {**_HEADS, **_WINDOWS},
    "DeepseekV2ForCausalLM": {**_MLA, "topk_method": "greedy", "moe_layer_freq": 1, "routed_scaling_factor": 1.3},
    "DeepseekV3ForCausalLM": {**_MLA, "routed_scaling_factor": 1.3, "norm_topk_prob": True},
    "Dots1ForCausalLM": _MOE,
    "Ernie4_5ForCausalLM": _HEADS,
    "Ernie4_5_MoeForCausalLM": {
        **{name: value for name, value in _MOE.items() if name != "head_dim"},
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "Exaone4ForCausalLM": {**_BASE, **_WINDOWS, "sliding_window_pattern": 2},
    "FlexOlmoForCausalLM": {**_MOE, "head_dim": 8},
    "GemmaForCausalLM": _HEADS,
    "Gemma2ForCausalLM": {
        **_HEADS,
        **_WINDOWS,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 9.0,
    },
    "Gemma3ForCausalLM": {**_HEADS, **_WINDOWS, "query_pre_attn_scalar": 9},
    "GlmForCausalLM": {**_HEADS, "partial_rotary_factor": 0.5},
    "Glm4ForCausalLM": {**_HEADS, "partial_rotary_factor": 0.5},
    "Glm4MoeForCausalLM": {**_MOE, "use_qk_norm": True},
    "Glm4MoeLiteForCausalLM": _MLA,
    "GPT2LMHeadModel": _GPT2,
    "GPTBigCodeForCausalLM": _GPT2,
    "GPTNeoXForCausalLM": {**_BASE, "rotary_pct": 0.5},
    "GptOssForCausalLM": {**_MOE, **_WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "GraniteMoeForCausalLM": {**_MOE, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "HeliumForCausalLM": {**_HEADS, "head_dim": 8},
    "HunYuanDenseV1ForCausalLM": _HEADS,
    "LlamaForCausalLM": _HEADS,
    "MiMoV2FlashForCausalLM": {**_MOE, **_WINDOWS, "v_head_dim": 10},
    "MiniMaxM2ForCausalLM": _MOE,
    "MinistralForCausalLM": {**_HEADS, **_WINDOWS},
    "MixtralForCausalLM": {**_MOE, "sliding_window": 23},
    "ModernBertDecoderForCausalLM": {
        **_BASE,
        "pad_token_id": 0,
        "local_attention": 22,
        "global_attn_every_n_layers": 2,
    },
    "NanoChatForCausalLM": _BASE,
    "NemotronForCausalLM": {**_HEADS, "partial_rotary_factor": 0.5},
    "OlmoForCausalLM": {**_BASE, "clip_qkv": 1.5},
    "PersimmonForCausalLM": _BASE,
    "PhiForCausalLM": {**_BASE, "partial_rotary_factor": 0.5},
    "PhimoeForCausalLM": {**_MOE, "head_dim": 8, "sliding_window": 23},
    "Qwen2MoeForCausalLM": {**_MOE, "head_dim": 8, "shared_expert_intermediate_size": 24},
    "Qwen3ForCausalLM": _HEADS,
    "SolarOpenForCausalLM": _MOE,
    "Starcoder2ForCausalLM": {**_BASE, "sliding_window": 23},
    "VaultGemmaForCausalLM": {**_HEADS, **_WINDOWS, "query_pre_attn_scalar": 9},
}


def make_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model with random float32 weights, whose greedy text depends on its past."""
    cls = getattr(transformers, architecture)
    config = cls.config_class(**{**CONFIGS[architecture], **overrides})
    torch.manual_seed(seed)  # for what transformers initialises itself
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    if cls._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    output = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is output:
                parameter.normal_(0.0, 4.0 * parameter.shape[1] ** -0.5, generator=generator)
            elif parameter.dim() > 1:
                gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "o_proj", "qkv", "c_attn")) else 1.0
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                if architecture == "NemotronForCausalLM" and name.endswith("norm.weight"):
                    parameter.zero_()  # it adds 1 to what is stored, and transformers stores 1 at first
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of routers
                buffer.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def make_checkpoint(architecture: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Make a model, save it to `folder` as transformers does, and return it."""
    model = make_model(architecture, seed, **overrides)
    model.save_pretrained(folder)
    return model
