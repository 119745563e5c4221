"""Random weights for benchmarks: real shapes, and outputs on which sampling and stopping can be measured.

Every projection keeps the scale of its input, so activations stay near 1 at any depth. The output layer is scaled by
the vocabulary. For a normalised hidden state its V logits are Gaussian with standard deviation s; the softmax of V
Gaussians goes from nearly uniform to nearly certain around s = sqrt(2 ln V) (Derrida's random energy model). At
s = 1.75 sqrt(2 ln V) its mean entropy is between 0.8 and 1.5 nats for every V from 16 to 260 thousand.

With tied embeddings a hidden state contains the embedding of its own token, and plain weights would predict that token
for ever. A final norm with random signs separates the two. Blocks that add much more to the residual stream than the
embedding did keep a pair of tokens from predicting each other.
"""

from __future__ import annotations

import math

import torch
from rollout_kernels.moe.quantize import quantize_to

from rollout.models.decoder import Decoder

_SHARPNESS = 1.75
#: With tied embeddings: the output of a block relative to the embedding, before its own losses.
_TIED_GAIN = 8.0


def fill_random(model: Decoder, seed: int) -> None:
    """Fill all parameters in place, on their device. The values depend on the seed, the device type and the dtype."""
    generator = torch.Generator(device=model.embed.device).manual_seed(seed)
    spec = model.spec
    output_std = _SHARPNESS * math.sqrt(2 * math.log(spec.vocab)) * spec.hidden**-0.5
    block_gain = max(1.0, _TIED_GAIN * output_std) if spec.tied else 1.0
    for name, parameter in model.named_parameters():
        if name.startswith("tower."):
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("a_log"):  # decays from nearly none to nearly all of a state
            parameter.uniform_(0.01, 16.0, generator=generator).log_()
        elif name.endswith("mixer.norm.weight"):  # of linear attention: never less 1
            parameter.fill_(1.0)
        elif name.endswith("norm.weight") or name.endswith("qk_norm_weight"):
            parameter.fill_(0.0 if spec.unit_offset else 1.0)
        elif name not in ("embed", "lm_head") and not name.endswith("_scales"):
            ends_block = name.endswith(("o_proj.weight", "down_proj.weight", "feed_forward.down"))
            gain = block_gain if ends_block else 1.0
            coded = parameter.dtype == torch.uint8
            weight = (
                torch.empty(parameter.shape, dtype=model.embed.dtype, device=parameter.device) if coded else parameter
            )
            weight.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
            if coded:  # the same weights as without codes
                block = model.get_submodule(name.rpartition(".")[0])
                quantize_to(weight, block.weights(name.rpartition(".")[2]))  # type: ignore[operator]
    if model.tower is not None:
        model.tower.fill_random(generator)
    model.embed.normal_(0.0, 1.0, generator=generator)
    model.lm_head.normal_(0.0, output_std, generator=generator)
    model.norm.weight.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(2.0 if spec.unit_offset else 1.0)
