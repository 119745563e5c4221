"""Weights of a shape for a trainer, and weights whose version every token reveals.

Visible weights: every layer adds zero, all embeddings are one unit vector, and the output layer has one token for each
vector. The first tensor of an update selects the vector, the last one selects the tokens:

    embedding: e_a, a = version mod 16      output layer, column a: 1 at the token 10 + 16 a + b, b = version mod 16

So a token reveals the versions of both tensors, and that the layers added zero. A mixture of two updates draws a token
of neither. Decoding must be greedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from rollout.models.checkpoint_folder import read_config
from rollout.models.cut import whole_shape
from rollout.models.decoder import Decoder
from rollout.models.registry import spec_from_config

_CODES = 16
_FIRST_TOKEN = 10  # after the special tokens of the shapes
_STD = 0.02
_DRAWN = 1 << 22  # values of a tensor on a CPU
_EMBEDDING, _OUTPUT, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_ADDS = ("o_proj.weight", "down_proj.weight", "down_proj")


def shape_tensors(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Random bf16 tensors for every parameter of the checkpoint in `folder`, experts stacked, in the loader's order."""
    config, architecture = read_config(folder)
    outline = Decoder(spec_from_config(config, architecture), torch.bfloat16, torch.device("meta"))
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, view in outline.hf_views().items():
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            continue  # the stacked tensors share this memory
        tensor = torch.empty(whole_shape(view), dtype=torch.bfloat16, device=device)
        tensors[name] = tensor.fill_(1.0) if "norm" in name else _fill(tensor, generator)
    return tensors


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
