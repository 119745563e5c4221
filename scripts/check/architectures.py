"""Tries every causal LM of the installed transformers, and writes which ones a worker serves, and how.

    python -m scripts.check.architectures --write                    all, about a minute
    python -m scripts.check.architectures --only mamba2 --write      after a change, these alone

Each architecture gets a tiny random checkpoint, made from the defaults of its config with small sizes. A child process
loads it as a worker does and compares log-probs of a prompt and of decode steps with those of transformers' own class,
in float32 on the CPU. `--write` writes `architectures.json`, from which the page of the docs is made.

An architecture is decoder-only if it has no encoder and no token sees a later one.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from rollout.config import ModelSettings
from rollout.models import AttentionBatch, Decoder, KVCache, PromptChunk, load_model
from rollout.models.state_pool import StatePool

RESULTS = Path(__file__).with_suffix(".json")
_LIMIT_S = 120
_VOCAB, _PROMPT, _TOKENS, _PAGE, _TOLERANCE = 96, 21, 27, 8, 2e-3

#: Sizes of the tiny models, for each key that a config may have.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"), 64),
    **dict.fromkeys(("lru_width", "input_embedding_size", "output_embedding_size", "attention_hidden_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim",), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("dff", "dim_ff", "d_inner", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "feed_forward_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "global_head_dim", "dim_head", "d_head"), 16),
    **dict.fromkeys(("attention_head_dim",), 32),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("zero_expert_num",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("qk_rope_head_dim",), 16),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("qk_head_dim",), 32),
    **dict.fromkeys(("kv_lora_rank",), 24),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("o_groups", "hc_mult", "hc_count"), 2),
    **dict.fromkeys(("index_head_dim",), 32),
    **dict.fromkeys(("index_n_heads",), 24),  # of few heads many scores are 0, and the choice is not defined
    **dict.fromkeys(("index_topk",), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_headdim",), 16),
    **dict.fromkeys(("mamba_d_ssm",), 128),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "n_groups", "hc_lowrank"), 4),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 16),
    **dict.fromkeys(("local_attention", "attention_chunk_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), 256),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "rescale_every"), _VOCAB),
    **dict.fromkeys(("hidden_size_per_layer_input", "ple_embed_dim", "router_hidden_size"), 32),
    **dict.fromkeys(("num_kv_shared_layers",), 2),
    **dict.fromkeys(("laurel_rank", "adapter_rank", "gated_norm_rank", "loop_gate_rank"), 8),
    **dict.fromkeys(("ngram_vocab_size_base",), 64),
    **dict.fromkeys(("make_ngram_vocab_size_divisible_by",), 8),
    **dict.fromkeys(("split_ngram_parts",), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
}
#: Keys for the number of layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks")
#: What the table does not fit.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "layer_types": ["sliding_attention", "mlp"] * 2 + ["full_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "mimo_v2_flash": {"head_dim": 24},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 24,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "olmo_hybrid": {"linear_num_value_heads": 2},
    "zamba": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
#: Types whose causal LM is a part of another model: it reads an encoder's states, or another model's KV.
_PARTS = {"trocr", "whisper", "musicgen", "musicgen_melody", "moshi", "mllama", "git"}
_PARTS |= {"gemma4_assistant", "gemma4_unified_assistant"}


class Result(NamedTuple):
    """What became of one architecture."""

    model_type: str
    architecture: str
    served: str  # "native", "fallback", "refused", or "not tried"
    decoder_only: bool
    detail: str  # the way of the fallback, or the reason


# --- tiny checkpoints -------------------------------------------------------------------------------------------------


def tiny_config(model_type: str) -> Any:
    """A config of this type with small sizes."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_shrunk(cls(), _OWN.get(model_type, {})))


def _shrunk(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    values = config.to_dict()
    names = {real: name for name, real in type(config).attribute_map.items()}
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    layers = len(own.get("layer_types") or own.get("layers_block_type") or ()) or max(_layers_for(kinds), 4)
    own = {"num_hidden_layers": layers} | own
    counts = {value for name, value in values.items() if name in _LAYERS and type(value) is int}
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        size = _SIZES.get(name, _SIZES.get(names.get(name, "")))
        if name in type(config).sub_configs and value is not None:
            part = getattr(config, name)
            chosen[name] = type(part)(**_shrunk(part, {}))
        elif name in _LAYERS and type(value) is int:
            chosen[name] = layers
        elif (type(value) is int or name == "head_dim") and type(size) is int:
            chosen[name] = min(value, size) if name in ("num_kv_shared_layers", "shared_intermediate_size") else size
        elif isinstance(value, list) and len(value) in counts:
            chosen[name] = value[:layers]
        elif name.endswith("token_id"):
            chosen[name] = None if value is None else 1
    if "kv_lora_rank" in values:  # latent attention: a KV head for each head
        chosen["num_key_value_heads"] = _SIZES["num_attention_heads"]
    known = set(values) | set(type(config).attribute_map)
    return chosen | {name: value for name, value in own.items() if name in known}


def _layers_for(kinds: list[Any]) -> int:
    """The number of first layers that have all kinds."""
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)


def _random(module: Any) -> None:
    """Weights under which each token's logits depend on all earlier ones."""
    generator, output = torch.Generator().manual_seed(0), module.get_output_embeddings()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1 and parameter.shape[-1] > 8:
                gain = 4.0 if output is not None and parameter is output.weight else 1.2
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def _made(model_type: str, folder: Path) -> Any:
    """Transformers' model of a tiny random checkpoint in `folder`."""
    config = tiny_config(model_type)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    if cls.config_class is not type(config) and "text_config" in type(config).sub_configs:
        config = config.get_text_config()
    torch.manual_seed(0)
    module = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    _random(module)
    module.save_pretrained(folder)
    return module.eval().requires_grad_(False)


