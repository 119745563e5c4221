"""Busy time and tokens of the last ten seconds, in constant memory."""

from __future__ import annotations


class BusyWindow:
    """A fixed ring of time buckets.

    Spans come in the order of their ends, as one stream runs them. Where two overlap, the overlap counts once. Bucket
    `i` stands for `[i * BUCKET_S, (i + 1) * BUCKET_S)` of the clock; it is cleared when a later bucket takes its place.
    """

    SPAN_S = 10.0
    BUCKET_S = 0.1
    _KEPT = round(SPAN_S / BUCKET_S)
    _RING = _KEPT + 28  # a report may come a little after the newest interval, or before it

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._busy_until = start_s
        self._busy_s = [0.0] * self._RING
        self._tokens = [0] * self._RING
        self._index = [-1] * self._RING
        #: Busy seconds since the start.
        self.total_busy_s = 0.0

    def add(self, start_s: float, end_s: float, tokens: int) -> None:
        """Count one busy interval; its tokens count at its end."""
        start_s = max(start_s, self._busy_until)
        if end_s > start_s:
            self.total_busy_s += end_s - start_s
            self._busy_until = end_s
            first, last = int(max(start_s, end_s - self.SPAN_S) / self.BUCKET_S), int(end_s / self.BUCKET_S)
            if first == last:  # nearly always true, and several times faster
                place = self._place(last)
                self._busy_s[place] += end_s - start_s
                self._tokens[place] += tokens
                return
            for index in range(first, last + 1):
                low, high = index * self.BUCKET_S, (index + 1) * self.BUCKET_S
                self._busy_s[self._place(index)] += max(0.0, min(end_s, high) - max(start_s, low))
        self._tokens[self._place(int(end_s / self.BUCKET_S))] += tokens

    def _place(self, index: int) -> int:
        place = index % self._RING
        if self._index[place] < index:
            self._index[place], self._busy_s[place], self._tokens[place] = index, 0.0, 0
        return place

    def read(self, now: float) -> tuple[float, float]:
        """Active percent and tokens per second of the last `SPAN_S` seconds, or since the start if that is later."""
        newest = int(now / self.BUCKET_S)
        oldest = newest - self._KEPT + 1
        wall_s = self.wall_s(now)
        if wall_s <= 0:
            return 0.0, 0.0
        places = [place for place, index in enumerate(self._index) if oldest <= index <= newest]
        busy_s = sum(self._busy_s[place] for place in places)
        tokens = sum(self._tokens[place] for place in places)
        return min(100.0, 100.0 * busy_s / wall_s), tokens / wall_s

    def wall_s(self, now: float) -> float:
        """Length of the stretch that `read` covers."""
        oldest = int(now / self.BUCKET_S) - self._KEPT + 1
        return now - max(oldest * self.BUCKET_S, self._start_s)

    def tokens_by_second(self, now: float) -> tuple[int, ...]:
        """Tokens in each of the last `SPAN_S` seconds, oldest first."""
        newest, by_second = int(now / self.BUCKET_S), [0] * round(self.SPAN_S)
        for place, index in enumerate(self._index):
            age = newest - index
            if 0 <= age < self._KEPT:
                by_second[-1 - int(age * self.BUCKET_S)] += self._tokens[place]
        return tuple(by_second)
