"""A tiny model with random weights for the task `counting`: it runs anywhere in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.shapes import model_config
from scripts.learn.tasks import EOS, NUMBERS

_OWN = {"eos_token_id": EOS, "bos_token_id": None, "torch_dtype": "float32", "initializer_range": 0.05}


def make_model(folder: Path, seed: int) -> Path:
    """Save a model of two million parameters or fewer; the same one for the same seed."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**model_config("toy") | _OWN | {"vocab_size": NUMBERS + 2})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
