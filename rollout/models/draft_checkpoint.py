"""The checkpoint of a draft model: an EAGLE-3 head in the layouts that are published.

    config.json     a Llama config with `draft_vocab_size`; or the same as map `transformer_layer_config`
    *.safetensors   fc, midlayer (or layers.0), norm; maybe lm_head; d2t and t2d where its vocabulary is a part

The folder is untrusted, like a model's: values and shapes are checked before any memory is taken.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING

from rollout.checkpoint_folder import CheckpointError, check_links, read_json
from rollout.models.checkpoint_config import check_config
from rollout.models.checkpoint_tensors import StoredTensor, check_tensors, copy_tensors, list_tensors
from rollout.models.config_rules import FLAG, MOST_LAYERS, Rule, integer, layer_list
from rollout.models.config_spec import spec_from_config
from rollout.models.draft_head import EAGLE_NAMES, FLAGS, OFFSETS, DraftHead
from rollout.models.layers import Build
from rollout.models.registry import config_rules, family_of
from rollout.models.spec import AttentionSpec, DenseSpec, DraftSpec, ModelSpec

_KIND, _ARCHITECTURE = "an EAGLE-3 draft model", "LlamaForCausalLM"
#: The target's embedding is used; a checkpoint's is a copy of it.
_UNUSED = ("embed_tokens.weight", OFFSETS, FLAGS)
_NESTED = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYER_NUMBERS = Rule(
    "a list of numbers of layers, ascending",
    lambda value: (
        isinstance(value, list)
        and 0 < len(value) <= MOST_LAYERS
        and all(type(item) is int and 0 <= item <= MOST_LAYERS for item in value)
        and sorted(set(value)) == value
    ),
)
_RULES = {
    "draft_vocab_size": integer(1, 1 << 24),
    "target_hidden_size": integer(1, 1 << 20),
    "norm_before_residual": FLAG,
    "sliding_window": integer(1, 1 << 30),
    "layer_types": layer_list(str),
    _TAPS: _LAYER_NUMBERS,
}


def read_draft(folder: Path, target: ModelSpec, random: bool = False) -> tuple[DraftSpec, dict[str, StoredTensor]]:
    """The spec of a draft model for `target`, and its tensors; none of them if its weights are to be `random`.

    Raises:
        CheckpointError: the folder has no such model, or one for another target.
        ValueError: its config asks for something that is not supported.
    """
    check_links(folder)
    file = folder / "config.json"
    content = read_json(file)
    nested = content.get(_NESTED)
    if isinstance(nested, dict):
        content = nested | {name: content[name] for name in _RULES if content.get(name) is not None}
    check_config(content, _RULES | config_rules(family_of(_ARCHITECTURE, "llama")), str(file))
    try:
        config = CONFIG_MAPPING["llama"].from_dict(content | {"model_type": "llama"})
    except Exception as error:  # it fails in many ways, and any exception is about this file
        raise CheckpointError(f"{file} cannot be read as a config: {type(error).__name__}: {error!s:.500}") from error
    tensors = {} if random else list_tensors(folder)
    spec = _spec(content, config, file, target, tensors)
    if random:
        return spec, {}
    needed = {name: stored for name, stored in tensors.items() if name not in _UNUSED}
    outline = DraftHead(spec, 0, target.vocab, Build(torch.float32, torch.device("meta")))
    check_tensors(folder, needed, outline.regions(), _KIND)
    return spec, tensors


def _spec(
    content: dict[str, Any], config: Any, file: Path, target: ModelSpec, tensors: dict[str, StoredTensor]
) -> DraftSpec:
    try:
        whole = spec_from_config(config, _ARCHITECTURE)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{file} lacks a value that {_KIND} needs: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {_KIND} like this is not supported: {error}{_or_own_layer(target)}") from error
    hidden = content.get("target_hidden_size") or whole.hidden
    if len(whole.layers) != 1:
        raise CheckpointError(
            f"{file}: num_hidden_layers is {len(whole.layers)}; {_KIND} has one layer{_or_own_layer(target)}"
        )
    if (whole.hidden, hidden) != (target.hidden, target.hidden):
        raise CheckpointError(
            f"{file} is made for hidden states of {hidden} and has {whole.hidden} of its own; both must be "
            f"{target.hidden} as in the served model: give the draft model that was trained for it"
        )
    if target.streams is not None:
        raise CheckpointError(f"{file}: no draft model reads the several residual streams of the served model")
    vocab = content.get("draft_vocab_size") or target.vocab
    own_head = "lm_head.weight" in tensors or not tensors
    mapped = own_head and (OFFSETS in tensors if tensors else vocab < target.vocab)
    if not mapped and vocab != target.vocab:
        raise CheckpointError(
            f"{file}: draft_vocab_size is {vocab} and the served model has {target.vocab} tokens; such a checkpoint "
            f"needs the tensors {OFFSETS} and lm_head.weight"
        )
    layer = whole.layers[0]
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.feed_forward, DenseSpec), "as all of Llama"
    return DraftSpec(
        hidden=whole.hidden,
        vocab=vocab,
        eps=whole.eps,
        taps=_taps(content, file, len(target.layers)),
        mixer=replace(layer.mixer, inputs=2 * whole.hidden, window=_window(content, file)),
        feed_forward=layer.feed_forward,
        names=EAGLE_NAMES,
        own_head=own_head,
        mapped=mapped,
        norm_before_residual=bool(content.get("norm_before_residual")),
    )


def _or_own_layer(target: ModelSpec) -> str:
    """Advice for a target whose checkpoints may have a draft model of their own."""
    if target.mtp is None:
        return ""
    layer = f"the layer for multi-token prediction ({target.mtp.names.prefix}*)"
    return f". To draft with {layer} of the served checkpoint, leave speculation_model out"


def _window(content: dict[str, Any], file: Path) -> int | None:
    kinds = content.get("layer_types")
    if not kinds or kinds == ["full_attention"]:
        return None
    if kinds != ["sliding_attention"] or content.get("sliding_window") is None:
        raise CheckpointError(
            f"{file}: layer_types is {kinds!r:.80}; its one layer is full_attention, or sliding_attention with a "
            "sliding_window"
        )
    return int(content["sliding_window"])


def _taps(content: dict[str, Any], file: Path, layers: int) -> tuple[int, ...]:
    """The layers before which hidden states are read. A map `eagle_config` counts the layer before each of them."""
    taps, inner = content.get(_TAPS), content.get("eagle_config")
    if taps is None and isinstance(inner, dict) and inner.get(_TAPS) is not None:
        check_config(inner, {_TAPS: _LAYER_NUMBERS}, f"{file}: eagle_config")
        taps = [layer + 1 for layer in inner[_TAPS]]
    if taps is None:
        taps = [2, layers // 2, layers - 3]
    if sorted(set(taps)) != taps or not 0 <= taps[0] <= taps[-1] <= layers:
        raise CheckpointError(
            f"{file}: hidden states before the layers {taps} of a model with {layers} layers: name other layers, "
            f"ascending, as {_TAPS}"
        )
    return tuple(taps)


def fill_draft(head: DraftHead, folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Copy the tensors that `read_draft` gave. Raises CheckpointError if its tokens differ from the target's."""
    needed = {name: stored for name, stored in tensors.items() if name not in _UNUSED}
    copy_tensors(needed, head.views(), None)
    if head.target_ids is None:
        return
    stored = tensors[OFFSETS]
    if stored.dtype not in ("I64", "I32") or stored.shape != (head.spec.vocab,):
        raise CheckpointError(
            f"checkpoint {folder}: {OFFSETS} is {stored.dtype} {list(stored.shape)}; it must be int64 "
            f"[{head.spec.vocab}]"
        )
    with safe_open(stored.file, framework="pt", device="cpu") as reader:
        ids = torch.arange(head.spec.vocab) + reader.get_tensor(OFFSETS)
    if int(ids.min()) < 0 or int(ids.max()) >= head.vocab or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"checkpoint {folder}: {OFFSETS} does not name {head.spec.vocab} different tokens of the {head.vocab} of "
            "the served model"
        )
    head.target_ids.copy_(ids)
