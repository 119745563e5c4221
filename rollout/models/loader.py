"""From `ModelSettings` to a model that can run: find the checkpoint, build the decoder, fill it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.config import ModelSettings
from rollout.models.checkpoint import Progress, check_tensors, copy_tensors, list_tensors, stored_dtype
from rollout.models.decoder import Decoder
from rollout.models.random_init import fill_random
from rollout.models.registry import spec_from_config
from rollout.models.source import GenerationDefaults, read_config, read_generation_defaults, resolve_folder
from rollout.models.spec import ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A filled model and where it came from."""

    model: Decoder
    spec: ModelSpec
    folder: Path  # config and tokenizer files; weights too unless load_format is random
    generation_config: GenerationDefaults


def load_model(settings: ModelSettings, device: torch.device, progress: Progress | None = None) -> LoadedModel:
    """Load a checkpoint, or its shapes with random weights, onto `device`.

    `progress` is called with (values copied, values in all).

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or its tensors are not those of its architecture.
        ValueError: the architecture, or something that its config asks for, is not supported.
    """
    random = settings.load_format == "random"
    folder = resolve_folder(settings.path, settings.revision, weights=not random)
    config, architecture = read_config(folder)
    spec = spec_from_config(config, architecture)
    tensors = {} if random else list_tensors(folder)
    dtype = _pick_dtype(settings, getattr(config, "dtype", None) or stored_dtype(tensors), device)
    model = Decoder(spec, dtype, device)
    if random:
        fill_random(model, settings.random_seed)
    else:
        regions = model.hf_regions()
        check_tensors(folder, tensors, regions, architecture, spec.tied)
        copy_tensors(tensors, model.hf_views(), spec.tied, progress)
    return LoadedModel(model.eval(), spec, folder, read_generation_defaults(folder, config))


def _pick_dtype(settings: ModelSettings, own: Any, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if device.type == "cpu":
        return torch.float32
    return own if own in _DTYPES.values() else torch.bfloat16
