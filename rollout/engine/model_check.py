"""Refuses settings that a model does not have."""

from __future__ import annotations

from rollout_kernels.linear.coded import CodedMatrix

from rollout.config import EngineSettings
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.fused import supports
from rollout.models.language_model import LanguageModel
from rollout.models.layers import Linear


def check_model(engine: EngineSettings, model: LanguageModel) -> None:
    """Raise ValueError if the settings ask for something that this model does not have."""
    if engine.disk_kv_gib and model.spec.state_bytes(model.embed.dtype):
        raise ValueError("disk_kv_gib keeps no states of linear attention, which this model has: set disk_kv_gib = 0")
    if isinstance(model, Decoder):
        _check_format(engine, model)
        _check_deterministic(engine, model)
    else:
        _check_fallback(engine, model.spec.architecture)


def _check_fallback(engine: EngineSettings, architecture: str) -> None:
    """Raise ValueError for a setting that only native families have."""
    asked = {
        "adapter_slots = 0": engine.adapter_slots > 0,
        "routing = false": engine.routing,
        "deterministic = false": engine.deterministic,
        "speculation = off": engine.speculation != "off",
        "weight_dtype = auto": engine.weight_format not in ("auto", "plain"),
    }
    if wrong := [setting for setting, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{architecture} runs through transformers' own code, which has no adapters, routing, deterministic mode, "
            f"speculation or coded weights: set {' and '.join(wrong)}"
        )


def _check_format(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError for coded experts that no kernel reads: on a GPU each step would decode all of them."""
    assert engine.weight_format in ("auto", model.format), "the model was loaded for other settings"
    if model.format != "plain" and model.spec.moe is not None and model.embed.is_cuda and not supports(model):
        raise ValueError(
            f"weight_dtype = {model.format}, and the fused kernels don't run {model.spec.architecture} in "
            f"{model.embed.dtype} with the biases of this checkpoint: use weight_dtype = bf16, or bfloat16"
        )


def _check_deterministic(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError if steps cannot be made deterministic: only steps of the fused kernels can."""
    if not engine.deterministic:
        return
    if not supports(model):
        raise ValueError(
            f"engine.deterministic needs the fused kernels: a GPU, a model in 16 bits without biases of its output and "
            f"MLP products; on a {model.embed.device.type} torch's products have other bits in other batches"
        )
    check_deterministic(model.spec)
    for name, module in model.named_modules():
        stored = module.stored if isinstance(module, Linear) else None
        if isinstance(stored, CodedMatrix) and not stored.kernels_take(model.embed.dtype):
            raise ValueError(
                f"no kernel reads {name} as {stored.format}: set deterministic = false, or weight_dtype = bf16"
            )
