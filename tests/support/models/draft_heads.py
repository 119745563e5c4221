"""EAGLE-3 heads for small targets: checkpoints of them, and their forward in plain torch, written on its own."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def head_config(target: Any, draft_vocab: int | None = None, **more: Any) -> dict[str, Any]:
    """config.json of a head for a target with this transformers config."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab or target.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": target.max_position_embeddings,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        **more,
    }


def random_head(config: dict[str, Any], seed: int = 0, scale: float = 2.0) -> Tensors:
    """Random tensors of a head in the layout of published ones."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, inner, vocab = config["head_dim"], config["intermediate_size"], config["draft_vocab_size"]

    def product(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * scale * inputs**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    tensors = {
        "fc.weight": product(hidden, len(config["eagle_aux_hidden_state_layer_ids"]) * hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": product(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": product(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": product(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": product(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": product(inner, hidden),
        "midlayer.mlp.up_proj.weight": product(inner, hidden),
        "midlayer.mlp.down_proj.weight": product(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": product(vocab, hidden),
    }
    if vocab < config["vocab_size"]:
        ids = torch.randperm(config["vocab_size"], generator=generator)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def save_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A checkpoint folder of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# --- the reference ---------------------------------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rotate(x_THD: torch.Tensor, positions_T: torch.Tensor, theta: float) -> torch.Tensor:
    dim = x_THD.shape[-1]
    angles = positions_T[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    a, b = x_THD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def head_forward(
    config: dict[str, Any], tensors: Tensors, embeds_TH: torch.Tensor, hidden_TH: torch.Tensor
) -> torch.Tensor:
    """Hidden states of a whole sequence, [T, H]: causal attention over all positions, without a cache."""
    positions_T = torch.arange(len(hidden_TH))
    eps, theta, dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    of = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    normed_TH = _norm(hidden_TH, of["hidden_norm.weight"], eps)
    residual_TH = normed_TH if config.get("norm_before_residual") else hidden_TH
    x_TX = torch.cat((_norm(embeds_TH, of["input_layernorm.weight"], eps), normed_TH), dim=-1)
    q, k, v = (F.linear(x_TX, of[f"self_attn.{name}_proj.weight"]).unflatten(1, (-1, dim)) for name in "qkv")
    q, k = _rotate(q, positions_T, theta), _rotate(k, positions_T, theta)
    each = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = k.repeat_interleave(each, dim=1), v.repeat_interleave(each, dim=1)
    scores_HTT = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    later_TT = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights_HTT = scores_HTT.masked_fill(later_TT, -torch.inf).softmax(-1)
    mixed_TK = torch.einsum("hqk,khd->qhd", weights_HTT, v).flatten(1)
    residual_TH = residual_TH + F.linear(mixed_TK, of["self_attn.o_proj.weight"])
    y_TH = _norm(residual_TH, of["post_attention_layernorm.weight"], eps)
    inner = F.silu(F.linear(y_TH, of["mlp.gate_proj.weight"])) * F.linear(y_TH, of["mlp.up_proj.weight"])
    return residual_TH + F.linear(inner, of["mlp.down_proj.weight"])


def head_logits(config: dict[str, Any], tensors: Tensors, hidden_SH: torch.Tensor) -> torch.Tensor:
    """Logits over the target's vocabulary, -inf for tokens that the head cannot draft."""
    logits_SK = F.linear(_norm(hidden_SH, tensors["norm.weight"], config["rms_norm_eps"]), tensors["lm_head.weight"])
    if "d2t" not in tensors:
        return logits_SK
    logits_SV = torch.full((len(hidden_SH), config["vocab_size"]), -torch.inf)
    for i, offset in enumerate(tensors["d2t"].tolist()):
        logits_SV[:, i + offset] = logits_SK[:, i]
    return logits_SV
