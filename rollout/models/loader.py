"""From `ModelSettings` to a model that can run: find the checkpoint, build the decoder, fill its parameters."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.moe.formats import Format

from rollout.config import ModelSettings
from rollout.models.checkpoint_folder import (
    CheckpointError,
    GenerationDefaults,
    check_links,
    read_config,
    read_generation_defaults,
    resolve_folder,
)
from rollout.models.checkpoint_tensors import (
    Progress,
    StoredTensor,
    check_tensors,
    copy_tensors,
    first_names,
    join_mxfp4,
    list_tensors,
    stored_dtype,
)
from rollout.models.coded_experts import check_format
from rollout.models.decoder import Decoder
from rollout.models.names import all_views, is_needed
from rollout.models.random_init import fill_random
from rollout.models.registry import spec_from_config
from rollout.models.spec import ModelSpec

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and the checkpoint that it came from."""

    model: Decoder
    spec: ModelSpec
    folder: Path  # config and tokenizer files; weights too unless load_format is random
    generation_config: GenerationDefaults

    def trainer_views(self) -> dict[str, torch.Tensor]:
        """Views by the names that a trainer may send: the checkpoint's, and a tied output layer, as in a state_dict."""
        views = self.model.hf_views()
        if (alias := self.spec.tied_name) is not None:
            views[alias] = views[f"{self.spec.names.embed}.weight"]
        return views

    def kept_if_absent(self) -> frozenset[str]:
        """Names of tensors that an update may leave out: they keep their values."""
        return frozenset(all_views(region for region in self.model.hf_regions() if region.kept_if_absent))


def fetch(settings: ModelSettings, progress: Progress | None = None) -> Path:
    """The folder of the checkpoint; one on the hub is downloaded. `progress` is called with (bytes, bytes in all).

    Raises:
        CheckpointError: there is no such folder, or the download fails.
    """
    return resolve_folder(settings.path, settings.revision, settings.load_format != "random", progress)


def load_model(
    settings: ModelSettings,
    device: torch.device,
    progress: Progress | None = None,
    folder: Path | None = None,
    experts: Format = "plain",
) -> LoadedModel:
    """Load a checkpoint, or its shapes with random weights, onto `device`.

    `progress` is called with (values copied, values in all). `folder` is the result of `fetch`, if it was called
    before. `experts` is the format of the experts' weights.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or its tensors do not fit its architecture.
        ValueError: the architecture, or an option in its config, is not supported.
    """
    random = settings.load_format == "random"
    folder = fetch(settings) if folder is None else folder
    check_links(folder)
    config, architecture = read_config(folder)
    try:
        spec = spec_from_config(config, architecture)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}/config.json lacks a value that {architecture} needs: {error}") from error
    tensors = {} if random else list_tensors(folder)
    dtype = _pick_dtype(settings, getattr(config, "dtype", None) or stored_dtype(tensors), device)
    defaults = read_generation_defaults(folder, config)
    if strange := [token for token in defaults.eos_token_ids if not 0 <= token < spec.vocab]:
        raise CheckpointError(f"{folder} names eos token ids {strange}, and the vocabulary has {spec.vocab} entries")
    check_format(spec, experts)
    tensors = _needed(join_mxfp4(tensors), spec)
    outline = Decoder(spec, dtype, torch.device("meta"), experts)  # shapes without memory
    if not random:
        check_tensors(folder, tensors, outline.hf_regions(), architecture)
    _check_memory(outline, folder, device)
    model = Decoder(spec, dtype, device, experts)
    if random:
        fill_random(model, settings.random_seed)
    else:
        copy_tensors(tensors, model.hf_views(), progress)
    return LoadedModel(model.eval(), spec, folder, defaults)


def _needed(tensors: dict[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """The tensors that are read; says which ones of the checkpoint text needs none of."""
    unused = [name for name in tensors if name.startswith(spec.unused)]
    if unused:
        log.info("%d tensors of the checkpoint are not used: %s", len(unused), first_names(unused))
    return {name: stored for name, stored in tensors.items() if is_needed(name, spec.tied_name, spec.unused)}


def _check_memory(outline: Decoder, folder: Path, device: torch.device) -> None:
    """Raise CheckpointError if the model is larger than the memory of the device."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in outline.parameters())
    if device.type == "cuda":
        there, _ = torch.cuda.mem_get_info(device)
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise CheckpointError(
            f"the model in {folder} needs {needed / 2**30:.1f} GiB and {device} has {there / 2**30:.1f} GiB; "
            "use a smaller model, another device or a smaller dtype"
        )


def _pick_dtype(settings: ModelSettings, own: Any, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if device.type == "cpu":
        return torch.float32
    return own if own in _DTYPES.values() else torch.bfloat16
