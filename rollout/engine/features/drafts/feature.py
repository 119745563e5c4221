"""Drafts on the host: plans verify steps, packs their sections, counts what was accepted.

    plan       `DraftPlanner` says which rows get drafts and what the drafter on the device does after the step. A step
               with drafts, or with rows whose position is not known, is planned here
    pack       the sections of drafts, and what the drafter on the device needs of the step
    commit     counts accepted drafts; takes the drafts of the device, which come with the tokens of their step

The part on the device is `verifier.DraftVerifier`. Sections:

    verified      int64 [M, 4] of rows with drafts: row, index of its own draw, number of drafts (their indices follow),
                  first position of its path; or `IN_ROW_STATE`: the device has made the drafts
    paths         int64 [M, W]: the tokens that are expected from there on; padded
    drafts        int64 [N, 4] of drafts: draft row, row, how far ahead (from 1), which of the `verified`
    pages         int32 [n, 3]: row, column of its page table, page; of all rows of a verify step
    bases         int64 [rows, 2]: row, and index of its own draw, of a step with drafts after which the device makes
                  the next ones
    next_tokens   int64 [rows]: of the spans of a prefill, its next token; 0 after the last; for the drafter on the
                  device
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from rollout.engine.features.drafts.counts import DraftCounts
from rollout.engine.features.drafts.drafter import NAME, DraftAfter
from rollout.engine.features.drafts.planner import DraftPlanner, DraftVersions
from rollout.engine.features.drafts.row_drafts import Drafts
from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.schedule.step_feature import AheadPlanner
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import RowNeeds, StepOutput, UploadStaging


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan(Plan):
    """A verify step, with what only this feature reads."""

    ahead: Seq[Drafts]  # all paths have one length
    after: DraftAfter
    pages: Seq[tuple[int, int, int]]  # (row, column of its page table, page)


class DraftsFeature(AheadPlanner):
    """Drafts of one engine.

    Args:
        planner: chooses the drafts.
        draft_rows: the rows of the row state for drafts.
        draft_names: tensors of the draft model in updates.
        draft_version: version of the weights that came with the draft model's.
        counts: totals since the start.
    """

    name = NAME

    def __init__(
        self,
        planner: DraftPlanner,
        draft_rows: range,
        draft_names: frozenset[str],
        draft_version: int,
        counts: DraftCounts,
    ) -> None:
        self.planner = planner
        self._draft_rows = draft_rows
        self._draft_names = draft_names
        self.draft_version = draft_version
        self.counts = counts

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan_decode(self, seqs: list[Sequence], version: int, allocator: PageAllocator, kept: int) -> Plan | None:
        """A verify step, if rows have drafts or a position that is not known, or if the device drafts after it."""

        def grow(seq: Sequence, drafts: int) -> None:
            while seq.kv.capacity < seq.kv.length + 1 + drafts and allocator.pool.available > kept:
                if not allocator.try_grow(seq):
                    break

        drafts, after = self.planner.choose(seqs, DraftVersions(version, self.draft_version), grow)
        if not drafts and after is DraftAfter.NOTHING and not any(seq.ahead_in_flight for seq in seqs):
            return None
        return self._verify_plan(seqs, drafts, after, version, allocator)

    def _verify_plan(
        self, seqs: list[Sequence], drafts: list[Drafts], after: DraftAfter, version: int, allocator: PageAllocator
    ) -> Plan:
        """A step of these decode rows, with `drafts` of some of them, in the order of `seqs`.

        A draft model writes KV at the positions of the drafts that it makes, so the plan includes their pages.
        """
        page_size, further = allocator.page_size, self.planner.most if after is DraftAfter.DRAFT else 0
        counts, draft_rows = {draft.seq: draft.length for draft in drafts}, iter(self._draft_rows)
        width = max((len(draft.path) for draft in drafts), default=0)
        drafts = [draft._replace(path=draft.path + [0] * (width - len(draft.path))) for draft in drafts]
        spans, rows, pages = [], [], []
        needs = longest = 0
        for seq in seqs:
            kv, count = seq.kv, 1 + counts.get(seq, 0)
            first, end = kv.length - seq.ahead_in_flight, kv.length + count
            spans.append(Span(seq, kv.length, count, count))
            rows += [seq.row, *(next(draft_rows) for _ in range(count - 1))]
            told = min(end + further, kv.capacity)
            pages += [(seq.row, i, kv.pages[i]) for i in range(first // page_size, (told - 1) // page_size + 1)]
            needs |= seq.need_bits
            longest = max(longest, end)
        saves, tokens = allocator.prefixes.take_saves(), len(rows)
        needed = RowNeeds(needs), longest, tokens, tokens
        return DraftPlan(spans, version, *needed, [], rows, saves, ahead=drafts, after=after, pages=pages)

    # --- upload -------------------------------------------------------------------------------------------------------

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Put pages and drafts of a verify step, and what the drafter on the device needs."""
        after = self._after(plan)
        if after is not DraftAfter.NOTHING:
            staging.facts[NAME] = [str(after)]
            if not plan.decodes:
                staging.put("next_tokens", np.fromiter(_next_tokens(plan), dtype=np.int64))
        if not isinstance(plan, DraftPlan):
            return
        staging.put("pages", np.array(plan.pages, dtype=np.int32))
        if plan.ahead:
            _put_drafts(plan.ahead, plan.token_rows, staging)
            if after is DraftAfter.DRAFT:
                indices = np.cumsum([0, *(span.draws for span in plan.spans[:-1])])
                bases = zip([span.seq.row for span in plan.spans], indices, strict=True)
                staging.put("bases", np.array(list(bases), dtype=np.int64))

    # --- launch and commit --------------------------------------------------------------------------------------------

    def launched(self, plan: Plan) -> None:
        """Drafts in flight count as accepted until their step is committed."""
        for draft in _drafts(plan):
            draft.seq.ahead_in_flight += draft.length
            self.counts.drafted += draft.length
        self.planner.launched(plan, self._after(plan))

    def commit(self, plan: Plan, output: StepOutput) -> None:
        self.counts.committed(plan, _drafts(plan), output.accepted)

    def committed(self, plan: Plan, output: StepOutput, tokens: int, seconds: float) -> None:
        """Take the drafts that the device made after the step, and correct the costs of steps."""
        if NAME in output.of_features:
            self.planner.arrived(plan, output.of(NAME, list))
        if plan.kind == "decode":
            self.planner.ran(plan, self._after(plan), tokens, seconds, self.counts)

    def _after(self, plan: Plan) -> DraftAfter:
        """The drafter's work after a step; after a step of prompts, what the planner says now."""
        if isinstance(plan, DraftPlan):
            return plan.after
        return self.planner.after_prompts if plan.kind == "prefill" else DraftAfter.NOTHING

    def gauges(self) -> Mapping[str, float | None]:
        return self.counts.gauges()

    def weights_changed(self, version: int, names: Collection[str]) -> None:
        """Note the version of the draft model."""
        if not self._draft_names.isdisjoint(names):
            self.draft_version = version


def _drafts(plan: Plan) -> Seq[Drafts]:
    return plan.ahead if isinstance(plan, DraftPlan) else ()


def _next_tokens(plan: Plan) -> Iterator[int]:
    """The token of each prompt after its input of this step; 0 if there is none."""
    for seq, start, tokens_in, _, _ in plan.spans:
        known, end = seq.kv.prefill_tokens, start + tokens_in
        yield int(known[end]) if end < len(known) else 0


def _put_drafts(drafts: Seq[Drafts], token_rows: list[int], staging: UploadStaging) -> None:
    paths_MW = np.zeros((len(drafts), max(len(drafts[0].path), 1)), dtype=np.int64)
    verified, rows = [], []
    for which, (row, index, count, path, begin, *_) in enumerate(drafts):
        verified.append((row.seq.row, index, count, begin))
        rows += [(token_rows[index + nth], row.seq.row, nth, which) for nth in range(1, count + 1)]
        paths_MW[which, : len(path)] = path
    staging.put("verified", np.array(verified, dtype=np.int64))
    staging.put("paths", paths_MW)
    staging.put("drafts", np.array(rows, dtype=np.int64))
