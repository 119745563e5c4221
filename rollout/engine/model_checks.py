"""Refuses settings that a loaded model does not have."""

from rollout_kernels.common.device import is_hopper
from rollout_kernels.linear.coded import CodedMatrix

from rollout.config import EngineSettings
from rollout.models.batch import check_chunk
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.fused import obstacle, supports
from rollout.models.language_model import LanguageModel
from rollout.models.layers import Linear
from rollout.models.spec import ENTRY_TOKENS, AttentionSpec, CompressedSpec


def check_model(engine: EngineSettings, model: LanguageModel) -> None:
    """Raise ValueError if the settings ask for something that this model does not have."""
    if isinstance(model, Decoder):
        for mixer in (layer.mixer for layer in model.spec.layers):
            if isinstance(mixer, AttentionSpec) and mixer.chunk is not None:
                check_chunk(mixer.chunk, engine.page_size)
            if isinstance(mixer, AttentionSpec) and mixer.blocks and mixer.blocks.size % engine.page_size:
                size = mixer.blocks.size
                raise ValueError(f"page_size ({engine.page_size}) must be a divisor of index_block_size ({size})")
            if isinstance(mixer, CompressedSpec) and engine.page_size % ENTRY_TOKENS:
                raise ValueError(f"page_size ({engine.page_size}) must be a multiple of {ENTRY_TOKENS} for this model")
        _check_format(engine, model)
        _check_activations(engine, model)
        _check_deterministic(engine, model)
    else:
        check_fallback(engine, model.spec.architecture, model.spec.way.attention == "gathered")


def check_fallback(engine: EngineSettings, architecture: str, gathered: bool) -> None:
    """Raise ValueError for a setting that only native families have."""
    asked = {
        "adapter_slots = 0": engine.adapter_slots > 0,
        "routing = false": engine.routing,
        "deterministic = false": engine.deterministic,
        "speculation = off": engine.speculation != "off",
        "weight_dtype = auto": engine.weight_format not in ("auto", "plain"),
        "fp8_activations_from = none": engine.fp8_activations_from is not None,
    }
    if wrong := [setting for setting, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{architecture} runs through transformers' own code, which has no adapters, routing, deterministic mode, "
            f"speculation or coded weights: set {' and '.join(wrong)}"
        )
    if gathered and engine.kv_dtype != "auto":
        raise ValueError(
            f"the layers of {architecture} read keys and values themselves, not as codes: use kv_dtype = auto"
        )


def _check_format(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError for coded experts that no kernel reads: on a GPU each step would decode all of them."""
    assert engine.weight_format in ("auto", model.format), "the model was loaded for other settings"
    if model.format != "plain" and model.spec.moe is not None and model.embed.is_cuda and not supports(model):
        raise ValueError(
            f"no kernel reads weight_dtype = {model.format} here: {obstacle(model)}; use weight_dtype = bf16, or "
            "dtype = bfloat16"
        )


def _check_activations(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError if activations are to be codes, and no kernel multiplies these."""
    if engine.fp8_activations_from is None:
        return
    if model.format != "fp8_block":
        reason = "needs weight_dtype = fp8_block; set that, or unset"
    elif engine.deterministic:
        reason = "makes a token's result depend on its step; set deterministic = false, or unset"
    elif not supports(model) or not is_hopper(model.embed.device):
        reason = f"needs a Hopper GPU and a model that the fused kernels run, not {model.embed.device.type}; unset"
    else:
        return
    raise ValueError(f"fp8_activations_from {reason} it")


def _check_deterministic(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError if steps cannot be made deterministic: only steps of the fused kernels can."""
    if not engine.deterministic:
        return
    if not supports(model):
        raise ValueError(
            "engine.deterministic needs the fused kernels, which need a GPU and a model in 16 bits without biases in "
            f"its output and MLP products; torch's results on a {model.embed.device.type} depend on the batch"
        )
    check_deterministic(model.spec)
    for name, module in model.named_modules():
        stored = module.stored if isinstance(module, Linear) else None
        if isinstance(stored, CodedMatrix) and not stored.kernels_take(model.embed.dtype):
            raise ValueError(
                f"no kernel reads {name} as {stored.format}: set deterministic = false, or weight_dtype = bf16"
            )
