"""The variant of the weights that the rows of a request run with: the plain weights, unless a feature has others.

KV belongs to a weights version and to an edition of a variant. The queue has a line for each variant, so a variant that
is not ready yet delays its own sequences only.
"""

from __future__ import annotations

from dataclasses import dataclass


class VariantUse:
    """Notes of one sequence on its variant. This base class is for the plain weights."""

    __slots__ = ()

    def refused(self, count: int, after: int) -> None:
        """Note that a step whose tokens begin at `after` refused this many tokens ahead."""

    def dropped(self, token: int) -> None:
        """Note that the tokens from this one on are discarded, and drawn again."""


@dataclass(eq=False, slots=True)
class Variant:
    """One variant, which any number of requests may name."""

    edition: int  # a number that no other content of the weights has; 0: the plain weights

    def use(self) -> VariantUse:
        """The use of a new sequence."""
        return _NO_USE


_NO_USE = VariantUse()
PLAIN_WEIGHTS = Variant(0)
