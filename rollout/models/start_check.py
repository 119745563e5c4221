"""The check at the start of a native model whose config.json is not in the known form: its logits are transformers'.

A key that the family's declaration does not read may change what transformers computes. So the logits of a short prompt
are compared with transformers' own class, before the weights are loaded. Both run in float32 on the CPU, with one layer
of each kind and the checkpoint's weights:

    config.json --> spec -------------------> a `Decoder` of these layers, filled from the checkpoint
                --> transformers' config ---> its class with these layers, whose parameters are views of the same memory

Two layers are of one kind if their specs are equal, and so are the shapes and plain attributes of transformers' own
layers; these are made at the full depth, without memory. Windows may be longer than the prompt, so they are read off
the masks of transformers. Positions are far apart, where scaled rotary embeddings differ.

The check costs the import of transformers' modelling code, and reads, in float32 in host memory, these layers and both
ends of the model. In the known form nothing of it is done.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.initialization import no_init_weights

from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
from rollout.models.checkpoint_config import CheckpointConfig
from rollout.models.checkpoint_tensors import StoredTensor, copy_tensors, first_names, transposed
from rollout.models.cut import kept_values
from rollout.models.decoder import Decoder
from rollout.models.fallback.probe import probe_layers
from rollout.models.families import FAMILIES
from rollout.models.random_init import fill_random
from rollout.models.registry import UnsupportedVariantError
from rollout.models.spec import (
    ENTRY_TOKENS,
    AttentionSpec,
    CompressedSpec,
    KVMixerSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
)
from rollout.models.state_pool import StatePool
from rollout.process.host_memory import available_bytes

log = logging.getLogger(__name__)

_TOKENS = 24
_NEIGHBOURS = 12  # tokens at the first positions; the distances between the others grow
_FARTHEST = 2048  # position
_CPU = torch.device("cpu")
#: Largest difference of the logits of a token, relative to their standard deviation over the vocabulary.
_TOLERANCE = 1e-3
#: Errors of transformers' classes with configs that no checkpoint of theirs has.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: Host memory that must be there, relative to the parameters in float32.
_ROOM = 1.25


class _NotCheckedError(Exception):
    """Why nothing can be compared."""


class _Difference(NamedTuple):
    """The difference from transformers' result."""

    logits: float  # the largest difference of a token's, relative to their standard deviation
    windows: str  # how windows differ; empty if they do not


def check_start(
    config: CheckpointConfig, spec: ModelSpec, folder: Path, tensors: Mapping[str, StoredTensor], seed: int
) -> None:
    """Compare a layer of each kind of a model with transformers' own; `spec` is the whole model's.

    `tensors` are the checkpoint's tensors that are read. If there are none, the weights are random, from `seed`. If
    host memory has no room for the layers, or transformers has no such model, the log says so, and nothing is compared.

    Raises UnsupportedVariantError, which names the unknown keys, if logits or windows differ, or if transformers' class
    cannot run.
    """
    keys = first_names([repr(key)[1:-1] for key in config.unknown])  # a folder is untrusted: nothing breaks lines
    try:
        found = _compare(config, spec, tensors, seed)
    except _NotCheckedError as obstacle:
        log.warning(
            "%s/config.json has keys that are not read (%s), and whether they change logits is not checked: %s",
            folder,
            keys,
            obstacle,
        )
        return
    except _FAILURES as failure:
        problem = f"logits cannot be compared with transformers' own class: {failure!r:.500}"
        raise UnsupportedVariantError(_refusal(config, folder, keys, problem)) from failure
    if found.windows:
        problem = f"with them the windows of transformers' layers differ: {found.windows}"
        raise UnsupportedVariantError(_refusal(config, folder, keys, problem))
    if not found.logits <= _TOLERANCE:
        problem = f"with them logits differ from transformers' by {found.logits:.2g} of their standard deviation"
        raise UnsupportedVariantError(_refusal(config, folder, keys, f"{problem} ({_TOLERANCE:g} is allowed)"))
    log.info(
        "%s/config.json has keys that are not read (%s): logits equal transformers' logits",
        folder,
        keys,
        extra={"difference": found.logits},
    )


def _refusal(config: CheckpointConfig, folder: Path, keys: str, problem: str) -> str:
    other = "" if config.text is not config.whole else "; or set model_impl = transformers, which runs its own code"
    return (
        f"{folder}/config.json has keys that are not read ({keys}), and {problem}. If the model does not need these "
        f"keys, remove them from config.json{other}"
    )


