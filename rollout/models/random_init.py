"""Random weights for benchmarks: real shapes, and outputs on which sampling and stopping can be measured.

Every projection keeps the scale of its input, so activations stay near 1 at any depth. The output layer is scaled by
the vocabulary. For a normalised hidden state its V logits are Gaussian with standard deviation s; the softmax of V
Gaussians goes from nearly uniform to nearly certain around s = sqrt(2 ln V) (Derrida's random energy model). At
s = 1.75 sqrt(2 ln V) its mean entropy is between 0.8 and 1.5 nats for every V from 16 to 260 thousand.

With tied embeddings a hidden state contains the embedding of its own token, and plain weights would predict that token
for ever. A final norm with random signs separates the two. Blocks that add much more to the residual stream than the
embedding did keep a pair of tokens from predicting each other.

A softcap of the logits takes their lead from the likely tokens: with a softcap of 30, V = 256 thousand Gaussians have
5.7 nats or more at every s. Then a few tokens only are likely, and the output layer has shorter rows for all others.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from rollout_kernels.linear.coded import CodedMatrix
from rollout_kernels.moe.quantize import quantize_to

from rollout.checkpoint_folder import Progress
from rollout.models.cut import whole_shape
from rollout.models.decoder import Decoder
from rollout.models.layers import Linear
from rollout.models.spec import ModelSpec

_SHARPNESS = 1.75
#: With a softcap of the logits: the number of likely tokens (up to twice as many), and the factor by which the logits
#: of the others are smaller. Below 30 the entropy is between 1.1 and 1.6 nats for V from 300 to 260 thousand.
_LIKELY = 256
_SMALLER = 8.0
#: The output of a block with tied embeddings, relative to the embedding, before its own losses.
_TIED_GAIN = 8.0


def fill_random(model: Decoder, seed: int, whole: ModelSpec | None = None, progress: Progress | None = None) -> None:
    """Fill all parameters in place, on their device. The values depend on the seed, the device type and the dtype.

    A shard gets its part of the values of the `whole` model, which are made one parameter at a time; `progress`
    gets (parameters done, parameters in all).
    """
    generator = torch.Generator(device=model.embed.device).manual_seed(seed)
    if model.spec.shard.size == 1 and not _keeps_shared_apart(model):
        _fill(model, model.embed.dtype, generator)
        return
    if whole is None:
        assert model.spec.shard.size == 1, "the values of a shard are made with the whole model"
        whole = replace(model.spec, draft=None)
    outline = Decoder(whole, model.embed.dtype, torch.device("meta"))  # shapes without memory
    views, names = model.hf_views(), _names_by_storage(outline)
    for done, (parameter, values) in enumerate(_whole_values(outline, model, generator), 1):
        for name, view in names[_storage(parameter)]:
            part = values.as_strided(view.size(), view.stride(), view.storage_offset())
            views[name].copy_(part.reshape(whole_shape(view)))
        if progress is not None:
            progress(done, len(names))
    _fill_draft(model, generator)


def _keeps_shared_apart(model: Decoder) -> bool:
    """Whether experts are codes, and a shared expert is kept apart that would else be stored with them.

    Then it has other parameters than the model without codes, though both have the same weights.
    """
    moe = model.spec.moe
    return model.format != "plain" and moe is not None and moe.shared_like_others > 0


def _fill(model: Decoder, dtype: torch.dtype, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("_scales") or name.startswith(("tower.", "draft.")):
            continue
        _fill_or_encode(model, name, parameter, dtype, generator)
    if model.tower is not None:
        model.tower.fill_random(generator)
    _fill_ends(model.embed, model.lm_head, model.norm.weight, model.spec, generator)
    _fill_draft(model, generator)


def _fill_draft(model: Decoder, generator: torch.Generator) -> None:
    """Fill the draft model, which is whole on every rank; last, as the model has the same weights without it."""
    if model.draft is not None:
        for name, parameter in model.draft.named_parameters(prefix="draft"):
            if not name.endswith("_scales"):
                _fill_or_encode(model, name, parameter, model.embed.dtype, generator)


def _fill_or_encode(
    model: Decoder, name: str, parameter: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> None:
    coded = parameter.dtype == torch.uint8
    weight = torch.empty(parameter.shape, dtype=dtype, device=parameter.device) if coded else parameter
    _fill_parameter(name, weight, model.spec, generator)
    if coded:  # the same weights as without codes
        block = model.get_submodule(name.rpartition(".")[0])
        if isinstance(block, Linear):
            assert isinstance(block.stored, CodedMatrix)
            block.stored.quantize(weight)
        else:
            quantize_to(weight, block.weights(name.rpartition(".")[2]))  # type: ignore[operator]


def _whole_values(
    outline: Decoder, shard: Decoder, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every parameter of a model without memory, with the values that `_fill` gives it; fills the tower of the shard.

    A tower is whole on every rank, so its parameters are not among these.
    """
    device = shard.embed.device

    def memory(parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)

    ends = (outline.embed, outline.lm_head, outline.norm.weight)
    for name, parameter in outline.named_parameters():
        if not (any(parameter is end for end in ends) or name.startswith("tower.")):
            values = memory(parameter)
            _fill_parameter(name, values, outline.spec, generator)
            yield parameter, values
    if shard.tower is not None:
        shard.tower.fill_random(generator)
    embed = memory(outline.embed)
    lm_head = embed if outline.spec.tied else memory(outline.lm_head)
    norm = memory(outline.norm.weight)
    _fill_ends(embed, lm_head, norm, outline.spec, generator)
    yield from zip(ends[: 1 if outline.spec.tied else 2], (embed, lm_head), strict=False)
    yield outline.norm.weight, norm


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _names_by_storage(model: Decoder) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """The names of checkpoints that cover each parameter once, with their views of it."""
    names: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for region in model.hf_regions():
        for name, view in region.alternatives[0].items():
            names.setdefault(_storage(view), []).append((name, view))
    return names


