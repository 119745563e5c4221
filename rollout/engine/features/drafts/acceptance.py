"""The accuracy of a drafter for one row, measured whether or not its drafts were verified.

A path is kept until its tokens are committed, and then compared with them: accepted are the equal ones before the
first that differs. So a row that does not draft is measured, too, and begins when drafts would pay.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

#: Weight of older drafts of a row when a newer one is compared, and of all rows in the estimate for one, in drafts.
_KEPT, _OTHERS = 0.95, 4.0


class _Unmeasured:
    """The prior for all rows."""

    chance = 0.5

    def note(self, accepted: int, tried: int) -> None:
        """No-op."""


_UNMEASURED = _Unmeasured()


class Acceptance:
    """The chance that a draft is accepted if the drafts before it were, for one row or for all rows.

    A row is assumed to be like `all_rows` until its own paths say otherwise.
    """

    def __init__(self, all_rows: Acceptance | _Unmeasured = _UNMEASURED) -> None:
        self._all_rows = all_rows
        self._hits, self._tries = 0.0, 0.0
        self._begin = 0
        self._path: tuple[int, ...] = ()

    @property
    def chance(self) -> float:
        """Estimate, 0 to 1; 0.5 before anything is known."""
        return (self._hits + _OTHERS * self._all_rows.chance) / (self._tries + _OTHERS)

    def follow(self, tokens: Seq[int], begin: int, path: Seq[int]) -> None:
        """Compare the kept path with the committed `tokens`; then keep `path`, which begins at `begin`, if any.

        While more tokens are needed to tell how far the kept one is right, it stays.
        """
        self.settle(tokens)
        if not self._path:
            self._begin, self._path = begin, tuple(path)

    def settle(self, tokens: Seq[int], ended: bool = False) -> None:
        """Compare the kept path with the committed `tokens`; if the row has `ended`, no more tokens follow."""
        come = tokens[self._begin : self._begin + len(self._path)]
        equal = next((i for i, (a, b) in enumerate(zip(come, self._path, strict=False)) if a != b), len(come))
        if equal == len(come) < len(self._path) and not ended:
            return
        if come:
            self.note(equal, min(equal + 1, len(come)))
        self._path = ()

    def note(self, accepted: int, tried: int) -> None:
        """Note that `accepted` of `tried` drafts were right; further drafts do not count."""
        kept = _KEPT**tried
        self._hits, self._tries = kept * self._hits + accepted, kept * self._tries + tried
        self._all_rows.note(accepted, tried)