def _compare(config: CheckpointConfig, spec: ModelSpec, tensors: Mapping[str, StoredTensor], seed: int) -> _Difference:
    whole, cls = copy.deepcopy(config.whole), _class_of(config)
    spec = replace(spec, layers=tuple(map(_without_limits, spec.layers)))
    if cls is None:
        raise _NotCheckedError(f"transformers has no {config.architecture}")
    text = whole.get_text_config()
    whole.tie_word_embeddings = text.tie_word_embeddings = spec.tied
    text.pad_token_id = None  # it changes no logits, and need not be a token of the vocabulary
    outline = _module(cls, whole, torch.device("meta"))
    chosen = _one_of_each_kind(_layers(outline), text, spec)
    some = replace(spec, layers=tuple(spec.layers[index] for index in chosen), draft=None, mtp=None, tower=None)
    _check_room(some)
    model = Decoder(some, torch.float32, _CPU)
    if tensors:
        copy_tensors(_tensors_of(model, spec, chosen, tensors), model.hf_views(), None)
    else:
        fill_random(model, seed)
    module = _with_layers(cls, whole, outline, chosen)
    _take_parameters(module, model)
    return _Difference(_logit_difference(model, module), _other_windows(model, module))


def _without_limits(layer: LayerSpec) -> LayerSpec:
    """The layer as transformers' code computes it."""
    block = layer.feed_forward
    if not isinstance(block, MoESpec) or block.activation in (
        "bounded_silu",
        "clamped",
    ):  # transformers has these limits
        return layer
    return replace(layer, feed_forward=replace(block, limits=None))


def _check_room(spec: ModelSpec) -> None:
    sizes = (parameter.numel() for parameter in Decoder(spec, torch.float32, torch.device("meta")).parameters())
    needed, available = _ROOM * torch.float32.itemsize * sum(sizes), available_bytes()
    if needed > available:
        raise _NotCheckedError(
            f"this takes {needed / 2**30:.1f} GiB of host memory, and {available / 2**30:.1f} GiB are available"
        )


# --- transformers' side -----------------------------------------------------------------------------------------------


def _class_of(config: CheckpointConfig) -> Any:
    """The class by which transformers runs the checkpoint, or a family that is read as another; None if it has none."""
    if config.architecture in FAMILIES and FAMILIES[config.architecture].read_as is not None:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config.whole)]
    return getattr(transformers, config.architecture, None)


def _module(cls: Any, config: Any, device: torch.device) -> Any:
    """A module without values, which keeps `config` itself."""
    config._attn_implementation = "eager"
    with no_init_weights(), device:
        module = cls(config)
    if cls._can_set_experts_implementation():
        module.set_experts_implementation("eager")
    return module.requires_grad_(False).eval()


def _layers(module: Any) -> nn.ModuleList:
    return module.get_decoder().layers


def _one_of_each_kind(layers: nn.ModuleList, text: Any, spec: ModelSpec) -> list[int]:
    """The first layer of each kind, ascending; all layers where a layer is nothing without those before it."""
    shared = any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv == "shared" for layer in spec.layers)
    if shared or spec.token_inputs is not None or getattr(text, "is_heterogeneous", False):
        return list(range(len(layers)))
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    first: dict[Any, int] = {}
    for index, facts in enumerate(zip(spec.layers, map(_facts, layers), kinds, strict=True)):
        first.setdefault(facts, index)
    return list(first.values())


def _facts(layer: nn.Module) -> tuple[Any, ...]:
    """The traits of a layer of transformers: shapes of parameters, and plain attributes of its modules."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    attributes = tuple(
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in sorted(vars(module).items())
        if name != "layer_idx" and isinstance(value, bool | int | float | str | None)
    )
    return shapes, attributes


def _with_layers(cls: Any, whole: Any, outline: Any, chosen: Sequence[int]) -> Any:
    """A module on the CPU with these layers of the outline; it changes their config, which is `whole`."""
    text, layers = whole.get_text_config(), _layers(outline)
    for name, value in vars(text).copy().items():
        by_layer = name.endswith(("layer_types", "layers_block_type", "indexer_types")) and isinstance(value, list)
        if by_layer and len(value) == len(layers):
            setattr(text, name, [value[index] for index in chosen])
    text.num_hidden_layers = len(chosen)
    module = _module(cls, whole, _CPU)
    own = _layers(module)
    module.get_decoder().layers = nn.ModuleList(layers[index] for index in chosen)
    for layer, values in zip(_layers(module), own, strict=True):
        for name in dict(values.named_buffers()).keys() - values.state_dict().keys():  # no checkpoint has these
            path, _, last = name.rpartition(".")
            layer.get_submodule(path).register_buffer(last, values.get_buffer(name), persistent=False)
    return module


def _take_parameters(module: Any, model: Decoder) -> None:
    """Give the language model in a module the parameters and saved buffers of `model`."""
    views = model.hf_views()
    parts = module.get_decoder(), module.get_output_embeddings()
    needed = {id(tensor) for part in parts for tensor in part.state_dict(keep_vars=True).values()}
    if model.spec.tied:
        views |= {name: views[other] for name, other in model.spec.tied_names.items()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in needed:  # a tensor of a vision tower
            continue
        if name not in views:
            raise ValueError(f"there is no tensor {name}")
        values = kept_values(views[name])
        if values.shape != tensor.shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)} for {list(values.shape)}")
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            setattr(owner, last, nn.Parameter(values, requires_grad=False))
        else:
            owner.register_buffer(last, values)


# --- the native side --------------------------------------------------------------------------------------------------


def _tensors_of(
    model: Decoder, spec: ModelSpec, chosen: Sequence[int], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of `model`, which has the chosen layers of `spec`, by its own names."""
    views = model.hf_views()
    layers = {
        prefix: mine
        for number, index in enumerate(chosen)
        for prefix, mine in zip(spec.layer_prefixes(index), spec.layer_prefixes(number), strict=True)
    }
    found = {}
    for name, stored in tensors.items():
        prefix = next((prefix for prefix in _prefixes(name) if prefix in layers), None)
        mine = layers[prefix] + name.removeprefix(prefix) if prefix is not None else name
        in_a_layer = any(name.startswith(one.partition("{}")[0]) for one in spec.names.spellings(spec.names.layer))
        if mine in views and (prefix is not None or not in_a_layer):
            found[mine] = replace(stored, name=stored.name or name)
    return transposed(found, views, spec.turned_files) if spec.turned_files else found


