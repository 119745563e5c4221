"""What other threads may see of an engine at work: the sequences that hold rows, and the last steps.

The loop is not asked and does not wait. Lists and deques are copied in one go, and what is read of a sequence (lengths,
versions) may be a step newer than the sequence next to it.
"""

from __future__ import annotations

from typing import Any

from rollout.engine.loop import Engine
from rollout.engine.messages import SequenceStatus
from rollout.engine.schedule.sequence import Sequence, State
from rollout.metrics.recording import Recording

_STATES = {State.PREFILL: "prefill", State.DECODE: "decode"}


class EngineViews:
    """Reads an engine from the service thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sequences(self, limit: int) -> list[SequenceStatus]:
        """The `limit` oldest sequences that hold a row, oldest first."""
        scheduler = self._engine.scheduler
        running = {id(seq): seq for seq in (*scheduler.prefilling, *scheduler.decoding, *scheduler.leaving)}
        oldest = sorted(running.values(), key=lambda seq: seq.arrival)[:limit]
        now_s = scheduler.clock()
        return [_describe(seq, now_s) for seq in oldest]

    def recording(self, steps: int) -> dict[str, Any]:
        """The last steps and the swaps among them, as fields of a `trace` reply."""
        meter = self._engine.meter
        return Recording.of(meter.recent_steps(steps), meter.recent_swaps()).to_fields()


def _describe(seq: Sequence, now_s: float) -> SequenceStatus:
    versions = seq.versions
    return SequenceStatus(
        key=seq.group.key,
        index=seq.index,
        state=_STATES.get(seq.state, "leaving"),  # type: ignore[arg-type]
        prompt_tokens=seq.prompt_len,
        tokens=len(seq.tokens),
        max_tokens=seq.max_tokens,
        pages=len(seq.pages),
        age_s=now_s - seq.group.arrived_s,
        version=versions[-1][0] if versions else None,
        priority=seq.priority,
    )
