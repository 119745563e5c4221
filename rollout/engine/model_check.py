"""Refuses settings that a model does not have."""

from __future__ import annotations

from rollout.config import EngineSettings
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.fused import supports
from rollout.models.language_model import LanguageModel


def check_model(engine: EngineSettings, model: LanguageModel) -> None:
    """Raise ValueError if the settings ask for something that this model does not have."""
    if engine.disk_kv_gib and model.spec.state_bytes(model.embed.dtype):
        raise ValueError("disk_kv_gib keeps no states of linear attention, which this model has: set disk_kv_gib = 0")
    if isinstance(model, Decoder):
        _check_experts(engine, model)
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
        "expert_dtype = auto": engine.expert_dtype != "auto",
    }
    if wrong := [setting for setting, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{architecture} runs through transformers' own code, which has no adapters, routing, deterministic mode, "
            f"speculation or coded experts: set {' and '.join(wrong)}"
        )


def _check_experts(engine: EngineSettings, model: Decoder) -> None:
    """Raise ValueError for coded experts that no kernel reads: on a GPU each step would decode all of them."""
    assert model.experts == engine.expert_format, "the model was loaded for other settings"
    if model.experts != "plain" and model.embed.is_cuda and not supports(model):
        raise ValueError(
            f"expert_dtype = {model.experts}, and the fused kernels don't run {model.spec.architecture} in "
            f"{model.embed.dtype} with the biases of this checkpoint: use expert_dtype = auto, or bfloat16"
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
