"""Steps of one model by the fused kernels, by the torch modules, and in float32."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rollout_kernels.moe.dispatch import Plan, WarpPlan, moe_plan
from rollout_kernels.moe.triton_warp_experts import WarpConfig

from rollout.config import ModelSettings
from rollout.models import Decoder, load_model
from rollout.models.fused import FusedDecoder
from rollout.models.fused_experts import PLANS, ExpertPlans
from rollout.models.layers import Linear
from tests.support.models.expert_choices import NEARLY_EQUAL, ExpertChoices
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PagedRunner

LONG = 9  # tokens of the longer prompt
#: Widths that our own products take.
_EVEN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_AROUND: dict[str, Any] = {
    **{k: v for k, v in _EVEN.items() if k != "head_dim"},
    "vocab_size": 71,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_WINDOWS: dict[str, Any] = {
    **_AROUND,
    "head_dim": 16,
    "query_pre_attn_scalar": 7,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
#: Family and sizes: with those of `families` most products are torch's.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", _EVEN),
    "qwen3-odd": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {**_EVEN, "attention_bias": True}),
    "llama": ("llama", {**_EVEN, "mlp_bias": False, "attention_bias": False}),
    "llama-odd": ("llama", {}),
    "qwen2": ("qwen2", {k: v for k, v in _EVEN.items() if k != "head_dim"}),
    "qwen3_moe": ("qwen3_moe", {**_EVEN, "moe_intermediate_size": 32, "attention_bias": False}),
    "qwen3_moe-odd": ("qwen3_moe", {"attention_bias": False, "num_hidden_layers": 2, "mlp_only_layers": []}),
    "mixtral": ("mixtral", {**_EVEN, "num_hidden_layers": 2}),
    "glm": ("Glm", {**_EVEN, "vocab_size": 71, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    # Norms after blocks, or on both sides; factors and bounds; GELU; norms of all heads together; neighbours that turn.
    "gemma2": ("Gemma2", {**_WINDOWS, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3", _WINDOWS),
    "olmo2": ("Olmo2", {**_AROUND, "attention_bias": False}),
    "glm4": ("Glm4", {**_AROUND, "head_dim": 16, "attention_bias": True}),
    "granite": (
        "Granite",
        {**_AROUND, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
    ),
    # Layers of two kinds of heads that share KV, and have inputs of their own and a factor.
    "gemma4": (
        "Gemma4",
        {
            **_WINDOWS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 71,
            "rope_parameters": None,
            "final_logit_softcapping": 4.0,
        },
    ),
    # Experts beside a dense block, with norms and factors of their own.
    "gemma4-experts": (
        "Gemma4",
        {
            **_WINDOWS,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": None,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # Weights of experts are factors of their inputs; chunks, and heads that are normalised without weights.
    "llama4": (
        "Llama4",
        {
            **_EVEN,
            "vocab_size": 71,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
            "floor_scale": 5,
            "attn_scale": 0.3,
        },
    ),
    # Chosen blocks; a clamped GLU in experts, in the shared one and in dense blocks.
    "minimax_m3": (
        "MiniMaxM3VL",
        {
            **_EVEN,
            "vocab_size": 71,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_hidden_layers": 2,
            "dense_intermediate_size": 96,
            "intermediate_size": 32,
            "shared_intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.9,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    # Layers of one block; experts without a gate, on a narrower state.
    "nemotron_h": (
        "NemotronH",
        {
            "vocab_size": 71,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "time_step_min": 0.1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "layer_norm_epsilon": 1e-2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_EVEN,
            "vocab_size": 71,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 1.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmoe": ("olmoe", {**_EVEN, "intermediate_size": 32, "num_hidden_layers": 2}),
    # A shared expert that is stored with the others: with a gate, and without one beside a router that torch runs.
    "shared-gated": (
        "Qwen2Moe",
        {
            **{k: v for k, v in _EVEN.items() if k != "head_dim"},
            "vocab_size": 71,
            "num_hidden_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "shared": (
        "Glm4Moe",
        {
            **_EVEN,
            "vocab_size": 71,
            "num_hidden_layers": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
}
CPU = torch.device("cpu")
#: Of the weights that errors in 16 bits are pooled over: those of one model alone differ by a tenth between CPU types.
SEEDS = (1, 2)


def load(folder: Path, dtype: str) -> Decoder:
    return load_model(ModelSettings(path=str(folder), dtype=dtype), CPU).model


def make(name: str, folder: Path, dtype: str, seed: int = 0) -> tuple[Decoder, Any]:
    family, sizes = MODELS[name]
    reference = make_checkpoint(family, folder, seed, **sizes)
    return load(folder, dtype), reference


def save_rounded(name: str, folder: Path, seed: int, **sizes: Any) -> Any:
    """A checkpoint that bf16 holds as it is: of `MODELS`, or of a stem of transformers' classes with these sizes."""
    family, sizes = MODELS.get(name, (name, sizes))
    reference = make_checkpoint(family, folder, seed, **sizes)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    reference.save_pretrained(folder)
    return reference


