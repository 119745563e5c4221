"""A completion's position in its constraint.

A constraint may hold from some token on. Until then the row has no masks. The commit that finds the beginning drops
tokens drawn after it without a mask, and the row draws them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.constraints.matcher import Constraint, FreePart, Matcher


@dataclass(eq=False, slots=True)
class ConstraintProgress:
    """The position of one completion. `free` is None if its constraint holds already, or if there is no constraint."""

    matched: int  # tokens that the matcher has seen
    matcher: Matcher | None = None  # begun with the first mask, by the thread that writes it
    free: FreePart | None = None  # finds where the constraint will hold; None once it does
    unmasked_end: int = 0  # tokens that were launched before its steps last began to have masks

    def begin_free(self, constraint: Constraint, rewinds: bool) -> FreePart | None:
        """Set `free`, and return it. `rewinds`: the row can draw a token again."""
        self.free = constraint.free if rewinds else constraint.foreseen
        return self.free

    def note(self, tokens: Sequence[int], launched: int, masked: bool) -> tuple[bool, bool]:
        """Look at the committed `tokens` of a completion whose `free` is not None.

        Returns whether the next token needs a mask, and whether that token was launched without one.

        Args:
            tokens: the committed tokens.
            launched: number of these tokens and of the tokens in flight.
            masked: steps have masks now.
        """
        assert self.free is not None
        narrows = self.free.narrows(tokens)
        if narrows == "all":
            self.free = None
        if narrows != "no" and not masked:
            self.unmasked_end = launched
        return narrows != "no", narrows in ("next", "all") and len(tokens) < self.unmasked_end
