"""LongRoPE (arXiv 2402.13753): a model has two sets of factors of its rotary frequencies; a worker uses one set.

transformers takes the long set for a forward whose farthest position is past the original context, else the short set.
All keys of a row turn by the same set. So at this border the keys of all earlier tokens change, and with them the
log-probs; transformers' `generate` computes the KV again there.

Here no row crosses a border: one set serves all rows from their first token on, chosen when the worker starts. KV,
prefixes, sessions and groups then need not know of frequencies.

    short   sequences end at the original context; transformers uses these frequencies for all of them
    long    sequences may have the whole context; transformers uses these frequencies only past the border

In a config with two equal sets, one set serves all lengths. `long` makes such a config. A trainer with an equal config
has equal log-probs for short sequences.
"""

import logging
from collections.abc import Iterator
from typing import Any

from rollout.config import LongRope

log = logging.getLogger(__name__)


def choose_factors(config: Any, which: LongRope) -> None:
    """Let a config of transformers have one set of factors for all lengths, in place, if `which` is "long".

    Raises ValueError if it has no LongRoPE, or no long factors.
    """
    maps = list(rope_maps(config, "longrope"))
    if which == "short":
        if border := first_border(config):
            log.info("sequences end at %d tokens: longer ones need longrope = long", border)
        return
    if not maps:
        raise ValueError("longrope = long needs a model with LongRoPE: use longrope = short")
    for parameters in maps:
        if not parameters.get("long_factor"):
            raise ValueError("config.json: rope scaling 'longrope' needs 'long_factor'")
        parameters["short_factor"] = parameters["long_factor"]


def first_border(config: Any) -> int | None:
    """The length past which transformers takes other frequencies; None if they are the same for all lengths."""
    borders = [
        int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
        for parameters in rope_maps(config, "longrope")
        if parameters.get("short_factor") != parameters.get("long_factor")
    ]
    return min(borders, default=None)


def rope_maps(config: Any, kind: str) -> Iterator[dict[str, Any]]:
    """The rope parameters of all layers, or of types of layers, whose scaling is of this kind."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *parameters.values()):
        if isinstance(part, dict) and part.get("rope_type") == kind:
            yield part