# --- one architecture -------------------------------------------------------------------------------------------------


def try_one(model_type: str) -> Result:
    """What a worker does with a tiny checkpoint of this type."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    architecture = architecture[0] if isinstance(architecture, tuple) else architecture
    decoder_only = model_type not in {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *_PARTS}
    ids = torch.randint(2, _VOCAB - 2, (_TOKENS,), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        try:
            module = _made(model_type, folder)
            wanted = module(input_ids=ids[None], use_cache=False).logits[0].float()
            prefix = module(input_ids=ids[None, :_PROMPT], use_cache=False).logits[0].float()
        except Exception as error:  # noqa: BLE001 - code of transformers fails in many ways
            return Result(model_type, architecture, "not tried", decoder_only, _words(error, name))
        if module.config.is_encoder_decoder or (wanted[:_PROMPT] - prefix).abs().max() > _TOLERANCE:
            decoder_only = False
        try:
            model = load_model(ModelSettings(path=name, dtype="float32"), torch.device("cpu")).model
        except ValueError as error:
            return Result(model_type, architecture, "refused", decoder_only, _words(error, name))
        off = float((_logprobs(model, ids) - wanted.log_softmax(-1)).abs().max())
    if not off <= _TOLERANCE:
        return Result(model_type, architecture, "wrong", decoder_only, f"log-probs differ by {off:.2g}")
    if isinstance(model, Decoder):
        return Result(model_type, architecture, "native", decoder_only, "")
    return Result(model_type, architecture, "fallback", decoder_only, str(model.spec.way))


def _words(error: Exception, folder: str) -> str:
    """The reason in an error, of a model that no way serves the last way's."""
    text = str(error).replace(folder, "FOLDER").strip() or type(error).__name__
    lines = text.splitlines() if isinstance(error, ValueError) else [f"{type(error).__name__}: {text.splitlines()[0]}"]
    reason = lines[-1].strip().rpartition("); ")[2]
    reason = reason.partition("cannot be served through transformers' code: ")[2] or reason
    return reason.partition(" (paged, rows")[0].partition(" (gathered, rows")[0][:300]


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The log-probs of a served model after each token: a prompt in two chunks, then decode steps."""
    allocate = StatePool.allocate if isinstance(model, Decoder) else type(model.spec).allocate_states
    states = allocate(model.spec, 2, torch.float32, torch.device("cpu"))
    pages = -(-len(ids) // _PAGE)
    kv = KVCache.allocate(model.spec, 1 + pages, _PAGE, torch.float32, "cpu", states=states)
    ends = [9, *range(_PROMPT, len(ids) + 1)]
    logits, begin = [], 0
    for end in ends:
        length = end - begin
        batch = AttentionBatch(
            positions_T=torch.arange(begin, end, dtype=torch.int32),
            kv_slots_T=torch.arange(_PAGE + begin, _PAGE + end, dtype=torch.int32),
            page_table_BP=torch.arange(1, 1 + pages, dtype=torch.int32)[None],
            context_lens_B=torch.tensor([end], dtype=torch.int32),
            max_context=end,
            chunks=None if length == 1 else (PromptChunk(0, length, end),),
            query_starts_C1=None if length == 1 else torch.tensor([0, length], dtype=torch.int32),
            rows_B=torch.ones(1, dtype=torch.int64),
        )
        logits.append(model.compute_logits(model(ids[begin:end].int(), batch, kv)))
        begin = end
    return torch.cat(logits).log_softmax(-1)


# --- all of them ------------------------------------------------------------------------------------------------------


def _child(model_types: list[str], answers: Any) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for model_type in model_types:
        answers.send(try_one(model_type))


def run(model_types: list[str], limit_s: float = _LIMIT_S) -> list[Result]:
    """Try all of these in a child process. One that ends it, or takes longer than `limit_s`, is not tried."""
    context, results = multiprocessing.get_context("spawn"), list[Result]()
    while left := model_types[len(results) :]:
        reading, writing = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(left, writing))
        child.start()
        writing.close()
        for model_type in left:
            try:
                answer = reading.recv() if reading.poll(limit_s) else None
            except EOFError:
                answer = None
            obstacle = f"its process ended, or took {limit_s:g} s"
            name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
            results.append(answer or Result(model_type, name, "not tried", True, obstacle))
            print(*results[-1], sep=" | ", flush=True)
            if answer is None:
                break
        child.kill()
        child.join()
    return results


def of_architectures(results: Iterable[Result]) -> list[Result]:
    """One result for each decoder-only architecture, the best one of its model types; by name."""
    order = ("native", "fallback", "wrong", "refused", "not tried")
    best: dict[str, Result] = {}
    for result in sorted(results, key=lambda result: -order.index(result.served)):
        if result.decoder_only:
            best[result.architecture] = result
    return [best[name] for name in sorted(best, key=str.lower)]


def read_results() -> tuple[str, list[Result]]:
    """The release of transformers of the last full run, and its results."""
    found = json.loads(RESULTS.read_text())
    return found["transformers"], [Result(**entry) for entry in found["results"]]


def main() -> int:
    """Print a line for each architecture, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types, such as mamba2")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}; with --only these entries alone")
    options = parser.parse_args()
    results = run(sorted(options.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    best = of_architectures(results)
    counts = Counter(result.served for result in best)
    served = counts["native"] + counts["fallback"]
    print(
        f"{served} of {len(best)} decoder-only architectures are served ({served / max(1, len(best)):.1%})",
        counts,
    )
    if options.write:
        kept = [] if options.only is None else read_results()[1]
        tried = {result.model_type: result for result in (*kept, *results)}
        entries = [tried[name]._asdict() for name in sorted(tried)]
        RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "results": entries}, indent=1) + "\n")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
