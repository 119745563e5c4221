"""The first pages that rows of a decode step share, passed to attention as segments (`segments.make_segments`).

Rows of a group, of a session or with the same system prompt hold the same pages. The roster keeps rows that share pages
next to each other, so a row shares only with its neighbours. Pages that two rows share stay shared while both run, and
the page that a row writes to is its own, so the segments change only with the rows.

The tokens ahead of a row follow it, in rows with its page table. They share with the row all positions before the
step's first write, and form a run inside the group's run.

Reading shared pages once costs time, too: more parts to combine, and neighbours that read the same pages at the same
time find them in the L2 cache anyway. Below `shared_saved_bytes` of `EngineConstants` the segments share nothing.
"""

import numpy as np
from rollout_kernels.attention.segments import SHARED_TILES, make_segments, no_segments, rows_at_once

from rollout.config import EngineConstants, EngineSettings
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.upload import UploadStaging
from rollout.models.batch import KVCache
from rollout.models.deterministic import CONFIG as DETERMINISTIC
from rollout.models.language_model import LanguageModel, native
from rollout.models.spec import AttentionSpec, CompressedSpec, LatentSpec, ModelSpec

_NOTHING = -1
_NOT_FOUND: tuple[list[int], list[int], int] = [], [], 0


class SharedPages:
    """Makes the segments of decode steps: of `most_rows` rows at most, where a layer's KV has `position_bytes`."""

    def __init__(self, page_size: int, most_rows: int, position_bytes: int, worth: EngineConstants) -> None:
        self.least_bytes, self.least_ahead_bytes = worth.shared_saved_bytes, worth.ahead_saved_bytes
        self._least_positions = max(worth.shared_positions, page_size)
        self._page_size = page_size
        self._most_rows = most_rows
        self._position_bytes = position_bytes
        self._pages: list[list[int]] = []
        self._ahead: list[tuple[int, int]] = []
        self._size = _NOTHING
        self._segments_SW = no_segments(0)
        # Key: id of a row's pages. Value: the previous row's pages, the row's own, and the number of equal first pages.
        self._common: dict[int, tuple[list[int], list[int], int]] = {}

    def put(self, plan: Plan, size: int, staging: UploadStaging) -> None:
        """Put the segments of a decode step that is padded to `size` rows, right after `put_decode`."""
        staging.put("segments", self.segments(plan, size))

    def segments(self, plan: Plan, size: int) -> np.ndarray:
        """The segments of a decode step that is padded to `size` rows, int32 [2 size, W]."""
        pages = [span.seq.kv.pages for span in plan.spans]
        ahead = [self._rows_ahead(span) for span in plan.spans] if plan.ahead else []
        if size != self._size or pages != self._pages or ahead != self._ahead:
            self._segments_SW = self._make(pages, ahead, size)
            self._pages, self._ahead, self._size = pages, ahead, size
        return self._segments_SW

    def _rows_ahead(self, span: Span) -> tuple[int, int]:
        """Number of rows for tokens ahead after a row, and of positions that they share with it, in full pages."""
        seq, start, _, draws, _ = span
        known = start - seq.ahead_in_flight  # refused tokens in flight move the step's first write back to here
        return draws - 1, known // self._page_size * self._page_size

    def _make(self, pages: list[list[int]], ahead: list[tuple[int, int]], size: int) -> np.ndarray:
        common = self._among(pages)
        if ahead:
            common = [
                positions
                for (rows, own), next_one in zip(ahead, [*common, 0], strict=True)
                for positions in (*(own,) * rows, next_one)
            ][:-1]
        segments_SW = make_segments(common, size, self._most_rows, self._least_positions)
        if segments_SW is None:
            return no_segments(size)
        shared_SW = segments_SW[size:]
        saved = int(((shared_SW[:, 1] - 1).clip(0) * (shared_SW[:, 3] - shared_SW[:, 2])).sum())
        least_bytes = self.least_ahead_bytes if ahead else self.least_bytes
        return segments_SW if saved * self._position_bytes >= least_bytes else no_segments(size)

    def _among(self, pages: list[list[int]]) -> list[int]:
        """The number of positions that each row but the last shares with the next row."""
        common, known = [], {}
        for before, own in zip(pages, pages[1:], strict=False):
            found = self._common.get(id(own), _NOT_FOUND)
            if found[0] is not before or found[1] is not own:
                found = before, own, same_pages(before, own)
            known[id(own)] = found
            common.append(found[2] * self._page_size)
        self._common = known
        return common


def same_pages(a: list[int], b: list[int]) -> int:
    """Number of equal first pages."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def most_shared_rows(spec: ModelSpec, coded: bool, deterministic: bool) -> int:
    """Rows that attention may read together in every layer of a model; `coded` if its KV are e4m3 codes.

    1 where reading together is not worth it: a row's query heads fill a tile already, or every layer has a window. 1 as
    well where a layer has latents or entries of windows, whose kernel reads each row on its own.
    """
    if any(isinstance(layer.mixer, LatentSpec | CompressedSpec) for layer in spec.layers):
        return 1
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if all(mixer.window is not None for mixer in mixers):
        return 1
    tile = DETERMINISTIC.block_m if deterministic else SHARED_TILES[coded].heads
    return min(rows_at_once(mixer.decode_group, tile) for mixer in mixers)


def make_shared_pages(model: LanguageModel, kv: KVCache, engine: EngineSettings, shares: bool) -> SharedPages | None:
    """Serves the decode steps of a model over this KV; None unless attention reads shared pages once (`shares`)."""
    if not shares:
        return None
    spec = native(model).spec
    position_bytes = max(k[0, 0].nbytes + v[0, 0].nbytes for k, v in zip(kv.k, kv.v, strict=True))
    most_rows = most_shared_rows(spec, bool(kv.scales), engine.deterministic)
    return SharedPages(kv.page_size, most_rows, position_bytes, engine.constants)
