"""Weights that write text which repeats, and prompts of the same text: for engines that draft what was said before.

A few tokens form a circle. After any token the model writes, with a set chance, the next one of the circle; otherwise
any token of the vocabulary, after which the circle goes on. So the text comes again, and drafts taken from it are right
about as often as the chance says, in every engine and without any setting of its sampling.

    token id t                     place c = (t - 10) mod n on a circle of n tokens, whose ids are 10 to 10 + n - 1
    row t of the embedding         code of c; the codes are orthogonal
    the layers                     as they are, with outputs too small to change the code: a step costs what it costs
    row 10 + c of the output layer the code of the place before, times what gives the chance
    its other rows                 logits near 0

Needs an output layer of its own, a plain final norm, and no softcap of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scripts.bench.peers.workloads import FIRST_TOKEN

if TYPE_CHECKING:
    import torch

_MOST_PLACES = 64
_QUIET = 1e-3  # factor for the outputs of layers
_OTHER_LOGITS = 0.1  # their standard deviation
_SEED = 7
#: Random tokens at the beginning of a prompt: no two prompts share a page of a prefix cache.
_APART_TOKENS = 64
#: The parameters that write into the residual stream, in this engine and in vLLM.
_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "feed_forward.down", "w2_weight")
#: Rows of an embedding that are filled at once: a large one leaves little memory.
_ROWS_AT_ONCE = 8192


def places_of(hidden: int) -> int:
    """Tokens of the circle for a model of this width."""
    return min(_MOST_PLACES, hidden // 4)


def is_output(name: str) -> bool:
    """Whether the parameter of a layer, by its name, writes into the residual stream."""
    return name.endswith(_OUTPUTS)


def quiet(outputs: Sequence[torch.Tensor], layers: int, embed: torch.Tensor, norm: torch.Tensor) -> None:
    """Make the outputs of layers small and fill embedding and final norm, all in place, once.

    Raises ValueError if a layer has fewer than two outputs, of attention and of what follows: some would stay loud.
    """
    import torch

    if len(outputs) < 2 * layers:
        raise ValueError(f"{len(outputs)} outputs of {layers} layers were found: name the others in _OUTPUTS")
    for weight in outputs:
        weight.mul_(_QUIET)
    norm.fill_(1.0)
    codes = _codes(embed)
    places = (torch.arange(len(embed), device=embed.device) - FIRST_TOKEN) % len(codes)
    for rows, of_rows in zip(embed.split(_ROWS_AT_ONCE), places.split(_ROWS_AT_ONCE), strict=True):
        rows.copy_(codes[of_rows])


def sharpen(lm_head: torch.Tensor, vocab: int, chance: float) -> None:
    """Fill the output layer in place, so that the next token of the circle comes with this chance."""
    import torch

    if not 0 < chance < 1:
        raise ValueError(f"the chance must be between 0 and 1, not {chance}")
    codes, hidden = _codes(lm_head), lm_head.shape[1]
    generator = torch.Generator(device=lm_head.device).manual_seed(_SEED)
    lm_head.normal_(0.0, _OTHER_LOGITS * hidden**-0.5, generator=generator)
    lead = math.log(chance / (1 - chance) * (vocab - 1)) + _OTHER_LOGITS**2 / 2  # the others' mean exponential
    lm_head[FIRST_TOKEN : FIRST_TOKEN + len(codes)] = (codes.roll(1, 0) * (lead / hidden)).to(lm_head.dtype)


def _codes(like: torch.Tensor) -> torch.Tensor:
    """A code for each place: orthogonal rows of mean square 1."""
    import torch

    hidden = like.shape[1]
    generator = torch.Generator().manual_seed(_SEED)
    random = torch.randn(hidden, places_of(hidden), generator=generator, dtype=torch.float64)
    return (torch.linalg.qr(random).Q.T * hidden**0.5).to(like.device, like.dtype)


def repeating_prompts(rows: int, tokens: int, hidden: int, vocab: int, chance: float, seed: int) -> list[list[int]]:
    """Prompts of the text that the weights write; each begins with random tokens of its own."""
    rng = np.random.default_rng([seed, rows, tokens])
    places = places_of(hidden)
    prompts = rng.integers(FIRST_TOKEN, vocab, (rows, tokens))
    for prompt in prompts:
        strays = rng.random(tokens) >= chance
        for i in range(min(_APART_TOKENS, tokens // 2), tokens):
            if not strays[i]:
                prompt[i] = FIRST_TOKEN + (prompt[i - 1] - FIRST_TOKEN + 1) % places
    return prompts.tolist()
