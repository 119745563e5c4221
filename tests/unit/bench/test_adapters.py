"""The benchmark of many adapters at a toy shape."""

import json
from pathlib import Path

from scripts.bench.adapters import main


def test_the_benchmark_of_adapters_counts_copies_and_rows(tmp_path: Path) -> None:
    sizes = "--rows 4 --slots 2 --requests 12 --prompt 8 --new 8 --adapters 0 6".split()
    main(["--shape", "toy", "--device", "cpu", *sizes, "--out", str(tmp_path / "out.json")])
    summary = json.loads((tmp_path / "out.json").read_text())
    plain, many = summary["rows"]
    assert (plain["switches"], many["switches"]) == (0, 6), "two requests of an adapter run together"
    assert plain["rows_mean"] > 0 < many["rows_mean"] and summary["switch_ms"]["least"] > 0 < summary["mib"]
