"""Chooses the decode rows that get drafts in the next step, and the number of drafts.

Drafts come from a drafter on the host or on the device (`drafter`).

The drafter on the host gives a path, which begins after the committed tokens of a row. The row's drafts begin later: at
the position of the row once the steps in flight have run. Each of these steps draws one token or, if drafts are
accepted, more. So a path is longer than the drafts.

The drafter on the device runs after a step, and makes the drafts that the next step of each row may verify. The plan of
the first step says that the drafter runs, and has pages for its drafts; the plan of the next step says how many of the
drafts are verified. At that time the host knows neither the drafts nor the position of the row. The drafts arrive with
the tokens of their step: constraint masks are made along them, and the tokens drawn next show how good they were.

With `adapts` rows draft only where the expected tokens are worth the costs of the step: by how often the drafter was
right for each row, and by the costs of steps. While no row drafts, the drafter on the host is asked for some plans
only, and the drafter on the device runs now and then. So all rows are measured, also those without drafts.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rollout.config import EngineConstants
from rollout.engine.features.drafts.counts import DraftCounts
from rollout.engine.features.drafts.drafter import NO_HOST_DRAFTER, DeviceDrafterName, DraftAfter, HostDrafter
from rollout.engine.features.drafts.row_drafts import IN_ROW_STATE, Acceptance, Drafts, RowDrafts
from rollout.engine.features.drafts.step_costs import StepCosts, worthwhile
from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.sequence import Sequence

#: While drafts do not pay, the drafter is asked once in `_ASKED_EVERY` plans; once in `_ASKED_SOON` while the cost of
#: a plain step is unknown.
_ASKED_EVERY, _ASKED_SOON = 8, 4

#: Gives a row pages for a number of tokens after its last token, as long as pages are free.
Grow = Callable[[Sequence, int], None]


class DraftChoice(NamedTuple):
    """The additions of a step to plain decode rows."""

    drafts: list[Drafts]
    after: DraftAfter


class DraftVersions(NamedTuple):
    """The versions of the weights in use."""

    weights: int
    draft_model: int  # version of the weights that came with the draft model's


class _Offer(NamedTuple):
    """The drafts that one row could have."""

    row: RowDrafts
    most: int
    path: list[int]  # empty for drafts of the device

    @property
    def acceptance(self) -> Acceptance:
        """The shares of their drafts that were right."""
        return self.row.of_host if self.path else self.row.of_device

    @property
    def on_device(self) -> bool:
        return not self.path


class UnpaidPolicy:
    """The work of the drafter on the device while its drafts do not pay: it drafts now and then, to be measured.

    It drafts in `share` of the device's time.
    """

    def __init__(self, share: float) -> None:
        self.plans = 0  # since its drafts have paid
        self._share = share
        self._drafted_at = 0  # `plans` when it last drafted
        self._idle = DraftAfter.NOTHING

    def between(self) -> DraftAfter | None:
        """The drafter's work after a plan between two decisions; None if this plan has one."""
        if not self.plans or (self.plans + 1) % _ASKED_EVERY == 0:
            return None
        self.plans += 1
        return self._idle

    def paid(self) -> None:
        """The decision: drafts pay."""
        self.plans = self._drafted_at = 0

    def decide(self, idle: DraftAfter, draft_s: float, plain_s: float) -> DraftAfter:
        """The decision: drafts do not pay. Return the drafter's work; `idle` is its work where it does not draft.

        Its drafts take `draft_s`, a plain step takes `plain_s`.
        """
        self.plans += 1
        self._idle = idle
        if draft_s > (self.plans - self._drafted_at) * self._share * plain_s:
            return idle
        self._drafted_at = self.plans
        return DraftAfter.DRAFT


