"""The drafts of one row: what is known of them between the steps, and those that one step verifies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rollout.engine.features.drafts.acceptance import Acceptance
from rollout.engine.sequence.sequence import Sequence

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
    stopped: bool = False  # its constraint could not be followed along drafts: it has no more of them

    @property
    def spare(self) -> int:
        """The most drafts that `max_tokens` allows."""
        return self.seq.max_tokens - self.seq.launched - 1

    @property
    def certain(self) -> int:
        """Tokens in flight that come even if all drafts are refused."""
        return self.seq.launched - self.seq.ahead - len(self.seq.tokens)

    @property
    def may_draft(self) -> bool:
        """Whether the row may have drafts of the device."""
        return not self.stopped and self.spare > 0


class Drafts(NamedTuple):
    """The drafts of one row in a step: `length` tokens of `path`, from the position that the row then has.

    Drafts of the device have no path: the host does not know them when it plans.
    """

    row: RowDrafts
    place: int  # place of the row's own draw in the step; its drafts follow
    length: int
    path: list[int]  # tokens expected from position `begin` on; in a plan all paths are padded to one length
    begin: int  # `IN_ROW_STATE` for drafts of the device
    age: int | None = None  # versions between the weights that the path comes from and the step's; None: from none
    drafter: str = "suffix"  # a name in `DRAFTER_NAMES`

    @property
    def seq(self) -> Sequence:
        """The sequence of the row."""
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
