"""Families with blocks of their own on a GPU: transformers' tokens in float32, and its errors in 16 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollout.engine.device.streams import make_device
from rollout.engine.step.graphs import capturable
from tests.support.engine.cuda_harness import assert_one_launch_a_step, load_bf16
from tests.support.engine.harness import Bench, Completion, load
from tests.support.models.every_family import EVERY_FAMILY

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:no measured plan")]
TINY = (
    *(
        "DeepseekV32",
        "DeepseekV4",
        "GlmMoeDsa",
        "KimiLinear",
        "BailingHybrid",
        "GraniteMoeHybrid",
        "GraniteMoeHybrid dense",
    ),
    *("MiniMaxM3VL", "NemotronH", "NemotronH latent", "Llama4", "Gemma4", "Gemma4 alike", "Gemma4 experts"),
)
VOCAB = 4001
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256,
}  # fmt: skip
#: Layers of the sizes of published models, few of them, and few experts.
REAL: dict[str, dict[str, Any]] = {
    # DeepSeek-V3.2
    "DeepseekV32": {
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 2, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 1,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_parameters": _ROPE,
    },
    # DeepSeek-V4-Flash, one layer of each kind
    "DeepseekV4": {
        "hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 1,
        "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "n_routed_experts": 8,
        "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "sliding_window": 128, "partial_rotary_factor": 0.125,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe"], "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "hc_mult": 4, "swiglu_limit": 10.0,
        "rope_parameters": {**_ROPE, "rope_theta": 1.6e5},
    },
    # Kimi-Linear-48B-A3B
    "KimiLinear": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 32, "linear_num_heads": 32, "linear_head_dim": 128, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_local_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    # Ling-3.0-Flash
    "BailingHybrid": {
        "hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_local_experts": 16, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    # Granite 4 H-Small
    "GraniteMoeHybrid": _MAMBA2 | {
        "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 18, "num_experts_per_tok": 10,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 1.0,
    },
    # Nemotron 3 Nano
    "NemotronH": {
        "hidden_size": 2688, "layer_types": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "intermediate_size": 1856,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "n_routed_experts": 16, "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
    },
    # Llama 4 Scout
    "Llama4": {
        "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 4,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 4,
        "num_experts_per_tok": 1, "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 512,
        "rope_parameters": _ROPE,
    },
    # MiniMax-M3
    "MiniMaxM3VL": {
        "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288, "num_hidden_layers": 2,
        "shared_intermediate_size": 3072, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "num_local_experts": 8, "num_experts_per_tok": 4, "routed_scaling_factor": 2.0,
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
        "index_topk_blocks": 4, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    },
    # Gemma 4 E4B
    "Gemma4": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0,
        "rope_parameters": None,
    },
}  # fmt: skip


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logprobs_of(reference: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    """The log-probs of all tokens at each place of a completion, by transformers."""
    ids = torch.tensor([prompt + completion.token_ids], device=reference.device)
    with torch.inference_mode():
        return reference(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()


def taken(logprobs: torch.Tensor, completion: Completion) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def make_on_gpu(stem: str, folder: Path) -> Any:
    """A checkpoint with weights that bf16 holds, and transformers' float32 model of it."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 4096, "eos_token_id": 2, "bos_token_id": 1, **REAL[stem]}
    model_class = getattr(transformers, f"{stem}ForCausalLM")
    torch.manual_seed(3)
    with torch.device("cuda"):
        how = {"attn_implementation": "eager", "dtype": torch.float32}
        model = model_class._from_config(model_class.config_class(pad_token_id=None, **sizes), **how)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # other experts for each token
                orders = torch.rand(len(buffer), sizes["n_routed_experts"], device="cuda").argsort(1)
                buffer.copy_(orders[:, : buffer.shape[1]])
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", TINY)
def test_tokens_in_float32_are_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, a group, and rows that come and go."""
    # transformers 5.17 normalises all groups of Granite's Mamba-2 together; published models have one.
    reference = EVERY_FAMILY[name](tmp_path, 0, **({"mamba_n_groups": 1} if name == "GraniteMoeHybrid" else {}))
    bench = Bench(load(tmp_path, "cuda"), make_device("cuda"), max_rows=4, prefill_chunk_tokens=48)
    vocab = reference.config.vocab_size
    prompts = {f"r{i}": prompt_of(9 + 23 * i, vocab, i) for i in range(5)}
    for i, (name, ids) in enumerate(prompts.items()):
        bench.submit(name, ids, 20 + 5 * i, n=2 if i == 0 else 1)
    bench.run()
    for (name, index), done in bench.completions.items():
        logprobs = logprobs_of(reference, prompts[name], done)
        assert (torch.tensor(done.logprobs) - taken(logprobs, done)).abs().max() < 2e-3, (name, index)
        assert (logprobs.amax(-1) - taken(logprobs, done)).max() < 2e-3, "greedy, but for ties"


@pytest.mark.parametrize("stem", REAL)
def test_layers_of_real_sizes_are_as_close_to_float32_as_transformers(stem: str, tmp_path: Path) -> None:
    reference = make_on_gpu(stem, tmp_path)
    model = load_bf16(tmp_path)
    bench = Bench(model, make_device("cuda"), max_rows=4, kv_pages=1024, page_size=16, prefill_chunk_tokens=700)
    assert bench.engine.executor.captures == capturable(model)
    prompts = {f"r{i}": prompt_of(length, VOCAB, i) for i, length in enumerate((7, 600, 900, 1500))}
    for i, (name, ids) in enumerate(prompts.items()):
        bench.submit(name, ids, 60, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    rounded = (
        type(reference)
        .from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager")
        .to("cuda")
    )
    ours, theirs = [], []
    for name, ids in prompts.items():
        done = bench.completions[name, 0]
        exact = taken(logprobs_of(reference, ids, done), done)
        ours.append((torch.tensor(done.logprobs) - exact).abs())
        theirs.append((taken(logprobs_of(rounded, ids, done), done) - exact).abs())
    # The medians: rounding turns the choice of an expert here and there, which costs more than rounding itself.
    errors = (torch.cat(ours).median().item(), torch.cat(theirs).median().item())
    assert errors[0] < 1.5 * errors[1] + 2e-3, errors


@pytest.mark.parametrize("name", TINY)
def test_a_captured_step_is_one_launch(name: str, tmp_path: Path) -> None:
    reference = EVERY_FAMILY[name](tmp_path, 0)
    model = load_bf16(tmp_path)
    if not capturable(model):
        pytest.skip("its steps are not captured")
    bench = Bench(model, make_device("cuda"), max_rows=4, kv_pages=512, page_size=16)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(9, reference.config.vocab_size, i), 80)
    assert_one_launch_a_step(bench)
    bench.run()