def _prefixes(name: str) -> Iterator[str]:
    """All that the name begins with and that ends with a point, the shortest first."""
    parts = name.split(".")
    yield from (".".join(parts[:count]) + "." for count in range(1, len(parts)))


def _positions(most: int) -> list[int]:
    """Positions of the tokens, ascending from 0: some neighbours, then more and more apart."""
    count, farthest = min(_TOKENS, most), min(_FARTHEST, most) - 1
    positions = list(range(min(count, _NEIGHBOURS)))
    left = count - len(positions)
    for number in range(1, left + 1):
        further = (farthest - _NEIGHBOURS + 1) * number**2 // left**2
        positions.append(max(positions[-1] + 1, _NEIGHBOURS - 1 + further))
    return positions


def _logit_difference(model: Decoder, module: Any) -> float:
    """The largest difference of the logits of a token, relative to their standard deviation."""
    positions = torch.tensor(_positions(model.spec.max_positions))
    if model.spec.indexed_layers:  # transformers counts the blocks of a context by positions
        positions = torch.arange(len(positions))
    ids = torch.randint(0, model.spec.vocab, positions.shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        # The mask makes all positions one row: transformers takes a gap for the start of another row.
        inputs = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": torch.ones(1, len(ids)).long(),
        }
        expected = module(**inputs, use_cache=False).logits[0].float()
        logits = _logits(model, ids, positions)
    difference = (logits - expected).pow(2).mean(-1).sqrt() / expected.std(-1).clamp_min(1e-6)
    return float(difference.max()) if bool(torch.isfinite(expected).all()) else float("nan")


def _logits(model: Decoder, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits after each token of a prompt, float32 [T, V]."""
    count = len(ids)
    size = ENTRY_TOKENS if any(isinstance(layer.mixer, CompressedSpec) for layer in model.spec.layers) else 1
    states = StatePool.allocate(model.spec, 2, torch.float32, _CPU)
    kv = KVCache.allocate(model.spec, 1 + count, size, torch.float32, _CPU, states=states)
    grown = any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.growth for layer in model.spec.layers)
    batch = AttentionBatch(
        positions_T=positions.int() if grown else torch.arange(count, dtype=torch.int32),
        rope_positions=positions.int(),
        kv_slots_T=torch.arange(size, size + count, dtype=torch.int32),
        page_table_BP=torch.arange(1, 1 + count, dtype=torch.int32)[None],
        context_lens_B=torch.tensor([count], dtype=torch.int32),
        max_context=count,
        chunks=(PromptChunk(0, count, count),),
        query_starts_C1=torch.tensor([0, count], dtype=torch.int32),
        rows_B=torch.ones(1, dtype=torch.int64),
    )
    return model.compute_logits(model(ids.int(), batch, kv))


def _other_windows(model: Decoder, module: Any) -> str:
    """The differences in windows of transformers' layers; empty without any."""
    latent = (layer.mixer for layer in model.spec.layers if isinstance(layer.mixer, LatentSpec))
    if model.spec.indexed_layers or any(mixer.indexer for mixer in latent):
        return ""  # transformers' classes with indexers have none, and their attention cannot be probed
    with torch.inference_mode():
        theirs = [facts.window for facts in probe_layers(module, model.spec.vocab).values()]
    mixers = [layer.mixer for layer in model.spec.layers if isinstance(layer.mixer, KVMixerSpec)]
    ours = [mixer.window if isinstance(mixer, AttentionSpec) else None for mixer in mixers]
    return "" if theirs == ours else f"{theirs} for {ours}"
