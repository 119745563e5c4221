"""Weights of a shape as a trainer has them, and weights whose version can be read off every token.

Visible weights: every layer adds nothing, all embeddings are one unit vector, and the output layer has one token for
each. Which vector it is the first tensor of an update says, which tokens they are the last one:

    embedding: e_a, a = version mod 16      output layer, column a: 1 at the token 10 + 16 a + b, b = version mod 16

So a token tells the versions of both, and that nothing else was added on the way; a mixture of two updates draws a
token of neither. Draw greedily.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from rollout.models.checkpoint_folder import read_config
from rollout.models.decoder import Decoder
from rollout.models.registry import spec_from_config

_CODES = 16
_FIRST_TOKEN = 10  # beyond the special ones of the shapes
_STD = 0.02
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
            continue  # the stacked tensors are the same memory
        tensor = torch.empty(view.shape, dtype=torch.bfloat16, device=device)
        tensors[name] = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, _STD, generator=generator)
    return tensors


def make_visible(tensors: dict[str, torch.Tensor]) -> None:
    """Have `show` decide what is drawn. Raises ValueError for a model whose output layer is its embedding."""
    if _OUTPUT not in tensors:
        raise ValueError("this shape's output layer is its embedding, which cannot show a version: take another shape")
    tensors[_NORM].fill_(1.0)
    for name, tensor in tensors.items():
        if name.endswith(_ADDS):
            tensor.zero_()


def show(tensors: dict[str, torch.Tensor], version: int) -> None:
    """Make these the weights of `version`."""
    code = version % _CODES
    tensors[_EMBEDDING].zero_()
    tensors[_EMBEDDING][:, code] = 1.0
    tensors[_OUTPUT].zero_()
    for column in range(_CODES):
        tensors[_OUTPUT][_FIRST_TOKEN + _CODES * column + code, column] = 1.0


def token_of(version: int) -> int:
    """What is drawn under the weights of `version`, whole and unmixed."""
    code = version % _CODES
    return _FIRST_TOKEN + _CODES * code + code


def wrong_tokens(token_ids: Iterable[int], versions: Iterable[tuple[int, int]]) -> int:
    """How many tokens are not of the version that the runs say."""
    told = [token_of(version) for version, count in versions for _ in range(count)]
    return sum(token != expected for token, expected in zip(token_ids, told, strict=True))
