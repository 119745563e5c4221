"""The benchmark of updates that keep coming."""

import json
from pathlib import Path

import pytest

from scripts.bench import swap_rate


@pytest.mark.nightly
def test_each_way_is_measured_with_and_without_updates(tmp_path: Path) -> None:
    sizes = ("--rows", "4", "--prompts", "2", "--prompt", "40", "--rounds", "1", "--seconds", "2", "--warm-s", "0.5")
    out = tmp_path / "rate.json"
    swap_rate.main([*sizes, "--every", "0.2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    ways = ["keep", "recompute, 1", "recompute, 0.3"]
    assert [(row["kv"], row["every_s"]) for row in rows] == [(way, every) for every in (None, 0.2) for way in ways]
    for row in rows:
        assert row["rounds"] == 1 and row["tokens_per_s"]["median"] > 0
        if row["every_s"] is not None:
            assert 1 <= row["applied"] <= row["published"]
            assert row["applied"] + sum(row["errors"].values()) == row["published"]
