"""Adapters as PEFT writes them, with weights large enough to change what a model says, and PEFT's own merged models."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(base: Any, folder: Path, seed: int, targets: tuple[str, ...] = ALL, **config: Any) -> Path:
    """Write an adapter of a transformers model to `folder`; the model stays as it is."""
    options = {"r": 4, "lora_alpha": 6, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=list(targets), **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(str(folder))
    return folder


def merged(base: Any, folder: Path) -> Any:
    """A transformers model with the adapter in its weights, by PEFT."""
    return PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).merge_and_unload().eval()
