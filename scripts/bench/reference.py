"""Reference models for checks of the engine: the same random weights in our model and in transformers.

The weights come from `rollout.models.random_init`, with a next-token entropy of 0.5 to 2 nats. They are changed so that
more errors are visible: norm weights differ from 1, biases and sinks from 0, and attention is sharp enough to show a
lost page.

Legend: K tokens of a completion, V vocabulary.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.initialization import no_init_weights

from rollout.config import ModelConstants, ModelSettings
from rollout.models import load_model
from rollout.models.cut import kept_values
from rollout.models.decoder import Decoder
from rollout.models.language_model import LanguageModel
from rollout.models.spec import AttentionSpec

#: Factor on queries and keys; their products grow with its square.
_SHARPER = 1.4

_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1000000.0},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 1000000.0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rope_theta": 1000000.0},
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "rope_theta": 10000.0,
        "norm_topk_prob": False,
    },
}
FAMILIES = tuple(_FAMILIES)
_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
_SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 65536,
        **_EXPERTS,
        "max_position_embeddings": 16384,
    },
    "8b": {  # layers of Qwen3-8B, so that the table has its products
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        **_EXPERTS,
        "max_position_embeddings": 16384,
    },
    "30b-a3b": {  # of Qwen3-30B-A3B
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "max_position_embeddings": 16384,
    },
    "1.7b": {  # Qwen3-1.7B, all of it
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        **_EXPERTS,
        "max_position_embeddings": 40960,
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 2048,
    },
}
SIZES = tuple(_SIZES)


def config_of(family: str, size: str) -> dict[str, Any]:
    """The `config.json` of a family at a size."""
    config = {**_COMMON, **_SIZES[size], **_FAMILIES[family]}
    if family in ("qwen3", "llama"):
        return {key: value for key, value in config.items() if "expert" not in key and "moe" not in key}
    if family in ("mixtral", "olmoe"):  # all layers have experts; their width has the name of the dense one
        config["intermediate_size"] = config.pop("moe_intermediate_size")
    if family == "mixtral":
        config["num_local_experts"] = config.pop("num_experts")
    if family == "olmoe":  # has no setting for the width of a head
        config["num_attention_heads"] = config["hidden_size"] // config.pop("head_dim")
    return config


def make_checkpoint(family: str, size: str, dtype: str, device: str, folder: Path, seed: int = 0) -> Decoder:
    """Our model with random weights; `folder` becomes a checkpoint of it for transformers."""
    model = make_model({**config_of(family, size), "torch_dtype": dtype}, dtype, device, folder, seed)
    save_weights(model, folder)
    return model


def save_weights(model: Decoder, folder: Path) -> None:
    """Write the weights of `make_model` beside their config."""
    tensors = {name: view.contiguous().clone() for name, view in _once(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_fallback(folder: Path, dtype: str, device: str) -> LanguageModel:
    """The model of such a folder through transformers' own code."""
    settings = ModelSettings(path=str(folder), dtype=dtype, device=device, model_impl="transformers")  # type: ignore[arg-type]
    return load_model(settings, torch.device(device)).model


def make_model(config: dict[str, Any], dtype: str, device: str, folder: Path, seed: int = 0) -> Decoder:
    """Our model of a config.json, with random weights; `folder` gets the config alone."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    constants = ModelConstants(random_seed=seed)
    settings = ModelSettings(path=str(folder), load_format="random", dtype=dtype, device=device, constants=constants)  # type: ignore[arg-type]
    model = load_model(settings, torch.device(device)).model
    assert isinstance(model, Decoder), "a native family"
    _make_less_tame(model, seed)
    return model


def _once(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter under the name that checkpoints usually have."""
    for region in model.hf_regions():
        yield from region.alternatives[0].items()


@torch.no_grad()
def _make_less_tame(model: Decoder, seed: int) -> None:
    generator = torch.Generator(device=model.embed.device).manual_seed(seed + 1)
    spec = model.spec
    attention = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if not attention:  # latent attention
        sharper = dict.fromkeys(("q_proj.weight", "q_b_proj.weight"), _SHARPER**2)
    elif attention[0].qk_norm == "none":
        sharper = dict.fromkeys(("q_proj.weight", "k_proj.weight"), _SHARPER)
    else:
        sharper = dict.fromkeys(("q_norm.weight", "k_norm.weight"), _SHARPER)
    # A norm after a block makes its output of size 1. Embeddings of likely tokens may be much larger.
    outputs = tuple(f"{layer.names.mixer_output_norm}.weight" for layer in spec.layers if layer.norms == "around")
    outputs += tuple(f"{layer.names.feed_forward_output_norm}.weight" for layer in spec.layers if outputs)
    loudest = torch.linalg.vector_norm(model.embed, dim=1, dtype=torch.float32).max().item() * spec.hidden**-0.5
    louder = max(1.0, 0.5 * loudest * spec.embed_scale)
    for name, view in _once(model):
        if name.endswith("norm.weight"):
            offset = spec.unit_offset and not name.endswith("linear_attn.norm.weight")
            factor = torch.empty_like(view).uniform_(0.7, 1.3, generator=generator)
            factor *= next((by for ending, by in sharper.items() if name.endswith(ending)), 1.0)
            factor *= louder if outputs and name.endswith(outputs) else 1.0
            view.copy_((view + 1) * factor - 1 if offset else view * factor)
        elif name.endswith(("bias", "sinks")):  # zeros until now; in values that all dtypes have
            noise = torch.empty(view.shape, device=view.device).normal_(0.0, 1.0, generator=generator)
            view.copy_((noise * (1.0 if name.endswith("sinks") else 0.1)).bfloat16())
        else:
            view.mul_(next((by for ending, by in sharper.items() if name.endswith(ending)), 1.0))


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Logits [K, V] float32 of a completion's tokens, given prompt and completion."""

    exact: torch.Tensor  # all in float32
    own: torch.Tensor  # transformers in the model's dtype, logits rounded to it
    wide: torch.Tensor  # transformers in the model's dtype up to the hidden state, the output layer in float32


