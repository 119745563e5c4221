"""The architectures that the project's tests hold against transformers when they run through transformers' own code.

The table of the docs is made from this one. The tests check what it says of attention and experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rollout.models.fallback.experts import is_plain

if TYPE_CHECKING:
    from rollout.models.fallback.model import TransformersModel


class Held(NamedTuple):
    """What is special about a model."""

    attention: str  # "plain", or what differs from it
    experts: str  # "none", "ours" or "transformers'": the code that runs them


def describe(model: TransformersModel) -> Held:
    """What is special about a model, read off its layers."""
    layers = model.spec.layers
    special = {
        "windows": any(layer.window is not None for layer in layers),
        "softcap": any(layer.softcap for layer in layers),
        "sinks": any(layer.sinks for layer in layers),
        "values of another dimension": any(layer.kv.k_dim != layer.kv.v_dim for layer in layers),
    }
    blocks = [module for module in model.module.modules() if hasattr(module, "_apply_gate")]
    experts = "none" if not blocks else "ours" if all(is_plain(block) for block in blocks) else "transformers'"
    return Held(", ".join(name for name, present in special.items() if present) or "plain", experts)


HELD: dict[str, Held] = {
    "AfmoeForCausalLM": Held("windows", "ours"),
    "ApertusForCausalLM": Held("plain", "none"),
    "ArceeForCausalLM": Held("plain", "none"),
    "CohereForCausalLM": Held("plain", "none"),
    "Cohere2ForCausalLM": Held("windows", "none"),
    "CwmForCausalLM": Held("windows", "none"),
    "DeepseekV2ForCausalLM": Held("values of another dimension", "ours"),
    "DeepseekV3ForCausalLM": Held("values of another dimension", "ours"),
    "Dots1ForCausalLM": Held("plain", "ours"),
    "Ernie4_5ForCausalLM": Held("plain", "none"),
    "Ernie4_5_MoeForCausalLM": Held("plain", "ours"),
    "Exaone4ForCausalLM": Held("windows", "none"),
    "FlexOlmoForCausalLM": Held("plain", "ours"),
    "GemmaForCausalLM": Held("plain", "none"),
    "Gemma2ForCausalLM": Held("windows, softcap", "none"),
    "Gemma3ForCausalLM": Held("windows", "none"),
    "GlmForCausalLM": Held("plain", "none"),
    "Glm4ForCausalLM": Held("plain", "none"),
    "Glm4MoeForCausalLM": Held("plain", "ours"),
    "Glm4MoeLiteForCausalLM": Held("values of another dimension", "ours"),
    "GPT2LMHeadModel": Held("plain", "none"),
    "GPTBigCodeForCausalLM": Held("plain", "none"),
    "GPTNeoXForCausalLM": Held("plain", "none"),
    "GptOssForCausalLM": Held("windows, sinks", "transformers'"),
    "GraniteMoeForCausalLM": Held("plain", "ours"),
    "HeliumForCausalLM": Held("plain", "none"),
    "HunYuanDenseV1ForCausalLM": Held("plain", "none"),
    "LlamaForCausalLM": Held("plain", "none"),
    "MiMoV2FlashForCausalLM": Held("windows, sinks, values of another dimension", "ours"),
    "MiniMaxM2ForCausalLM": Held("plain", "ours"),
    "MinistralForCausalLM": Held("windows", "none"),
    "MixtralForCausalLM": Held("windows", "ours"),
    "ModernBertDecoderForCausalLM": Held("windows", "none"),
    "NanoChatForCausalLM": Held("plain", "none"),
    "NemotronForCausalLM": Held("plain", "none"),
    "OlmoForCausalLM": Held("plain", "none"),
    "PersimmonForCausalLM": Held("plain", "none"),
    "PhiForCausalLM": Held("plain", "none"),
    "PhimoeForCausalLM": Held("windows", "ours"),
    "Qwen2MoeForCausalLM": Held("plain", "ours"),
    "Qwen3ForCausalLM": Held("plain", "none"),
    "SolarOpenForCausalLM": Held("plain", "ours"),
    "Starcoder2ForCausalLM": Held("windows", "none"),
    "VaultGemmaForCausalLM": Held("windows, softcap", "none"),
}
