"""Rows by weights version: rows that are not taken in time are dropped, with one warning."""

import logging

from rollout.metrics.by_version import MOST_ROWS, ByVersion
from rollout.metrics.definitions import Served


def test_rows_that_are_not_taken_are_dropped_oldest_first_with_one_warning(caplog):
    rows = ByVersion(0, Served(0.0))
    for version in range(1, MOST_ROWS + 4):
        rows.swapped(version, Served(float(version)), 0.0)
    with caplog.at_level(logging.WARNING):
        taken = rows.take()
        assert [row.version for row in taken] == list(range(3, MOST_ROWS + 3))
        assert [record.name for record in caplog.records].count("rollout.metrics.by_version") == 1
        caplog.clear()
        rows.swapped(999, Served(1e3), 0.0)
        assert len(rows.take()) == 1
        assert "rollout.metrics.by_version" not in [record.name for record in caplog.records]