class Trainer:
    """transformers' model with the weights of one of ours: in the dtype of a trainer, and in float32."""

    def __init__(self, model: Decoder, folder: Path, dtype: str, device: str) -> None:
        assert torch.get_float32_matmul_precision() == "highest", "a float32 reference needs float32 products"
        config = AutoConfig.from_pretrained(folder)
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with no_init_weights():  # on the CPU, as a checkpoint is loaded: it makes the frequencies of rope
            module = cls._from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention_of(config))
        module.tie_weights()
        if cls._can_set_experts_implementation():
            module.set_experts_implementation("eager")
        self._model: Any = module.to(torch.device(device)).eval()
        self._take_weights(model.hf_views())
        self._exact: Any = copy.deepcopy(self._model).float()
        self._device = device

    @torch.no_grad()
    def _take_weights(self, views: Mapping[str, torch.Tensor]) -> None:
        """Copy our parameters, and those buffers that updates may have."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(kept_values(views[name]))
        for name, buffer in self._model.named_buffers():
            if name in views:
                buffer.copy_(kept_values(views[name]))

    @torch.inference_mode()
    def recompute(self, prompt: Sequence[int], completion: Sequence[int]) -> Recomputed:
        """One forward over all tokens, in both precisions."""
        ids = torch.tensor([[*prompt, *completion]], device=self._device)
        first = len(prompt) - 1
        hidden_KH = self._exact.model(input_ids=ids, use_cache=False).last_hidden_state[0, first:-1]
        exact_KV = all_logits(self._exact, hidden_KH)
        hidden_KH = self._model.model(input_ids=ids, use_cache=False).last_hidden_state[0, first:-1]
        own_KV = all_logits(self._model, hidden_KH).float()
        return Recomputed(exact_KV, own_KV, all_logits(self._exact, hidden_KH.float()))


def attention_of(config: Any) -> str:
    """The attention of transformers that computes the model of `config`; sdpa where it can, as trainers take that.

    With a softcap of the scores it cannot. Some releases (5.17) take sdpa for such a model all the same, and drop it.
    """
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    bounded = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if cls._supports_sdpa and not bounded else "eager"


def all_logits(model: Any, hidden_KH: torch.Tensor) -> torch.Tensor:
    """Logits [K, V]: the output layer, and what the class does to its result, such as bounds and scales.

    The class runs on one token, and its output layer gets these hidden states in the place of that token's.
    """
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: (hidden_KH[None],))
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=hidden_KH.device)
        logits_KV: torch.Tensor = model(input_ids=token, use_cache=False).logits[0]
    finally:
        hook.remove()
    return logits_KV


def logprobs_of(logits_KV: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs [K] of `tokens`."""
    tokens_K1 = torch.tensor(tokens, device=logits_KV.device)[:, None]
    return logits_KV.log_softmax(-1).gather(1, tokens_K1)[:, 0]


def entropy_of(logits_KV: torch.Tensor) -> torch.Tensor:
    """Entropy [K] of the next token, nats."""
    logprobs_KV = logits_KV.log_softmax(-1)
    return -(logprobs_KV.exp() * logprobs_KV).sum(-1)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The difference of two parties' log-probs of sampled tokens, nats."""

    mean: float  # of the absolute difference
    worst: float
    k3: float  # estimate of KL(sampler || trainer): mean of exp(d) - 1 - d, d = trainer - sampler


def agreement(sampler_K: torch.Tensor, trainer_K: torch.Tensor) -> Agreement:
    """Compare log-probs of tokens that the sampler drew."""
    d_K = trainer_K.double() - sampler_K.double()
    return Agreement(d_K.abs().mean().item(), d_K.abs().max().item(), (d_K.exp() - 1 - d_K).mean().item())


def rms(difference: torch.Tensor) -> float:
    """Root mean square."""
    return math.sqrt(difference.double().square().mean().item())
