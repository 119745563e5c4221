"""Which decode rows get drafts in the next step, and how many.

A row's path begins after its committed tokens. Its drafts begin later, where the row is once the steps in flight have
run: each of them draws one token at least, and more if drafts are accepted. So a path is longer than the drafts.

With `adapts` rows draft only where the step costs less than the tokens that are expected of it: by how often the
drafter was right for each row, and by the costs of steps. While no row drafts, only some plans ask the drafter.
"""

from __future__ import annotations

import numpy as np

from rollout.engine.schedule.completion import Counters
from rollout.engine.schedule.plan import Drafts, Plan
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.speculation.acceptance import Acceptance
from rollout.engine.speculation.drafter import Drafter
from rollout.engine.speculation.step_costs import StepCosts, worthwhile

#: Of so many plans one asks the drafter while drafts do not pay.
_ASKED_EVERY = 8


class Speculation:
    """Asks a drafter.

    Args:
        drafter: what guesses tokens.
        most: drafts of a row in a step.
        most_rows: drafts of all rows in a step.
        costs: of decode steps; corrected by the steps that run.
        adapts: drafts only where they pay, else always.
    """

    def __init__(self, drafter: Drafter, most: int, most_rows: int, costs: StepCosts, adapts: bool = False) -> None:
        self._drafter = drafter
        self._most = most
        self._most_rows = most_rows
        self._followed: dict[Sequence, Acceptance] = {}  # that the drafter knows
        self._costs = costs
        self._adapts = adapts
        self._all_rows = Acceptance()
        self._resting = 0  # plans before the drafter is asked again

    def drafts(self, seqs: list[Sequence], roster: Roster) -> list[Drafts]:
        """The drafts of a step of these rows, in their order; may give rows a page more for them."""
        self._end_finalized()
        if self._resting:
            self._resting -= 1
            return []
        paths = {seq: path for seq in seqs if (path := self._path(seq))}
        if not paths:
            self._resting = _ASKED_EVERY - 1 if self._adapts and not any(seq.drafted for seq in seqs) else 0
            return []
        wanted = self._wanted(paths, seqs)
        if not any(wanted.values()):
            self._resting = _ASKED_EVERY - 1
            return []
        left, place, drafts = self._most_rows, 0, []
        for seq in seqs:
            path = paths.get(seq, [])
            count = self._count(seq, len(path), min(wanted[seq], left), roster) if path else 0
            if count > 0:
                source = self._drafter.source(seq)
                age = None if source is None else max(roster.version - source, 0)
                drafts.append(Drafts(seq, place, count, path, seq.prompt_len + len(seq.tokens), age))
                left -= count
            place += 1 + count
        return drafts

    def ran(self, plan: Plan, tokens: int, seconds: float, counters: Counters) -> None:
        """A decode step was committed: it took this long on the device, and `tokens` of its tokens were kept."""
        rows, drafts = plan.rows, plan.draws - plan.rows
        context = float(sum(span.start + 1 for span in plan.spans))
        if drafts and tokens:
            plain_s = self._costs.plain_s(rows, context) * tokens / rows
            expected_s = float(self._costs.verify_s(rows, context, np.array([drafts]))[0])
            counters.saved_s += plain_s - seconds
            counters.expected_saved_s += plain_s - expected_s
        self._costs.ran(rows, context, drafts, seconds)

    def _wanted(self, paths: dict[Sequence, list[int]], seqs: list[Sequence]) -> dict[Sequence, int]:
        """The drafts that each row with a path should get, if its pages allow."""
        if not self._adapts:
            return dict.fromkeys(paths, max(1, min(self._most, self._most_rows // len(paths))))
        chances_M1 = np.array([self._followed[seq].chance for seq in paths])[:, None]
        ahead_K = np.arange(1, self._most + 1)
        drafts_M1 = np.array([len(path) - _certain(seq) for seq, path in paths.items()])[:, None]
        chances_MK = np.where(ahead_K <= drafts_M1, chances_M1**ahead_K, 0.0)
        context = float(sum(seq.kv.length + 1 for seq in seqs))
        counts = worthwhile(chances_MK, len(seqs), context, self._costs, self._most_rows)
        return dict(zip(paths, counts, strict=True))

    def _path(self, seq: Sequence) -> list[int]:
        """The path of a row, if it reaches beyond the tokens in flight."""
        spare = seq.max_tokens - seq.launched - 1
        if spare < 1 or not seq.may_draft:
            return []
        if seq not in self._followed:
            self._followed[seq] = Acceptance(self._all_rows)
        in_flight = seq.launched - len(seq.tokens)
        want = in_flight + min(self._most, spare)
        path = self._ask(seq, want)
        assert len(path) <= want, "a drafter gives no more than it is asked for"
        if self._adapts:
            certain = _certain(seq)
            self._followed[seq].follow(seq.tokens, len(seq.tokens) + certain, path[certain:])
        return path if len(path) > in_flight - seq.drafted else []

    def _count(self, seq: Sequence, path: int, most: int, roster: Roster) -> int:
        """How many drafts a row gets: as its path, `max_tokens` and its pages allow."""
        kv, certain = seq.kv, _certain(seq)
        count = min(most, path - certain, seq.max_tokens - seq.launched - 1)
        running = len(roster.decoding) + len(roster.prefilling)
        while kv.capacity < kv.length + 1 + count and roster.allocator.pool.available > running:
            if not roster.allocator.try_grow(seq):
                break
        return min(count, kv.capacity - kv.length - 1)

    def _ask(self, seq: Sequence, want: int) -> list[int]:
        runs = seq.drawn.versions
        version = runs[-1][0] if runs else 0
        return self._drafter.path(seq, seq.group.request.prompt.token_ids, seq.tokens, want, version)

    def _end_finalized(self) -> None:
        ended = [seq for seq in self._followed if seq.finalized]
        for seq in ended:
            self._ask(seq, 0)  # tells its last tokens
            self._drafter.ended(seq)
            del self._followed[seq]


def _certain(seq: Sequence) -> int:
    """Tokens in flight that come in any case."""
    return seq.launched - seq.drafted - len(seq.tokens)