def _output_std(spec: ModelSpec) -> float:
    return _SHARPNESS * math.sqrt(2 * math.log(spec.vocab)) * spec.hidden**-0.5


def _fill_parameter(name: str, parameter: torch.Tensor, spec: ModelSpec, generator: torch.Generator) -> None:
    """Fill a parameter of a layer; embedding and output layer come last."""
    if name.endswith("bias"):
        parameter.zero_()
    elif name.endswith("a_log"):  # decays from nearly none to nearly all of a state
        parameter.uniform_(0.01, 16.0, generator=generator).log_()
    elif name.endswith("mixer.norm.weight"):  # the norm of linear attention: its weight never has 1 subtracted
        parameter.fill_(1.0)
    elif name.endswith("table_VK"):  # other experts for each token, each once
        assert spec.moe is not None
        torch.arange(parameter.numel(), out=parameter.view(-1)).remainder_(spec.moe.experts)
    elif name.endswith((".factor", ".expert_factors")):
        parameter.fill_(1.0)
    elif name.endswith("norm.weight") or name.endswith("qk_norm_weight"):
        parameter.fill_(0.0 if spec.unit_offset else 1.0)
    elif name not in ("embed", "lm_head"):
        ends_block = name.endswith(("o_proj.weight", "down_proj.weight", "feed_forward.down"))
        gain = max(1.0, _TIED_GAIN * _output_std(spec)) if ends_block and spec.tied else 1.0
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)


def _fill_ends(
    embed: torch.Tensor, lm_head: torch.Tensor, norm: torch.Tensor, spec: ModelSpec, generator: torch.Generator
) -> None:
    embed.normal_(0.0, 1.0, generator=generator)
    lm_head.normal_(0.0, _output_std(spec), generator=generator)
    if spec.logit_softcap is not None:
        apart = max(1, len(lm_head) // _LIKELY)
        likely = lm_head[::apart].clone()
        lm_head.div_(_SMALLER)[::apart] = likely
    norm.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(2.0 if spec.unit_offset else 1.0)
