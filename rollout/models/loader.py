"""Makes a model that can run from `ModelSettings`: find the checkpoint, build the model, fill its parameters.

A native family is a `Decoder`. Any other causal LM runs through transformers' own code (`rollout.models.fallback`).
"""

import logging
import os
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rollout_kernels.moe.formats import Format
from rollout_kernels.parallel import TensorGroup

from rollout.checkpoint_folder import CheckpointError, check_links, resolve_folder
from rollout.config import AttentionSplit, ModelImpl, ModelSettings, Settings
from rollout.models.checkpoint_config import (
    CheckpointConfig,
    GenerationDefaults,
    read_config,
    read_generation_defaults,
    read_tower,
)
from rollout.models.checkpoint_tensors import (
    Progress,
    StoredTensor,
    are_equal,
    check_tensors,
    copy_tensors,
    first_names,
    has_mxfp4,
    join_fp8,
    join_mxfp4,
    join_pieces,
    list_tensors,
    stored_dtype,
    transposed,
)
from rollout.models.coded import SCALES, check_format
from rollout.models.config_spec import is_block_fp8, is_mxfp4, spec_from_config
from rollout.models.decoder import Decoder
from rollout.models.draft_checkpoint import fill_draft, read_draft
from rollout.models.draft_head import FLAGS, OFFSETS, PREFIX, DraftHead
from rollout.models.language_model import LanguageModel, LanguageModelSpec
from rollout.models.layers import Build
from rollout.models.longrope import choose_factors
from rollout.models.names import Region, all_views, is_needed
from rollout.models.random_init import fill_random
from rollout.models.registry import UnsupportedVariantError, is_native
from rollout.models.shard import shard_spec
from rollout.models.spec import DraftSpec, ModelSpec

log = logging.getLogger(__name__)

