"""Where a completion stands in its constraint.

A mask is a row of int32 words: bit `v % 32` of word `v // 32` says that token v may come next. Stop tokens may come
where the constraint is complete, and must where it allows nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

WORD_BITS = 32


def mask_words(vocab: int) -> int:
    """int32 words of a mask."""
    return -(-vocab // WORD_BITS)


class Matcher(Protocol):
    """One completion's place in its constraint; for one thread at a time."""

    def accept(self, token: int) -> bool:
        """Move on by one token; False if the constraint does not allow it here."""

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Write which tokens may come next into a row of an int32 tensor on the host."""


class Constraint(Protocol):
    """A constraint that is ready for use."""

    def start(self) -> Matcher:
        """A matcher at the beginning, or after the tokens that a continued completion has already."""


def mask_of(token_ids: Iterable[int], vocab: int) -> torch.Tensor:
    """The mask of these tokens, int32 [W]."""
    mask_W = torch.zeros(mask_words(vocab), dtype=torch.int32)
    words = mask_W.numpy().view("uint32")
    for token in token_ids:
        words[token // WORD_BITS] |= 1 << (token % WORD_BITS)
    return mask_W


class AllowList:
    """The same tokens at every step. It is its own matcher: nothing moves."""

    def __init__(self, token_ids: tuple[int, ...], vocab: int) -> None:
        self._allowed = frozenset(token_ids)
        self._mask_W = mask_of(self._allowed, vocab)

    def start(self) -> AllowList:
        """Itself."""
        return self

    def accept(self, token: int) -> bool:
        """True for a token of the list."""
        return token in self._allowed

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Copy the list."""
        masks_RW[row].copy_(self._mask_W)


class GrammarConstraint:
    """A compiled grammar, from which matchers are forked. `allowed_W` is a mask that holds at every step besides.

    `after` has masks that hold for one step, behind these tokens; `last` is the token that a matcher begins behind, if
    there is one.
    """

    def __init__(
        self,
        matcher: Any,
        allowed_W: torch.Tensor,
        after: Mapping[int, torch.Tensor] | None = None,
        last: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher  # xgrammar.GrammarMatcher, which nobody moves on
        self._allowed_W = allowed_W
        self._after = after or {}
        self._last = last

    def start(self) -> GrammarPlace:
        """A matcher of its own."""
        place = GrammarPlace(self._matcher.fork(), self._allowed_W, self._after)
        place.note(self._last)
        return place


class GrammarPlace:
    """A place in a grammar."""

    def __init__(self, matcher: Any, allowed_W: torch.Tensor, after: Mapping[int, torch.Tensor]) -> None:
        self._matcher = matcher
        self._allowed_W = allowed_W
        self._after = after
        self._next_W: torch.Tensor | None = None

    def note(self, tokens: Sequence[int]) -> None:
        """What comes next comes behind these."""
        self._next_W = self._after.get(tokens[-1]) if tokens else None

    def accept(self, token: int) -> bool:
        """Move on by one token; False if the grammar does not allow it here."""
        self.note([token])
        return self._matcher.accept_token(token)

    def fill(self, masks_RW: torch.Tensor, row: int) -> None:
        """Write which tokens may come next."""
        self._matcher.fill_next_token_bitmask(masks_RW, row)
        masks_RW[row] &= self._allowed_W
        if self._next_W is not None:
            masks_RW[row] &= self._next_W