class DraftPlanner:
    """Asks the drafter on the host, and says when the one on the device runs.

    Args:
        drafter: drafts on the host.
        most: drafts of a row in a step.
        most_rows: drafts of all rows in a step.
        costs: costs of decode steps; corrected by the steps that run.
        adapts: drafts only where they pay, else always.
        on_device: the drafter on the device.
        unpaid_share: part of the device's time that its drafter takes while its drafts do not pay.
    """

    def __init__(
        self,
        drafter: HostDrafter,
        most: int,
        most_rows: int,
        costs: StepCosts,
        adapts: bool = False,
        on_device: DeviceDrafterName = "none",
        unpaid_share: float = EngineConstants().unpaid_share,
    ) -> None:
        self._drafter = drafter
        self.most = most  # most drafts for a row in a step
        self._most_rows = most_rows
        self._rows: dict[Sequence, RowDrafts] = {}
        self._costs = costs
        self._adapts = adapts
        self._on_device = on_device
        self._makes = on_device != "none"
        self._reads = on_device == "heads"  # the drafter reads every step, or its KV has holes
        self._all_rows, self._all_device_rows = Acceptance(), Acceptance()
        self._resting = 0  # plans before the drafter is asked again
        self._unpaid = UnpaidPolicy(unpaid_share)

    @property
    def after_prompts(self) -> DraftAfter:
        """The drafter's work after a step of prompts; a draft model reads all of them."""
        if not self._makes or (self._unpaid.plans and not self._reads):
            return DraftAfter.NOTHING
        return DraftAfter.READ if self._unpaid.plans else DraftAfter.DRAFT

    def choose(self, seqs: list[Sequence], versions: DraftVersions, grow: Grow) -> DraftChoice:
        """The drafts of a step of these rows, in their order; may give rows pages more for them."""
        self._end_finalized()
        offers = self._offers(seqs)
        wanted = self._wanted(offers, seqs) if offers else {}
        drafts = self._drafts(seqs, offers, wanted, versions, grow) if any(wanted.values()) else []
        after = self._after(seqs)
        if after is DraftAfter.DRAFT and self._reads:
            self._grow(seqs, drafts, grow)
        return DraftChoice(drafts, after)

    def launched(self, plan: Plan, after: DraftAfter) -> None:
        """Note a launched plan: its rows now have only the drafts that the device makes next."""
        if not self._makes:
            return
        made = self.most if after is DraftAfter.DRAFT else 0
        for seq, _, _, draws, _ in plan.spans:
            self._row(seq).next = made if draws else 0

    def arrived(self, plan: Plan, drafts: list[list[int]]) -> None:
        """The drafts of the device after a step, in the order of its rows that draw; its tokens are committed."""
        drawing = (span.seq for span in plan.spans if span.draws)
        for seq, tokens in zip(drawing, drafts, strict=False):
            if (row := self._rows.get(seq)) is not None:  # the row of a sequence that has ended is forgotten
                row.known = tokens
                if self._adapts and not (row.stopped or seq.finalized):
                    row.of_device.follow(seq.tokens, len(seq.tokens), tokens)

    def ran(self, plan: Plan, after: DraftAfter, tokens: int, seconds: float, counts: DraftCounts) -> None:
        """A decode step was committed: it took this long on the device, and `tokens` of its tokens were kept."""
        rows, drafts = plan.rows, plan.draws - plan.rows
        context = float(sum(span.start + 1 for span in plan.spans))
        makes = after is DraftAfter.DRAFT
        draft_s = self._costs.draft_s(rows) if makes else 0.0
        if tokens and (drafts or makes):
            plain_s = self._costs.plain_s(rows, context) * (tokens / rows if drafts else 1)
            step_s = float(self._costs.verify_s(rows, context, np.array([drafts]))[0]) if drafts else plain_s
            expected_s = step_s + draft_s
            counts.saved_s += plain_s - seconds
            counts.expected_saved_s += plain_s - expected_s
        self._costs.ran(rows, context, drafts, seconds - draft_s)

    # --- what rows could have -----------------------------------------------------------------------------------------

    def _offers(self, seqs: list[Sequence]) -> dict[Sequence, _Offer]:
        """The better offer of each row that has any."""
        offers = self._device_offers(seqs) if self._makes else {}
        if self._drafter is NO_HOST_DRAFTER:
            return offers
        if self._resting:
            self._resting -= 1
            return offers
        paths = {seq: path for seq in seqs if (path := self._path(self._row(seq)))}
        if not paths:
            self._resting = _ASKED_EVERY - 1 if self._adapts and not any(seq.ahead_in_flight for seq in seqs) else 0
        for seq, path in paths.items():
            row = self._rows[seq]
            offer = _Offer(row, len(path) - row.certain, path)
            if seq not in offers or offers[seq].acceptance.chance <= offer.acceptance.chance:
                offers[seq] = offer
        return offers

    def _device_offers(self, seqs: list[Sequence]) -> dict[Sequence, _Offer]:
        rows = [row for seq in seqs if (row := self._row(seq)).next and row.may_draft]
        return {row.seq: _Offer(row, row.next, []) for row in rows}

    def _row(self, seq: Sequence) -> RowDrafts:
        if (row := self._rows.get(seq)) is None:
            row = self._rows[seq] = RowDrafts(seq, Acceptance(self._all_rows), Acceptance(self._all_device_rows))
        return row

    def _wanted(self, offers: dict[Sequence, _Offer], seqs: list[Sequence]) -> dict[Sequence, int]:
        """The drafts that each row with an offer should get, if its pages allow."""
        if not self._adapts:
            return dict.fromkeys(offers, max(1, min(self.most, self._most_rows // len(offers))))
        chances = [(offer.acceptance.chance, offer.most) for offer in offers.values()]
        draft_s = self._costs.draft_s(len(seqs)) if any(offer.on_device for offer in offers.values()) else 0.0
        counts = self._paying(chances, seqs, draft_s)
        if not any(counts) and not all(offer.on_device for offer in offers.values()):
            self._resting = (_ASKED_EVERY if self._costs.knows_plain else _ASKED_SOON) - 1
        return dict(zip(offers, counts, strict=True))

    def _paying(self, chances: list[tuple[float, int]], seqs: list[Sequence], draft_s: float) -> list[int]:
        """The drafts that pay for each row whose (chance, most drafts) is given, in a step of `seqs`."""
        nth_K = np.arange(1, self.most + 1)
        chances_M1 = np.array([chance for chance, _ in chances])[:, None]
        drafts_M1 = np.array([most for _, most in chances])[:, None]
        chances_MK = np.where(nth_K <= drafts_M1, chances_M1**nth_K, 0.0)
        return worthwhile(chances_MK, len(seqs), _contexts(seqs), self._costs, self._most_rows, draft_s)

    # --- what they get ------------------------------------------------------------------------------------------------

    def _drafts(
        self,
        seqs: list[Sequence],
        offers: dict[Sequence, _Offer],
        wanted: dict[Sequence, int],
        versions: DraftVersions,
        grow: Grow,
    ) -> list[Drafts]:
        left, draw_index, drafts = self._most_rows, 0, []
        for seq in seqs:
            if (offer := offers.get(seq)) is not None:
                count = self._count(offer, min(wanted.get(seq, 0), left), grow)
                if count > 0:
                    drafts.append(self._draft(offer, draw_index, count, versions))
                    left, draw_index = left - count, draw_index + count
            draw_index += 1
        return drafts

    def _draft(self, offer: _Offer, draw_index: int, count: int, versions: DraftVersions) -> Drafts:
        row, seq = offer.row, offer.row.seq
        if offer.on_device:
            age = max(versions.weights - versions.draft_model, 0) if self._reads else None
            return Drafts(row, draw_index, count, [], IN_ROW_STATE, age, self._on_device)
        source = self._drafter.source(seq)
        since = None if source is None else max(versions.weights - source, 0)
        return Drafts(row, draw_index, count, offer.path, seq.prompt_len + len(seq.tokens), since)

    def _count(self, offer: _Offer, most: int, grow: Grow) -> int:
        """The number of drafts that a row gets, limited by its offer, `max_tokens` and its pages."""
        seq, count = offer.row.seq, min(most, offer.most, offer.row.spare)
        grow(seq, count)
        return min(count, seq.kv.capacity - seq.kv.length - 1)

    def _after(self, seqs: list[Sequence]) -> DraftAfter:
        """The drafter's work after a step of these rows."""
        rows = [row for seq in seqs if (row := self._row(seq)).may_draft] if self._makes else []
        if not rows:
            return DraftAfter.READ if self._reads else DraftAfter.NOTHING
        if not self._adapts:
            return DraftAfter.DRAFT
        if (between := self._unpaid.between()) is not None:
            return between
        draft_s = self._costs.draft_s(len(seqs))
        if self._unpaid.plans:
            for row in self._rows.values():
                row.of_device.settle(row.seq.tokens)
        chances = [(row.of_device.chance, self.most) for row in rows]
        if any(self._paying(chances, seqs, draft_s)):
            self._unpaid.paid()
            return DraftAfter.DRAFT
        # If drafts would pay for a single row, they will pay once few rows are left: until then the draft model's KV is
        # kept complete.
        alone = max(range(len(rows)), key=lambda i: chances[i][0])
        alone_pays = any(self._paying([chances[alone]], [rows[alone].seq], self._costs.draft_s(1)))
        idle = DraftAfter.READ if self._reads and alone_pays else DraftAfter.NOTHING
        return self._unpaid.decide(idle, draft_s, self._costs.plain_s(len(seqs), _contexts(seqs)))

    def _grow(self, seqs: list[Sequence], drafts: list[Drafts], grow: Grow) -> None:
        """Give rows the pages of their next drafts, which the draft model writes to."""
        counts = {draft.seq: draft.length for draft in drafts}
        for seq in seqs:
            grow(seq, min(counts.get(seq, 0) + self.most, self._row(seq).spare))

    # --- the drafter on the host --------------------------------------------------------------------------------------

    def _path(self, row: RowDrafts) -> list[int]:
        """The path of a row, if it reaches beyond the tokens in flight."""
        if not row.may_draft:
            return []
        row.followed = True
        seq, in_flight = row.seq, row.seq.launched - len(row.seq.tokens)
        want = in_flight + min(self.most, row.spare)
        path = self._ask(seq, want)
        assert len(path) <= want, "a drafter gives no more than it is asked for"
        if self._adapts:
            row.of_host.follow(seq.tokens, len(seq.tokens) + row.certain, path[row.certain :])
        return path if len(path) > row.certain else []

    def _ask(self, seq: Sequence, want: int) -> list[int]:
        runs = seq.drawn.versions
        version = runs[-1][0] if runs else 0
        return self._drafter.path(seq, seq.group.request.prompt.token_ids, seq.tokens, want, version)

    def _end_finalized(self) -> None:
        for seq in [seq for seq in self._rows if seq.finalized]:
            row = self._rows.pop(seq)
            row.of_device.settle(seq.tokens, ended=True)
            if row.followed:
                self._ask(seq, 0)  # reports its last tokens to the drafter
                self._drafter.ended(seq)
                row.of_host.settle(seq.tokens, ended=True)


def _contexts(seqs: list[Sequence]) -> float:
    """Tokens that attention reads for a step of these rows."""
    return float(sum(seq.kv.length + 1 for seq in seqs))
