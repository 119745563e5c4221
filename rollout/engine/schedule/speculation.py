"""Which decode rows get drafts in the next step, and how many.

A row's path begins after its committed tokens. Its drafts begin later, where the row is once the steps in flight have
run: each of them draws one token at least, and more if drafts are accepted. So a path is longer than the drafts.
"""

from __future__ import annotations

from rollout.engine.schedule.plan import Drafts
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.features import Feature
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.speculation.drafter import Drafter

#: Rows with these draft nothing. A mask is made for one token; a change of an adapter is noted at a token that must be
#: known.
_NOT_DRAFTED = (Feature.CONSTRAIN | Feature.ADAPTER).value


class Speculation:
    """Asks a drafter.

    Args:
        drafter: what guesses tokens.
        most: drafts of a row in a step.
        most_rows: drafts of all rows in a step.
    """

    def __init__(self, drafter: Drafter, most: int, most_rows: int) -> None:
        self._drafter = drafter
        self._most = most
        self._most_rows = most_rows
        self._followed: set[Sequence] = set()  # that the drafter knows

    def drafts(self, seqs: list[Sequence], roster: Roster) -> list[Drafts]:
        """The drafts of a step of these rows, in their order; may give rows a page more for them."""
        self._end_finalized()
        paths = {seq: path for seq in seqs if (path := self._path(seq))}
        if not paths:
            return []
        each = max(1, min(self._most, self._most_rows // len(paths)))
        left, place, drafts = self._most_rows, 0, []
        for seq in seqs:
            path = paths.get(seq, [])
            count = self._count(seq, len(path), min(each, left), roster) if path else 0
            if count > 0:
                drafts.append(Drafts(seq, place, count, path, seq.prompt_len + len(seq.tokens)))
                left -= count
            place += 1 + count
        return drafts

    def _path(self, seq: Sequence) -> list[int]:
        """The path of a row, if it reaches beyond the tokens in flight."""
        spare = seq.max_tokens - seq.launched - 1
        if spare < 1 or seq.feature_bits & _NOT_DRAFTED:
            return []
        self._followed.add(seq)
        in_flight = seq.launched - len(seq.tokens)
        want = in_flight + min(self._most, spare)
        path = self._drafter.path(seq, seq.group.request.prompt.token_ids, seq.tokens, want)
        assert len(path) <= want, "a drafter gives no more than it is asked for"
        return path if len(path) > in_flight - seq.drafted else []

    def _count(self, seq: Sequence, path: int, most: int, roster: Roster) -> int:
        """How many drafts a row gets: as its path, `max_tokens` and its pages allow."""
        kv, certain = seq.kv, seq.launched - seq.drafted - len(seq.tokens)
        count = min(most, path - certain, seq.max_tokens - seq.launched - 1)
        running = len(roster.decoding) + len(roster.prefilling)
        while kv.capacity < kv.length + 1 + count and roster.allocator.pool.available > running:
            if not roster.allocator.try_grow(seq):
                break
        return min(count, kv.capacity - kv.length - 1)

    def _end_finalized(self) -> None:
        ended = [seq for seq in self._followed if seq.finalized]
        for seq in ended:
            self._drafter.path(seq, seq.group.request.prompt.token_ids, seq.tokens, 0)  # its last tokens
            self._drafter.ended(seq)
        self._followed.difference_update(ended)
