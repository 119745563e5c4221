"""The drafts of one row: what is known between steps, and the drafts that one step verifies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout.engine.sequence.sequence import Sequence

#: `_KEPT`: decay of the weight of a row's older drafts at each newer draft. `_OTHERS`: weight of all rows' average,
#: counted in drafts.
_KEPT, _OTHERS = 0.95, 4.0


class _Unmeasured:
    """The prior for all rows."""

    chance = 0.5

    def note(self, accepted: int, tried: int) -> None:
        """No-op."""


_UNMEASURED = _Unmeasured()


class Acceptance:
    """The chance that a draft is accepted if the drafts before it were, for one row or for all rows.

    A row is assumed to be like `all_rows` until its own paths say otherwise. A path is kept until the row's tokens are
    committed, and then compared with them: drafts are accepted up to the first difference. So a row that does not draft
    is measured, too, and begins when drafts would pay.
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

        The kept path stays while more tokens are needed to tell how far it is right.
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


#: Replaces the first position of a path: the device has made the drafts, and they are in the row state.
IN_ROW_STATE = -1


@dataclass(eq=False, slots=True)
class RowDrafts:
    """One row, from its first step until its sequence has ended."""

    seq: Sequence
    of_host: Acceptance  # tokens from the drafter on the host
    of_device: Acceptance  # tokens from the drafter on the device
    followed: bool = False  # the drafter on the host knows the row
    next: int = 0  # drafts of the device in the row state, once everything launched has run
    known: list[int] = field(default_factory=list)  # drafts that the device made after its last committed step with any
    stopped: bool = False  # its constraint could not be followed along drafts: the row gets no more drafts

    @property
    def spare(self) -> int:
        """The most drafts that `max_tokens` allows."""
        return self.seq.max_tokens - self.seq.launched - 1

    @property
    def certain(self) -> int:
        """Tokens in flight that come even if all drafts are refused."""
        return self.seq.launched - self.seq.ahead_in_flight - len(self.seq.tokens)

    @property
    def may_draft(self) -> bool:
        """Whether the row may have drafts of the device."""
        return not self.stopped and self.spare > 0


class Drafts(NamedTuple):
    """The drafts of one row in a step: `length` tokens of `path`, from the position that the row then has.

    Drafts of the device have no path: the host does not know them when it plans.
    """

    row: RowDrafts
    draw_index: int  # index of the row's own draw in the step; its drafts follow
    length: int
    path: list[int]  # tokens expected from position `begin` on; in a plan all paths are padded to one length
    begin: int  # `IN_ROW_STATE` for drafts of the device
    age: int | None = None  # versions between the weights that the path comes from and the step's; None: from none
    drafter: str = "suffix"  # a name in `DRAFTER_NAMES`

    @property
    def seq(self) -> Sequence:
        return self.row.seq

    def tokens(self) -> list[int]:
        """The drafts, once all earlier steps are committed; none if the row has stopped to draft since."""
        if self.row.stopped:
            return []
        if self.begin == IN_ROW_STATE:
            return self.row.known[: self.length]
        first = self.seq.prompt_len + len(self.seq.tokens) - self.begin
        return [self.path[min(first + i, len(self.path) - 1)] for i in range(self.length)]

    def stop(self) -> None:
        """No later step has drafts of this row."""
        self.row.stopped = True
