"""Rows by weights version: what nobody takes in time is dropped, and said."""

from __future__ import annotations

import logging

from rollout.metrics.by_version import _KEPT, ByVersion, Reading


def test_rows_that_nobody_took_are_dropped_oldest_first_and_told_once(caplog):
    rows = ByVersion(0, Reading(0.0))
    for version in range(1, _KEPT + 4):
        rows.swapped(version, Reading(float(version)), 0.0)
    with caplog.at_level(logging.WARNING):
        taken = rows.take()
        assert [row.version for row in taken] == list(range(3, _KEPT + 3))
        assert "rows of 3 weights versions were dropped" in caplog.text
        caplog.clear()
        rows.swapped(999, Reading(1e3), 0.0)
        assert len(rows.take()) == 1 and not caplog.records
