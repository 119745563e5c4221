"""The places of host memory for states of linear attention, and the prefixes that end at a kept state."""

from __future__ import annotations

from rollout.engine.kv.host_pages import HostPageBooks
from rollout.engine.sequence.sequence_kv import PrefixEnd

#: Points are cleaned when there are more than this plus twice the places.
_SLACK = 16


class HostStates(HostPageBooks):
    """The same books as for pages. A kept state has the key of its snapshot."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._points: dict[bytes, PrefixEnd] = {}  # points of kept states, some of them evicted since
        self._ends: dict[bytes, dict[bytes, int]] = {}  # digest of the full pages -> {key: tokens after them}

    def note(self, point: PrefixEnd) -> None:
        """Note that a state after this prefix is kept."""
        if len(self._points) > 2 * self.total + _SLACK:
            points = [point for point in self._points.values() if self.has(point.key)]
            self._points, self._ends = {}, {}
            for known in points:
                self._put(known)
        self._put(point)

    def tokens_after(self, digest: bytes) -> list[int]:
        """Numbers of tokens after these full pages at which prefixes with a kept state end."""
        return [after for key, after in self._ends.get(digest, {}).items() if self.has(key)]

    def _put(self, point: PrefixEnd) -> None:
        self._points[point.key] = point
        self._ends.setdefault(point.digest, {})[point.key] = point.after
