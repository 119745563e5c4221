"""The times of updates that send changes, at a toy shape on a CPU: the script itself compares the result bit by bit."""

import argparse

import pytest

from scripts.bench import update_deltas


@pytest.mark.parametrize("staging", ["staged", "in_place"])
@pytest.mark.parametrize("shape", ["toy", "toy-moe"])
def test_the_script_measures_and_finds_the_trainers_bits(staging: str, shape: str) -> None:
    args = argparse.Namespace(device="cpu", place="host", staging=staging)
    row = update_deltas.measure(args, shape, 0, 0.01)
    assert 0.01 < row["codes_over_bytes"] < 0.02
    assert row["pays_below_gbit"] > 0 and row["links"]["1"][0] == pytest.approx(8e-9 * row["bytes"])
