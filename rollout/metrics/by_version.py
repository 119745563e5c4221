"""What happened while one version of the weights served: a row for each version, for plots over the trainer's steps.

A row is the difference between two readings of what the meter has counted since the start, so a step costs nothing
more for it. A version serves from when the swap that brought it is told of until the next one is; its first and last
steps may be a step off.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

log = logging.getLogger(__name__)
_KEPT = 256  # rows that nobody has taken


@dataclass(frozen=True, slots=True)
class Reading:
    """What was counted up to a moment; seconds, tokens, steps and completions since the start."""

    at_s: float
    busy_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    decode_steps: int = 0
    completions: int = 0
    completion_tokens: float = 0.0
    version_spans: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version's row; `metrics` are those of `VERSION_METRICS` that had a sample."""

    version: int
    metrics: dict[str, float]


class ByVersion:
    """The rows of the versions that have ended, and the begin of the one that serves."""

    def __init__(self, version: int, begin: Reading) -> None:
        self._version, self._begin, self._pause_s = version, begin, 0.0
        self._ended: deque[VersionRow] = deque(maxlen=_KEPT)
        self._dropped = 0  # since the last look

    def swapped(self, version: int, now: Reading, pause_s: float) -> None:
        """Another version serves from now on."""
        self._dropped += len(self._ended) == _KEPT
        self._ended.append(self._row(now))
        self._version, self._begin, self._pause_s = version, now, pause_s

    def take(self, now: Reading | None = None) -> tuple[VersionRow, ...]:
        """The rows since the last look, oldest first; with `now`, at the end, also that of the version that serves."""
        if self._dropped:
            log.warning("rows of %d weights versions were dropped: more than %d in a report", self._dropped, _KEPT)
            self._dropped = 0
        rows = (*self._ended, *([] if now is None else [self._row(now)]))
        self._ended.clear()
        return rows

    def _row(self, now: Reading) -> VersionRow:
        begin = self._begin
        wall_s, tokens = now.at_s - begin.at_s, now.tokens - begin.tokens
        steps, completions = now.decode_steps - begin.decode_steps, now.completions - begin.completions
        values: dict[str, float] = {
            "serving_s": wall_s,
            "tokens": tokens,
            "completions": completions,
            "swap_pause_ms": 1e3 * self._pause_s,
        }
        if wall_s > 0:
            values["tokens_per_s"] = tokens / wall_s
            values["active_pct"] = min(100.0, max(0.0, 100.0 * (now.busy_s - begin.busy_s) / wall_s))
        if steps:
            values["decode_ms"] = 1e3 * (now.decode_s - begin.decode_s) / steps
        if completions:
            values["completion_length"] = (now.completion_tokens - begin.completion_tokens) / completions
            values["version_span"] = (now.version_spans - begin.version_spans) / completions
        return VersionRow(self._version, {f"by_version/{name}": value for name, value in values.items()})
