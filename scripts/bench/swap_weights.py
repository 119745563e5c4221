"""Weights of a shape for a trainer, and weights whose version every token reveals.

Visible weights: every layer adds zero, all embeddings are one unit vector, and the output layer has one token for each
vector. The first tensor of an update selects the vector, the last one selects the tokens:

    embedding: e_a, a = version mod 16      output layer, column a: 1 at the token 10 + 16 a + b, b = version mod 16

So a token reveals the versions of both tensors, and that the layers added zero. A mixture of two updates draws a token
of neither. Decoding must be greedy.

A trainer without memory for a whole model holds its first layers only. Layer i then has the tensors of layer i mod N:
the same memory under another name. Every name is sent, so an update has as many bytes as that of the whole model.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from rollout.models.checkpoint_config import read_config
from rollout.models.config_spec import spec_from_config
from rollout.models.cut import whole_shape
from rollout.models.decoder import Decoder

_CODES = 16
_FIRST_TOKEN = 10  # after the special tokens of the shapes
_STD = 0.02
_DRAWN = 1 << 22  # values of a tensor on a CPU
_EMBEDDING, _OUTPUT, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_ADDS = ("o_proj.weight", "down_proj.weight", "down_proj")
_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?layers\.)(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"\.experts\.\d")


def shape_tensors(
    folder: Path,
    device: torch.device,
    layers: int = 0,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[str, torch.Tensor]:
    """Random bf16 tensors for every parameter of the checkpoint in `folder`, experts stacked, in the loader's order.

    There is memory for the tensors of the first `layers` layers (0: of all), as `held_names` says. `part` makes what is
    kept of a tensor; one tensor at a time is whole.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = tensor_shapes(folder)
    held: dict[str, torch.Tensor] = {}
    tensors = {}
    for name, source in held_names(shapes, layers).items():
        if source not in held:
            held[source] = part(_drawn(source, shapes[source], device, generator))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # a worker on this GPU may have left little memory
        tensors[name] = held[source]
    return tensors


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of an update, by name, in the loader's order."""
    config = read_config(folder)
    outline = Decoder(spec_from_config(config.text, config.architecture), torch.bfloat16, torch.device("meta"))
    return {
        name: whole_shape(view)
        for name, view in outline.hf_views().items()
        if not _EXPERT.search(name)  # the stacked tensors share this memory
    }


def held_names(shapes: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, str]:
    """For each name the name of the tensor that it has, in a trainer that holds the first `layers` layers (0: all).

    Raises ValueError if a layer's tensors have other names or shapes than expected.
    """
    if not layers:
        return {name: name for name in shapes}
    found = {name: match for name in shapes if (match := _LAYER.match(name))}
    by_layer: dict[tuple[str, int], dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, match in found.items():
        by_layer[match["stack"], int(match["layer"])][match["rest"]] = shapes[name]
    for (stack, layer), own in by_layer.items():
        if own != by_layer.get((stack, layer % layers)):
            raise ValueError(
                f"{stack}{layer} has other tensors than {stack}{layer % layers}, so it cannot have the same memory: "
                "let --trainer-layers be a number after which the kinds of layers repeat, or 0"
            )
    return {
        name: f"{match['stack']}{int(match['layer']) % layers}.{match['rest']}" if (match := found.get(name)) else name
        for name in shapes
    }


def _drawn(name: str, shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return tensor.fill_(1.0) if "norm" in name else _fill(tensor, generator)


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values; on a CPU, which draws slowly, large tensors repeat some of them."""
    if tensor.is_cuda or tensor.numel() <= _DRAWN:
        return tensor.normal_(0.0, _STD, generator=generator)
    some = torch.empty(_DRAWN, dtype=tensor.dtype).normal_(0.0, _STD, generator=generator)
    for part in tensor.view(-1).split(_DRAWN):
        part.copy_(some[: part.numel()])
    return tensor


def make_visible(tensors: dict[str, torch.Tensor]) -> None:
    """Prepare the weights for `show`. Raises ValueError for a model whose output layer is its embedding."""
    if _OUTPUT not in tensors:
        raise ValueError(
            "the output layer of this shape is its embedding, which cannot reveal a version; take another shape"
        )
    tensors[_NORM].fill_(1.0)
    for name, tensor in tensors.items():
        if name.endswith(_ADDS):
            tensor.zero_()


def show(tensors: dict[str, torch.Tensor], version: int) -> None:
    """Turn these weights into the weights of `version`."""
    code = version % _CODES
    tensors[_EMBEDDING].zero_()
    tensors[_EMBEDDING][:, code] = 1.0
    tensors[_OUTPUT].zero_()
    for column in range(_CODES):
        tensors[_OUTPUT][_FIRST_TOKEN + _CODES * column + code, column] = 1.0


def token_of(version: int) -> int:
    """The token that the complete weights of `version` draw."""
    code = version % _CODES
    return _FIRST_TOKEN + _CODES * code + code


def wrong_tokens(token_ids: Iterable[int], versions: Iterable[tuple[int, int]]) -> int:
    """The number of tokens that contradict the version runs."""
    told = [token_of(version) for version, count in versions for _ in range(count)]
    return sum(token != expected for token, expected in zip(token_ids, told, strict=True))
