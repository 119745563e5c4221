"""The places of host memory for states of linear attention: who has which, and which prefixes end at a kept one."""

from __future__ import annotations

from rollout.engine.kv.host_pages import HostPageBooks
from rollout.engine.sequence.sequence_kv import Point

#: Points are cleaned when there are more than this plus twice the places.
_SLACK = 16


class HostStates(HostPageBooks):
    """Books as those of pages. A kept state has the key of its snapshot."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._points: dict[bytes, Point] = {}  # of kept states; some have given way since
        self._ends: dict[bytes, dict[bytes, int]] = {}  # by digest of full pages: key, tokens after these

    def note(self, point: Point) -> None:
        """A state after this prefix is kept."""
        if len(self._points) > 2 * self.total + _SLACK:
            points = [point for point in self._points.values() if self.has(point.key)]
            self._points, self._ends = {}, {}
            for known in points:
                self._put(known)
        self._put(point)

    def tokens_after(self, digest: bytes) -> list[int]:
        """At which numbers of tokens after these full pages prefixes with a kept state end."""
        return [after for key, after in self._ends.get(digest, {}).items() if self.has(key)]

    def _put(self, point: Point) -> None:
        self._points[point.key] = point
        self._ends.setdefault(point.digest, {})[point.key] = point.after
