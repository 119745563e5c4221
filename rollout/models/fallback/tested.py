"""The architectures that the project's tests hold against transformers when they run through transformers' own code.

The table of the docs is made from this one. The tests check its columns on attention and experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rollout.models.fallback.experts import is_plain

if TYPE_CHECKING:
    from rollout.models.fallback.model import TransformersModel


class TestedArchitecture(NamedTuple):
    """The special traits of an architecture."""

    attention: str  # "plain", or what differs from it
    experts: str  # "none", "ours" or "transformers'": the code that runs them


def known_architecture(model: TransformersModel) -> TestedArchitecture:
    """The special traits of a model, from its layers."""
    layers = model.spec.layers
    special = {
        "windows": any(layer.window is not None for layer in layers),
        "softcap": any(layer.softcap for layer in layers),
        "sinks": any(layer.sinks for layer in layers),
        "values of another dimension": any(layer.kv.k_dim != layer.kv.v_dim for layer in layers),
        "shared KV": any(layer.shared for layer in layers),
        "states": any(layer.states for layer in model.spec.caches),
        "gathered": model.spec.way.attention == "gathered",
    }
    blocks = [module for module in model.module.modules() if hasattr(module, "_apply_gate")]
    experts = "none" if not blocks else "ours" if all(is_plain(block) for block in blocks) else "transformers'"
    return TestedArchitecture(", ".join(name for name, present in special.items() if present) or "plain", experts)


TESTED: dict[str, TestedArchitecture] = {
    "AfmoeForCausalLM": TestedArchitecture("windows", "ours"),
    "ApertusForCausalLM": TestedArchitecture("plain", "none"),
    "ArceeForCausalLM": TestedArchitecture("plain", "none"),
    "BloomForCausalLM": TestedArchitecture("gathered", "none"),
    "CohereForCausalLM": TestedArchitecture("plain", "none"),
    "Cohere2ForCausalLM": TestedArchitecture("windows", "none"),
    "CwmForCausalLM": TestedArchitecture("windows", "none"),
    "DeepseekV2ForCausalLM": TestedArchitecture("values of another dimension", "ours"),
    "DeepseekV3ForCausalLM": TestedArchitecture("values of another dimension", "ours"),
    "DiffLlamaForCausalLM": TestedArchitecture("gathered", "none"),
    "Dots1ForCausalLM": TestedArchitecture("plain", "ours"),
    "Ernie4_5ForCausalLM": TestedArchitecture("plain", "none"),
    "Ernie4_5_MoeForCausalLM": TestedArchitecture("plain", "ours"),
    "Exaone4ForCausalLM": TestedArchitecture("windows", "none"),
    "FalconH1ForCausalLM": TestedArchitecture("states, gathered", "none"),
    "FlexOlmoForCausalLM": TestedArchitecture("plain", "ours"),
    "GemmaForCausalLM": TestedArchitecture("plain", "none"),
    "Gemma2ForCausalLM": TestedArchitecture("windows, softcap", "none"),
    "Gemma3ForCausalLM": TestedArchitecture("windows", "none"),
    "Gemma3nForCausalLM": TestedArchitecture("windows, shared KV", "none"),
    "GlmForCausalLM": TestedArchitecture("plain", "none"),
    "Glm4ForCausalLM": TestedArchitecture("plain", "none"),
    "Glm4MoeForCausalLM": TestedArchitecture("plain", "ours"),
    "Glm4MoeLiteForCausalLM": TestedArchitecture("values of another dimension", "ours"),
    "GPT2LMHeadModel": TestedArchitecture("plain", "none"),
    "GPTBigCodeForCausalLM": TestedArchitecture("plain", "none"),
    "GPTNeoXForCausalLM": TestedArchitecture("plain", "none"),
    "GptOssForCausalLM": TestedArchitecture("windows, sinks", "transformers'"),
    "GraniteMoeForCausalLM": TestedArchitecture("plain", "ours"),
    "GraniteMoeHybridForCausalLM": TestedArchitecture("states", "ours"),
    "HeliumForCausalLM": TestedArchitecture("plain", "none"),
    "HunYuanDenseV1ForCausalLM": TestedArchitecture("plain", "none"),
    "KimiLinearForCausalLM": TestedArchitecture("states, gathered", "ours"),
    "Lfm2ForCausalLM": TestedArchitecture("states", "none"),
    "LlamaForCausalLM": TestedArchitecture("plain", "none"),
    "MambaForCausalLM": TestedArchitecture("states", "none"),
    "Mamba2ForCausalLM": TestedArchitecture("states", "none"),
    "MiMoV2FlashForCausalLM": TestedArchitecture("windows, sinks, values of another dimension", "ours"),
    "MiniMaxM2ForCausalLM": TestedArchitecture("plain", "ours"),
    "MinistralForCausalLM": TestedArchitecture("windows", "none"),
    "MixtralForCausalLM": TestedArchitecture("windows", "ours"),
    "ModernBertDecoderForCausalLM": TestedArchitecture("windows", "none"),
    "NanoChatForCausalLM": TestedArchitecture("plain", "none"),
    "NemotronForCausalLM": TestedArchitecture("plain", "none"),
    "OlmoForCausalLM": TestedArchitecture("plain", "none"),
    "PersimmonForCausalLM": TestedArchitecture("plain", "none"),
    "PhiForCausalLM": TestedArchitecture("plain", "none"),
    "PhimoeForCausalLM": TestedArchitecture("windows", "ours"),
    "Qwen2MoeForCausalLM": TestedArchitecture("plain", "ours"),
    "HYV4ForCausalLM": TestedArchitecture("gathered", "transformers'"),
    "MiniMaxM3VLForCausalLM": TestedArchitecture("gathered", "transformers'"),
    "Qwen3ForCausalLM": TestedArchitecture("plain", "none"),
    "SolarOpenForCausalLM": TestedArchitecture("plain", "ours"),
    "StableLmForCausalLM": TestedArchitecture("gathered", "none"),
    "Starcoder2ForCausalLM": TestedArchitecture("windows", "none"),
    "VaultGemmaForCausalLM": TestedArchitecture("windows, softcap", "none"),
}