#: A format of weights, or `auto`: the checkpoint's.
AskedFormat = Format | Literal["auto"]
#: The use of layers for multi-token prediction: none, drafts by the first layer if the checkpoint has one, or a refusal
#: of checkpoints without one.
MTP = Literal["unused", "if_there", "needed"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and the checkpoint that it came from."""

    model: LanguageModel
    folder: Path  # config and tokenizer files; weights too unless load_format is random
    generation_config: GenerationDefaults
    dtype: torch.dtype  # in which it computes

    @property
    def spec(self) -> LanguageModelSpec:
        return self.model.spec

    def trainer_views(self) -> dict[str, torch.Tensor]:
        """Views by the names that a trainer may send: the checkpoint's, and a tied output layer, as in a state_dict."""
        views = self.model.hf_views() | self.scale_views()
        return views | {alias: views[name] for alias, name in self.spec.tied_names.items()}

    def scale_views(self) -> dict[str, torch.Tensor]:
        """Views of the scales of blocks, by the names that a trainer may send with codes."""
        blocks = isinstance(self.model, Decoder) and self.model.format == "fp8_block"
        views = self.model.scale_views() if isinstance(self.model, Decoder) and blocks else {}
        return {name + SCALES: view for name, view in views.items()}

    def kept_if_absent(self) -> frozenset[str]:
        """Names of tensors that an update may leave out: they keep their values."""
        return frozenset(all_views(region for region in self.model.hf_regions() if region.kept_if_absent))

    def draft_names(self) -> frozenset[str]:
        """Names of the tensors of the draft model in updates."""
        return self.model.draft_names() if isinstance(self.model, Decoder) else frozenset()


def fetch(settings: ModelSettings, progress: Progress | None = None) -> Path:
    """The folder of the checkpoint; one on the hub is downloaded. `progress` is called with (bytes, bytes in all).

    Raises:
        CheckpointError: there is no such folder, or the download fails.
    """
    return resolve_folder(settings.path, settings.revision, settings.load_format != "random", progress)


def fetch_draft(settings: Settings, progress: Progress | None = None) -> Path | None:
    """The folder of the draft model, as `fetch`; None if the settings name none."""
    path = settings.engine.speculation_model
    if path is None:
        return None
    return resolve_folder(path, None, settings.model.load_format != "random", progress)


def load_model(
    settings: ModelSettings,
    device: torch.device,
    progress: Progress | None = None,
    folder: Path | None = None,
    weights: AskedFormat = "auto",
    group: TensorGroup | None = None,
    draft: Path | None = None,
    mtp: MTP = "unused",
    split: AttentionSplit = "heads",
) -> LoadedModel:
    """Load a checkpoint, or its shapes with random weights, onto `device`.

    `progress` is called with (values copied, values in all). `folder` is the result of `fetch`, if it was called
    before. `weights` is the format of the weights that may be codes; auto: the checkpoint's. With a `group` of several
    ranks the model is this rank's shard; the views of `trainer_views` still take whole tensors of the checkpoint, and
    copy the shard's part of them; `split` as in `shard_spec`. `draft` is the folder of a model that drafts for it;
    without it, `mtp` says whether the checkpoint's own layers do.

    On the meta device a native model is an outline: it has shapes without memory. Only config.json and the headers of
    the tensors are read. Tensors that config.json ties count as tied, and unknown keys of config.json are not tried
    out.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or its tensors do not fit its architecture.
        ValueError: the architecture, or an option in its config, is not supported, or cannot be cut into shards; or
            nothing can draft for it.
    """
    group = TensorGroup.single(device) if group is None else group
    folder = fetch(settings) if folder is None else folder
    check_links(folder)

    def load(impl: ModelImpl) -> LoadedModel:
        return _load(settings, impl, device, progress, folder, weights, group, draft, mtp, split)

    try:
        return load(settings.model_impl)
    except UnsupportedVariantError as variant:
        if settings.model_impl != "auto":
            raise
        log.warning("a native family does not serve this model, so transformers' own code is tried: %s", variant)
        try:
            return load("transformers")
        except ValueError as error:
            raise ValueError(f"{variant}. Nor does transformers' own code serve it: {error}") from error


def _load(
    settings: ModelSettings,
    impl: ModelImpl,
    device: torch.device,
    progress: Progress | None,
    folder: Path,
    weights: AskedFormat,
    group: TensorGroup,
    draft: Path | None,
    mtp: MTP,
    split: AttentionSplit,
) -> LoadedModel:
    """Load a model like `load_model`, in one way of running it."""
    config = read_config(folder, impl)
    choose_factors(config.text, settings.longrope)
    tensors = {} if settings.load_format == "random" else join_mxfp4(join_fp8(list_tensors(folder)))
    own = getattr(config.whole, "dtype", None) or getattr(config.text, "dtype", None)
    dtype = _pick_dtype(settings, own or stored_dtype(tensors), device)
    if weights == "auto" and _decodes(config, tensors, dtype, "cpu" not in (device.type, settings.device)):
        weights = "plain"
    format = resolve_format(weights, config)
    defaults = read_generation_defaults(folder, config)
    source = _Source(settings, folder, config, weights, tensors, dtype, device, progress, group, draft, mtp, split)
    native = is_native(config.architecture, impl)
    model: LanguageModel = _load_native(source, format) if native else _load_fallback(source, format)
    if strange := [token for token in defaults.eos_token_ids if not 0 <= token < model.spec.vocab]:
        vocab = model.spec.vocab
        raise CheckpointError(f"{folder} names eos token ids {strange}, but the vocabulary has {vocab} entries")
    return LoadedModel(model, folder, defaults, dtype)


def _decodes(config: CheckpointConfig, tensors: dict[str, StoredTensor], dtype: torch.dtype, on_gpu: bool) -> bool:
    """True if codes of a checkpoint become numbers of the model's type, which no kernel multiplies with codes."""
    if on_gpu and dtype == torch.float32:
        return True
    # Experts may have no codes after all; the tensor cores cannot multiply f16 with the scales of MXFP4.
    return is_mxfp4(config.whole) and (dtype == torch.float16 or bool(tensors) and not has_mxfp4(tensors))


def resolve_format(asked: AskedFormat, config: CheckpointConfig) -> Format:
    """The format of the weights that may be codes. `auto` keeps a checkpoint's codes, and never quantises weights.

    Experts in MXFP4 are kept in `mxfp8`, which has all their values; other weights of such a checkpoint are not codes.
    """
    if asked != "auto":
        return asked
    if is_mxfp4(config.whole):
        return "mxfp8"
    return "fp8_block" if is_block_fp8(config.whole) else "plain"


def check_cut(
    settings: ModelSettings, folder: Path, ranks: int, weights: AskedFormat = "auto", split: AttentionSplit = "heads"
) -> None:
    """Raise as `load_model` does if the model cannot be cut into this many shards, from its configuration alone.

    Raises ValueError also if the shards would cut blocks of weights that share a scale.
    """
    if ranks == 1:
        return
    check_links(folder)
    config = read_config(folder, settings.model_impl)
    if not is_native(config.architecture, settings.model_impl):
        raise ValueError(_no_shards(config.architecture, ranks))
    choose_factors(config.text, settings.longrope)
    spec = shard_spec(_read_spec(folder, config, settings.images, weights), 0, ranks, split)
    check_format(spec, resolve_format(weights, config))


def _read_spec(folder: Path, config: CheckpointConfig, images: bool, weights: AskedFormat) -> ModelSpec:
    try:
        tower = read_tower(folder, config) if images else None
        try:
            spec = spec_from_config(config.text, config.architecture, tower)
            return replace(spec, only_experts_coded=weights == "auto" and is_mxfp4(config.whole))
        except CheckpointError:  # a value out of bounds, which transformers' code must not try
            raise
        except ValueError as error:
            raise UnsupportedVariantError(str(error)) from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder}/config.json lacks a value that {config.architecture} needs: {error}"
        ) from error


