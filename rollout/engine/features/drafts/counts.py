"""Totals of drafts since the start, and the metrics computed from them."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from rollout.engine.features.drafts.row_drafts import Drafts
from rollout.engine.schedule.plan import Plan
from rollout.metrics.definitions import DRAFT_AGES, DRAFTER_NAMES
from rollout.metrics.samples import percent


@dataclass(slots=True)
class DraftCounts:
    """Running totals. The totals by drafter and by age cover committed steps."""

    decode_rows: int = 0  # rows of decode steps
    drafted: int = 0  # tokens that verify steps tried
    accepted: int = 0  # drafts that equalled the token drawn
    saved_s: float = 0.0  # device time that verify steps saved against plain steps of as many tokens
    expected_saved_s: float = 0.0  # saved time that the costs predict
    #: (drafted, accepted) by the age of the draft's source, as in `DRAFT_AGES`.
    by_age: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)] * len(DRAFT_AGES))
    #: (drafted, accepted) by drafter.
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(DRAFTER_NAMES, (0, 0)))

    def committed(self, plan: Plan, drafts: Seq[Drafts], accepted: Seq[int]) -> None:
        """Count a step with these drafts, whose tokens are not taken yet; `accepted` as in `StepOutput`."""
        self.decode_rows += plan.rows if plan.kind == "decode" else 0
        for draft in drafts:
            right = accepted[draft.draw_index]
            if not draft.seq.void:  # void drafts are not counted
                self.accepted += right
            self.note(draft.drafter, draft.age, draft.length, right)

    def note(self, drafter: str, age: int | None, drafted: int, accepted: int) -> None:
        """Count the drafts of a row; `age` in weights versions, None for drafts from no weights."""
        before = self.by_drafter[drafter]
        self.by_drafter[drafter] = before[0] + drafted, before[1] + accepted
        if age is not None:
            which = sum(age >= least for least in DRAFT_AGES.values()) - 1
            before = self.by_age[which]
            self.by_age[which] = before[0] + drafted, before[1] + accepted

    def gauges(self) -> dict[str, float | None]:
        return {
            "speculation/drafted": self.drafted,
            "speculation/accepted": self.accepted,
            "speculation/saved_s": self.saved_s,
            "speculation/expected_saved_s": self.expected_saved_s,
            "speculation/accepted_pct": _share(self.accepted, self.drafted),
            **_accepted_by_drafter(self.by_drafter),
            **_accepted_by_age(self.by_age),
            "speculation/tokens_a_step": 1 + self.accepted / max(self.decode_rows, 1),
        }


def _share(accepted: int, drafted: int) -> float | None:
    """Percentage; None if nothing was drafted, since a 0 would mean that all drafts were wrong."""
    return percent(accepted, drafted) if drafted else None


def _accepted_by_drafter(drafts: Mapping[str, tuple[int, int]]) -> dict[str, float | None]:
    """Metrics from (drafted, accepted) by drafter."""
    return {f"speculation/accepted_pct/by_{name}": _share(part, whole) for name, (whole, part) in drafts.items()}


def _accepted_by_age(drafts: list[tuple[int, int]]) -> dict[str, float | None]:
    """Metrics from (drafted, accepted) by age."""
    names = (f"speculation/accepted_pct/age_{name}" for name in DRAFT_AGES)
    shares = {name: _share(accepted, drafted) for name, (drafted, accepted) in zip(names, drafts, strict=True)}
    older = [sum(column) for column in zip(*drafts[1:], strict=True)]
    return shares | {"speculation/accepted_older_pct": _share(older[1], older[0])}
