"""Which decode rows get drafts in the next step, and how many.

Drafts come from a drafter on the host, or from what guesses on the device: a draft model, or n-grams of the row.

A drafter gives a path. It begins after the committed tokens of a row. The row's drafts begin later, where the row is
once the steps in flight have run: each of them draws one token at least, and more if drafts are accepted. So a path is
longer than the drafts.

The device guesses after a step what the next step of each row may verify. The plan of the first step says that it
guesses, and sees to pages for the guesses; the plan of the second says how many of them become drafts. The host knows
neither the guesses nor where the row is. The guesses arrive with the tokens of their step: masks of a
constraint follow them, and the tokens that come next tell how good they were.

With `adapts` rows draft only where the step costs less than the tokens that are expected of it: by how often the
drafter was right for each row, and by the costs of steps. While no row drafts, only some plans ask the drafter, and the
device guesses now and then. All rows are measured so, those without drafts as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout.engine.schedule.completion import Counters
from rollout.engine.schedule.plan import Drafts, Plan
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.speculation.acceptance import Acceptance
from rollout.engine.speculation.drafter import Drafter, Guesser
from rollout.engine.speculation.step_costs import StepCosts, worthwhile

#: Of so many plans one asks the drafter while drafts do not pay; and while nobody knows what plain steps cost.
_ASKED_EVERY, _ASKED_SOON = 8, 4
#: Part of the device's time that guesses take while they do not pay.
_UNPAID_SHARE = 0.005
_NO_POSITION = -1  # for a row without a path


class Choice(NamedTuple):
    """The additions of a step to plain decode rows."""

    drafts: list[Drafts]
    guesses: int  # as in `Plan`


class _Offer(NamedTuple):
    """The drafts that one row could have."""

    most: int
    acceptance: Acceptance
    path: list[int] | None  # None: guesses of the device


class Speculation:
    """Asks a drafter, and has the device guess.

    Args:
        drafter: what guesses tokens on the host, if anything does.
        most: drafts of a row in a step.
        most_rows: drafts of all rows in a step.
        costs: of decode steps; corrected by the steps that run.
        adapts: drafts only where they pay, else always.
        guesser: what guesses on the device, by its name as a drafter; None if nothing does.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        most: int,
        most_rows: int,
        costs: StepCosts,
        adapts: bool = False,
        guesser: Guesser | None = None,
    ) -> None:
        self._drafter = drafter
        self._most = most
        self._most_rows = most_rows
        self._followed: dict[Sequence, Acceptance] = {}  # that the drafter knows
        self._guessed: dict[Sequence, Acceptance] = {}  # that the device has guessed for
        self._costs = costs
        self._adapts = adapts
        self._guesser = guesser
        self._reads = guesser == "heads"  # every step, or its KV has holes
        self._all_rows, self._all_guesses = Acceptance(), Acceptance()
        self._resting = 0  # plans before the drafter is asked again
        self._unpaid = 0  # plans since guesses have paid
        self._guessed_at = 0  # how many of these there were when the device last guessed
        self._idle = -1  # what it does while its guesses do not pay

    @property
    def prompt_guesses(self) -> int:
        """What is guessed after a step of prompts, as `Plan.guesses`; a draft model reads them all."""
        if self._guesser is None or (self._unpaid and not self._reads):
            return -1
        return 0 if self._unpaid else self._most

    def choose(self, seqs: list[Sequence], roster: Roster) -> Choice:
        """The drafts of a step of these rows, in their order; may give rows pages more for them."""
        self._end_finalized()
        offers = self._offers(seqs)
        wanted = self._wanted(offers, seqs) if offers else {}
        drafts = self._drafts(seqs, offers, wanted, roster) if any(wanted.values()) else []
        guesses = self._guesses(seqs)
        if guesses > 0 and self._reads:
            self._grow(seqs, drafts, guesses, roster)
        return Choice(drafts, guesses)

    def launched(self, plan: Plan) -> None:
        """A plan is in flight: its rows have the guesses that follow it, and no older ones."""
        if self._guesser is None:
            return
        guesses = max(plan.guesses, 0)
        for seq, _, _, draws, _ in plan.spans:
            seq.guessed = guesses if draws else 0

    def guessed(self, plan: Plan, guesses: list[list[int]]) -> None:
        """The guesses after a step have arrived, in the order of its rows that draw; its tokens are committed."""
        drawing = (span.seq for span in plan.spans if span.draws)
        for seq, tokens in zip(drawing, guesses, strict=False):
            seq.known_guesses = tokens
            if self._adapts and seq.may_draft and not seq.finalized:
                self._acceptance(seq).follow(seq.tokens, len(seq.tokens), tokens)

    def ran(self, plan: Plan, tokens: int, seconds: float, counters: Counters) -> None:
        """A decode step was committed: it took this long on the device, and `tokens` of its tokens were kept."""
        rows, drafts = plan.rows, plan.draws - plan.rows
        context = float(sum(span.start + 1 for span in plan.spans))
        guess_s = self._costs.guess_s(rows) if plan.guesses > 0 else 0.0
        if tokens and (drafts or plan.guesses > 0):
            plain_s = self._costs.plain_s(rows, context) * (tokens / rows if drafts else 1)
            step_s = float(self._costs.verify_s(rows, context, np.array([drafts]))[0]) if drafts else plain_s
            expected_s = step_s + guess_s
            counters.saved_s += plain_s - seconds
            counters.expected_saved_s += plain_s - expected_s
        self._costs.ran(rows, context, drafts, seconds - guess_s)

    # --- what rows could have -----------------------------------------------------------------------------------------

    def _offers(self, seqs: list[Sequence]) -> dict[Sequence, _Offer]:
        """The better offer of each row that has any."""
        offers = self._guess_offers(seqs) if self._guesser is not None else {}
        if self._drafter is None:
            return offers
        if self._resting:
            self._resting -= 1
            return offers
        paths = {seq: path for seq in seqs if (path := self._path(seq))}
        if not paths:
            self._resting = _ASKED_EVERY - 1 if self._adapts and not any(seq.drafted for seq in seqs) else 0
        for seq, path in paths.items():
            offer = _Offer(len(path) - _certain(seq), self._followed[seq], path)
            if seq not in offers or offers[seq].acceptance.chance <= offer.acceptance.chance:
                offers[seq] = offer
        return offers

    def _guess_offers(self, seqs: list[Sequence]) -> dict[Sequence, _Offer]:
        guessed = [seq for seq in seqs if seq.guessed and _may_guess(seq)]
        return {seq: _Offer(seq.guessed, self._acceptance(seq), None) for seq in guessed}

    def _acceptance(self, seq: Sequence) -> Acceptance:
        """Of guesses for a row."""
        if seq not in self._guessed:
            self._guessed[seq] = Acceptance(self._all_guesses)
        return self._guessed[seq]

    def _wanted(self, offers: dict[Sequence, _Offer], seqs: list[Sequence]) -> dict[Sequence, int]:
        """The drafts that each row with an offer should get, if its pages allow."""
        if not self._adapts:
            return dict.fromkeys(offers, max(1, min(self._most, self._most_rows // len(offers))))
        chances = [(offer.acceptance.chance, offer.most) for offer in offers.values()]
        guess_s = self._costs.guess_s(len(seqs)) if any(offer.path is None for offer in offers.values()) else 0.0
        counts = self._paying(chances, seqs, guess_s)
        if not any(counts) and any(offer.path is not None for offer in offers.values()):
            self._resting = (_ASKED_EVERY if self._costs.knows_plain else _ASKED_SOON) - 1
        return dict(zip(offers, counts, strict=True))

    def _paying(self, chances: list[tuple[float, int]], seqs: list[Sequence], guess_s: float) -> list[int]:
        """The drafts that pay for each row whose (chance, most drafts) is given, in a step of `seqs`."""
        ahead_K = np.arange(1, self._most + 1)
        chances_M1 = np.array([chance for chance, _ in chances])[:, None]
        drafts_M1 = np.array([most for _, most in chances])[:, None]
        chances_MK = np.where(ahead_K <= drafts_M1, chances_M1**ahead_K, 0.0)
        return worthwhile(chances_MK, len(seqs), _contexts(seqs), self._costs, self._most_rows, guess_s)

    # --- what they get ------------------------------------------------------------------------------------------------

    def _drafts(
        self, seqs: list[Sequence], offers: dict[Sequence, _Offer], wanted: dict[Sequence, int], roster: Roster
    ) -> list[Drafts]:
        left, place, drafts = self._most_rows, 0, []
        for seq in seqs:
            count, offer = 0, offers.get(seq)
            if offer is not None:
                count = self._count(seq, offer.most, min(wanted.get(seq, 0), left), roster)
            if offer is not None and count > 0:
                drafts.append(self._draft(seq, place, count, offer, roster))
                left -= count
            place += 1 + max(count, 0)
        return drafts

    def _draft(self, seq: Sequence, place: int, count: int, offer: _Offer, roster: Roster) -> Drafts:
        if offer.path is None:
            assert self._guesser is not None
            age = max(roster.version - roster.draft_version, 0) if self._guesser == "heads" else None
            return Drafts(seq, place, count, [], _NO_POSITION, age, self._guesser)
        assert self._drafter is not None
        source = self._drafter.source(seq)
        since = None if source is None else max(roster.version - source, 0)
        return Drafts(seq, place, count, offer.path, seq.prompt_len + len(seq.tokens), since)

    def _count(self, seq: Sequence, offered: int, most: int, roster: Roster) -> int:
        """How many drafts a row gets: as its offer, `max_tokens` and its pages allow."""
        count = min(most, offered, seq.max_tokens - seq.launched - 1)
        _grow(seq, count, roster)
        return min(count, seq.kv.capacity - seq.kv.length - 1)

    def _guesses(self, seqs: list[Sequence]) -> int:
        """What is guessed after a step of these rows, as `Plan.guesses`."""
        if self._guesser is None or not any(map(_may_guess, seqs)):
            return 0 if self._reads else -1
        if not self._adapts:
            return self._most
        if self._unpaid and (self._unpaid + 1) % _ASKED_EVERY:
            self._unpaid += 1
            return self._idle
        rows, guess_s = [seq for seq in seqs if _may_guess(seq)], self._costs.guess_s(len(seqs))
        if self._unpaid:
            for seq, acceptance in self._guessed.items():
                acceptance.settle(seq.tokens)
        chances = [(self._guessed.get(seq, self._all_guesses).chance, self._most) for seq in rows]
        if any(self._paying(chances, seqs, guess_s)):
            self._unpaid = self._guessed_at = 0
            return self._most
        self._unpaid += 1
        # Guesses that would pay in a step of one row will pay when few rows are left: until then its KV is kept whole.
        alone = max(range(len(rows)), key=lambda i: chances[i][0])
        alone_pays = any(self._paying([chances[alone]], [rows[alone]], self._costs.guess_s(1)))
        self._idle = 0 if self._reads and alone_pays else -1
        plain_s = self._costs.plain_s(len(seqs), _contexts(seqs))
        if guess_s <= (self._unpaid - self._guessed_at) * _UNPAID_SHARE * plain_s:
            self._guessed_at = self._unpaid
            return self._most
        return self._idle

    def _grow(self, seqs: list[Sequence], drafts: list[Drafts], guesses: int, roster: Roster) -> None:
        """Give rows the pages of their guesses, which the draft model writes to."""
        counts = {draft.seq: draft.length for draft in drafts}
        for seq in seqs:
            spare = seq.max_tokens - seq.launched - 1
            _grow(seq, min(counts.get(seq, 0) + guesses, spare), roster)

    # --- the drafter --------------------------------------------------------------------------------------------------

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

    def _ask(self, seq: Sequence, want: int) -> list[int]:
        assert self._drafter is not None
        runs = seq.drawn.versions
        version = runs[-1][0] if runs else 0
        return self._drafter.path(seq, seq.group.request.prompt.token_ids, seq.tokens, want, version)

    def _end_finalized(self) -> None:
        for seq in [seq for seq in self._followed if seq.finalized]:
            assert self._drafter is not None
            self._ask(seq, 0)  # tells its last tokens
            self._drafter.ended(seq)
            self._followed.pop(seq).settle(seq.tokens, ended=True)
        for seq in [seq for seq in self._guessed if seq.finalized]:
            self._guessed.pop(seq).settle(seq.tokens, ended=True)


def _contexts(seqs: list[Sequence]) -> float:
    """What attention reads for a step of these rows, tokens."""
    return float(sum(seq.kv.length + 1 for seq in seqs))


def _certain(seq: Sequence) -> int:
    """Tokens in flight that come in any case."""
    return seq.launched - seq.drafted - len(seq.tokens)


def _may_guess(seq: Sequence) -> bool:
    """Whether a row may have guesses as drafts."""
    return seq.may_draft and seq.max_tokens - seq.launched > 1


def _grow(seq: Sequence, drafts: int, roster: Roster) -> None:
    """Give a row pages for this number of drafts, while one page stays free for each running row."""
    running = len(roster.decoding) + len(roster.prefilling)
    while seq.kv.capacity < seq.kv.length + 1 + drafts and roster.allocator.pool.available > running:
        if not roster.allocator.try_grow(seq):
            break
