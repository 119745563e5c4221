"""The architectures that the project's tests hold against transformers when they run through transformers' own code.

The table of the docs is made from this one. The tests check its columns on attention and experts.
"""

from typing import NamedTuple


class TestedArchitecture(NamedTuple):
    """The special traits of an architecture."""

    attention: str  # "plain", or what differs from it
    experts: str  # "none", "ours" or "transformers'": the code that runs them


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
    "Qwen4ExpForCausalLM": TestedArchitecture("states, gathered", "ours"),
    "SolarOpenForCausalLM": TestedArchitecture("plain", "ours"),
    "StableLmForCausalLM": TestedArchitecture("gathered", "none"),
    "Starcoder2ForCausalLM": TestedArchitecture("windows", "none"),
    "VaultGemmaForCausalLM": TestedArchitecture("windows, softcap", "none"),
}