def tokens(count: int, vocab: int, seed: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(vocab) for i in range(count)]


def steps(
    model: Decoder, forward: Any, long_prompt: int, kv_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, PagedRunner, list[list[int]]]:
    """A long and a short prompt in one step, the rest of the short one, two decode steps: logits, the long row last."""
    ids = [tokens(long_prompt + 2, model.spec.vocab, 1), tokens(13, model.spec.vocab, 2)]
    runner = PagedRunner(model, rows=2, max_tokens=long_prompt + 2, forward=forward, kv_dtype=kv_dtype)
    first = runner.prefill({0: ids[0][:long_prompt], 1: ids[1][:4]})
    found = {0: [first[0]], 1: [first[1]]}
    found[1].append(runner.prefill({1: ids[1][4:11]})[1])
    for step in range(2):
        logits = runner.decode({1: ids[1][11 + step], 0: ids[0][long_prompt + step]}, padding=step)
        for row in (0, 1):
            found[row].append(logits[row][None])
    return torch.cat([*found[1], *found[0]]), runner, ids


def expected(reference: Any, ids: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([reference(torch.tensor([row])).logits[0].float() for row in reversed(ids)])


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


class Beside(NamedTuple):
    """The same steps by the kernels, by the torch modules, and by the torch modules in float32."""

    fused: torch.Tensor
    generic: torch.Tensor
    exact: torch.Tensor
    by_kernels: PagedRunner
    by_modules: PagedRunner


def side_by_side(
    model: Decoder, wide: Decoder, kv_dtype: torch.dtype | None = None, plans: ExpertPlans = PLANS
) -> Beside:
    """Run all paths with the kernels' choice of experts, which must nearly equal the choice of the others."""
    choices = ExpertChoices()
    with choices.noted():
        fused, by_kernels, _ = steps(model, FusedDecoder(model, plans=plans), LONG, kv_dtype)
    with choices.taken() as regrets, rounded_products():
        generic, by_modules, _ = steps(model, model, LONG, kv_dtype)
    with choices.taken() as exact_regrets:
        exact = steps(wide, wide, LONG)[0]
    assert max(regrets + exact_regrets, default=0.0) < NEARLY_EQUAL
    return Beside(fused, generic, exact, by_kernels, by_modules)


@contextmanager
def rounded_products() -> Iterator[None]:
    """Within, modules round a product before it is added to the residual, as the kernels do; else the CPU decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "add_to", lambda self, residual, x: residual + self(x))
        yield


def errors(runs: list[Beside]) -> tuple[float, float]:
    """Of the kernels and of the modules, over all runs."""
    exact = torch.cat([run.exact for run in runs])
    return error(torch.cat([run.fused for run in runs]), exact), error(torch.cat([run.generic for run in runs]), exact)


def coarse(*asked: Any, **options: Any) -> Plan:
    """The plan that is asked for, by output with tall tiles: the interpreter's time is the number of programs."""
    plan = moe_plan(*asked, **options)
    return WarpPlan(WarpConfig(rows=32), WarpConfig(rows=32)) if plan.path == "warp" else plan


COARSE = ExpertPlans(coarse)
