"""Windows of layers, read off the mask functions that transformers makes its masks with.

Such a function says for a query position and a key position whether the query sees the key. Only two forms fit the
paged cache: every query sees all positions up to its own, or the last `window` of them. Whether a function has one of
these forms is asked of the function itself, at positions near and far, because a probe's few tokens would not show a
window of thousands.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

#: (batch, head, query position, key position) -> visible; all int64 tensors that are broadcast.
MaskFunction = Callable[..., torch.Tensor]

#: Query positions at which a mask is compared with its form: one beyond all contexts, and odd positions before it.
_FARTHEST = 1 << 24
_QUERIES = (0, 1, 2, 5, 17, 100, 1023, 4097, 20_011, 130_003, 1_048_579, _FARTHEST - 3, _FARTHEST)


class Visible(NamedTuple):
    """The positions that the queries of a layer see: `window` tokens, the own one included; None: all."""

    window: int | None


def read_mask(function: MaskFunction) -> Visible:
    """The form of a mask. Raises ValueError that describes a mask of neither form."""
    try:
        window = _window(function)
        for query in _QUERIES:
            keys = _keys(query, window)
            expected = keys <= query
            if window is not None:
                expected &= keys > query - window
            if not torch.equal(_sees(function, query, keys), expected):
                after = bool(_sees(function, query, keys[keys > query]).any())
                raise ValueError(
                    "tokens attend to later ones"
                    if after
                    else "a token attends to something other than a window before it"
                )
    except (IndexError, RuntimeError, TypeError) as error:  # it reads tensors of the probe at positions
        raise ValueError(f"its mask depends on more than positions ({type(error).__name__})") from error
    return Visible(window)


def _window(function: MaskFunction) -> int | None:
    """The number of positions that the farthest query sees, if they are the last ones; None if it sees the first."""
    if bool(_sees(function, _FARTHEST, torch.zeros(1, dtype=torch.int64))):
        return None
    seen, hidden = 0, _FARTHEST  # distances
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        if bool(_sees(function, _FARTHEST, torch.tensor([_FARTHEST - middle]))):
            seen = middle
        else:
            hidden = middle
    return hidden


def _keys(query: int, window: int | None) -> torch.Tensor:
    """Key positions at which a mask may deviate: around the query, around the edge of its window, and everywhere."""
    edges = [query, 0] if window is None else [query, 0, query - window, query // window * window]
    near = [position for edge in edges for position in range(edge - 3, edge + 4)]
    spread = torch.linspace(0, query + 50, 64).long().tolist()
    return torch.tensor(sorted({position for position in (*near, *spread) if position >= 0}))


def _sees(function: MaskFunction, query: int, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    return torch.as_tensor(function(zero, zero, torch.tensor(query), keys)).expand(len(keys))