def _no_shards(architecture: str, ranks: int) -> str:
    return (
        f"{architecture} runs through transformers' own code, which cannot be cut into {ranks} shards: use one GPU a "
        "worker"
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of a model; it has no tensors if the weights are random."""

    settings: ModelSettings
    folder: Path
    config: CheckpointConfig
    weights: AskedFormat
    tensors: dict[str, StoredTensor]
    dtype: torch.dtype
    device: torch.device
    progress: Progress | None
    group: TensorGroup
    draft: Path | None
    mtp: MTP
    split: AttentionSplit

    @property
    def architecture(self) -> str:
        """The name in config.json."""
        return self.config.architecture

    @property
    def random(self) -> bool:
        """True if no weights are read."""
        return self.settings.load_format == "random"

    @property
    def outline(self) -> bool:
        """True if only the shapes of the model are needed."""
        return self.device.type == "meta"


def _load_native(source: _Source, format: Format) -> Decoder:
    architecture, device = source.architecture, source.device
    whole = _read_spec(source.folder, source.config, source.settings.images, source.weights)
    names, stored = whole.names, source.tensors
    if whole.tied:
        embeds, heads = (names.spellings(f"{module}.weight") for module in (names.embed, names.lm_head))
        stored, tied = _settle_tying(stored, [(embeds, heads)], source)
        whole = replace(whole, tied=tied)
    group = source.group
    spec = shard_spec(whole, group.rank, group.size, source.split)
    check_format(spec, format)
    spec = replace(spec, draft=_own_draft(source, spec, format))
    outline = Decoder(spec, source.dtype, torch.device("meta"), format, group)  # shapes without memory
    used = outline.draft_names()
    unused = spec.unused
    stored = _needed(stored, spec.tied_names, lambda name: name not in used and name.startswith(unused))
    stored = join_pieces(stored, outline.hf_regions())
    tensors = transposed(stored, outline.hf_views(), spec.turned_files) if spec.turned_files else stored
    if not source.random:
        check_tensors(source.folder, tensors, outline.hf_regions(), architecture)
    if source.config.unknown and group.rank == 0 and not source.outline:
        from rollout.models.start_check import check_start

        check_start(source.config, whole, source.folder, stored, source.settings.constants.random_seed)
    drafted: dict[str, StoredTensor] = {}
    if source.draft is not None:
        draft, drafted = read_draft(source.draft, spec, source.random)
        spec = replace(spec, draft=draft, unused=(*spec.unused, PREFIX + OFFSETS, PREFIX + FLAGS))
        outline = Decoder(spec, source.dtype, torch.device("meta"), format, group)
    if source.outline:
        return outline.eval()
    _check_memory(outline.parameters(), source.folder, device)
    if source.progress is not None:
        source.progress(0, sum(stored.values for stored in tensors.values()))
    group.prepare(spec.hidden, source.dtype)
    model = Decoder(spec, source.dtype, device, format, group)
    if source.random:
        fill_random(model, source.settings.constants.random_seed, whole, source.progress)
    else:
        copy_tensors(tensors, model.hf_views(), source.progress, model.scale_views())
        if model.draft is not None and source.draft is not None:
            fill_draft(model.draft, source.draft, drafted)
    return model.eval()


def _own_draft(source: _Source, spec: ModelSpec, format: Format) -> DraftSpec | None:
    """The draft model in the checkpoint itself, or None if the checkpoint lacks one or it must not draft.

    Raises:
        CheckpointError: it lacks tensors, or has some of a wrong shape.
        ValueError: a draft model is needed, but the checkpoint lacks one.
    """
    if source.mtp == "unused" or source.draft is not None:
        return None
    mtp, regions, stored = spec.mtp, [], {}
    if mtp is not None:
        build = Build(source.dtype, torch.device("meta"), format=format)
        regions = DraftHead(mtp, 0, spec.vocab, build).update_regions()
        names = all_views(regions)
        stored = {name: tensor for name, tensor in source.tensors.items() if name in names}  # no copies of the model's
    reason = None
    if mtp is None:
        reason = "has no layers for multi-token prediction that can draft: name a draft model as speculation_model"
    elif not source.random and not stored:
        reason = (
            f"is a checkpoint without its layers for multi-token prediction ({mtp.names.prefixes[0]}*): add their "
            "tensors, or name a draft model as speculation_model"
        )
    if reason is None:
        if not source.random:
            _check_own_draft(source, stored, regions)
        log.info("the checkpoint's layer for multi-token prediction drafts")
        return mtp
    if source.mtp == "needed":
        raise ValueError(f"speculation is heads, and this {spec.architecture} {reason}")
    return None


def _check_own_draft(source: _Source, stored: dict[str, StoredTensor], regions: list[Region]) -> None:
    try:
        check_tensors(source.folder, stored, regions, source.architecture)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. They belong to its layer for multi-token prediction: add them, or set speculation = "
            "suffix or off"
        ) from error


def _settle_tying(
    tensors: dict[str, StoredTensor], groups: Iterable[tuple[Sequence[str], Sequence[str]]], source: _Source
) -> tuple[dict[str, StoredTensor], bool]:
    """Decide as transformers does what becomes of tensors that config.json ties; returns the tensors to read.

    A group has the names of a tensor, and the names of the tensors tied to it. If a checkpoint has both with other
    values,
    they are not tied, and the second result is False. If it has only one that is tied to the first, that is the first.
    """
    settled = dict(tensors)
    for firsts, others in groups:
        present = [name for name in firsts if name in tensors]
        tied = [name for name in others if name in tensors]
        if not tied:
            continue
        first = (present or tied)[0]
        if not present:
            settled[firsts[0]] = replace(settled.pop(first), name=first)
        if source.outline:
            continue
        other = next((name for name in tied if not are_equal(tensors, first, name, source.dtype)), None)
        if other is not None:
            log.warning(
                "%s/config.json ties %s to %s, and the checkpoint has other values for it: they are not tied, as in "
                "transformers, and updates must have both. Set tie_word_embeddings to false in config.json",
                source.folder,
                other,
                first,
            )
            return tensors, False
    return settled, True


def _needed(
    tensors: dict[str, StoredTensor], tied: Container[str], is_unused: Callable[[str], bool]
) -> dict[str, StoredTensor]:
    """The tensors that are read; says which ones of the checkpoint the model has no use for."""
    unused = [name for name in tensors if is_unused(name)]
    if unused:
        log.info("%d tensors of the checkpoint are not used: %s", len(unused), first_names(unused))
    return {name: stored for name, stored in tensors.items() if is_needed(name, tied) and not is_unused(name)}


def _load_fallback(source: _Source, format: Format) -> LanguageModel:
    from rollout.models.fallback.build_module import make_module, max_positions, module_class
    from rollout.models.fallback.module_weights import checkpoint_regions, own_tensors
    from rollout.models.fallback.start import serve
    from rollout.models.fallback.tested import TESTED

    architecture, config, dtype, device = source.architecture, source.config.whole, source.dtype, source.device
    if source.outline:  # its code needs values to say what its layers keep
        raise ValueError(
            f"{architecture} runs through transformers' own code, whose sizes are known only once a worker has started"
        )
    if source.settings.images:
        raise ValueError(f"{architecture} runs through transformers' own code, without images: set images = false")
    if source.draft is not None:
        raise ValueError(
            f"{architecture} runs through transformers' own code, and no model drafts for it: leave speculation_model "
            "out"
        )
    cls = module_class(config, architecture)
    if source.group.size > 1:
        raise ValueError(_no_shards(architecture, source.group.size))
    if format != "plain":
        raise ValueError(
            f"weight_dtype = {format} is for native families, and {architecture} runs through transformers' own "
            "code: use weight_dtype = bf16"
        )
    log.warning(
        "%s runs through transformers' own code, not natively: expect about half the speed of a native family; no "
        "adapters, routing, deterministic or weight_dtype",
        architecture,
        extra={"tested_against_transformers": architecture in TESTED},
    )
    refused = f"{architecture} cannot be served through transformers' code"
    try:
        outline = make_module(cls, config, dtype, torch.device("meta"))
        regions, (own, aliases) = checkpoint_regions(outline), own_tensors(outline)
        stored, tied = _settle_tying(source.tensors, _tied_groups(regions, aliases), source)
        if not tied:
            config.tie_word_embeddings = False
            outline = make_module(cls, config, dtype, torch.device("meta"))
            regions, (own, aliases) = checkpoint_regions(outline), own_tensors(outline)
        tensors = _needed(stored, aliases, _declared_unused(cls, regions))
        if not source.random:
            check_tensors(source.folder, tensors, regions, architecture)
        _check_memory(own.values(), source.folder, device)
        seed = source.settings.constants.random_seed if source.random else None
        module = make_module(cls, config, dtype, device, seed)
        if not source.random:
            copy_tensors(tensors, all_views(checkpoint_regions(module)), source.progress)
        model = serve(module, max_positions(config))
        log.info("the way of running transformers' code", extra={"way": str(model.spec.way)})
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except ValueError as error:
        raise ValueError(f"{refused}: {error}") from error
    # Code of transformers that does not expect packed tokens or these sizes fails in many ways.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"{refused}: its own code fails: {type(error).__name__}: {error!s:.500}") from error
    return model


def _tied_groups(regions: list[Region], aliases: dict[str, str]) -> list[tuple[Sequence[str], Sequence[str]]]:
    """All names of each tensor to which others are tied, the usual name first; and all names of the tied tensors."""
    groups: list[tuple[Sequence[str], Sequence[str]]] = []
    for first in dict.fromkeys(aliases.values()):
        region = next(region for region in regions if any(first in views for views in region.alternatives))
        names = [*(name for views in region.alternatives if len(views) == 1 for name in views), first]
        groups.append((names, [alias for alias, of in aliases.items() if of == first]))
    return groups


def _declared_unused(cls: Any, regions: list[Region]) -> Callable[[str], bool]:
    """Whether a class of transformers declares that a checkpoint may have this tensor and the model does not use it."""
    patterns = [re.compile(pattern) for pattern in cls._keys_to_ignore_on_load_unexpected or ()]
    known = all_views(regions)
    return lambda name: name not in known and any(pattern.search(name) for pattern in patterns)


def _check_memory(tensors: Iterable[torch.Tensor], folder: Path, device: torch.device) -> None:
    """Raise CheckpointError if a model's tensors are larger than the memory of the device."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
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
