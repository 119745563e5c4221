"""`rollout bench moe`: what its rows say; the measuring itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from scripts.bench.moe import main, verdict


def row(tokens: int, warp_us: float, grouped_us: float, chosen: str) -> dict:
    return {"tokens": tokens, "warp_us": warp_us, "grouped_us": grouped_us, "chosen": chosen}


def test_the_crossover_is_where_the_path_by_expert_becomes_faster():
    rows = [row(1, 10, 20, "warp"), row(4, 30, 40, "warp"), row(8, 60, 50, "grouped")]
    assert verdict(rows) == "by output up to 4 tokens, by expert from 8; the table agrees"
    assert verdict(rows[:2]) == "by output up to 4 tokens; the table agrees"
    assert verdict(rows[2:]) == "never by output, by expert from 8; the table agrees"
    assert verdict([{"tokens": 128, "grouped_us": 5.0, "chosen": "grouped"}]) == "nothing to compare"


def test_a_table_that_chooses_the_slower_path_is_named():
    rows = [row(1, 10, 20, "warp"), row(4, 50, 40, "warp"), row(8, 60, 50, "grouped")]
    assert verdict(rows).endswith("the table chooses the slower path at [4]")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys):
    assert main([]) == 1
    assert "CUDA" in capsys.readouterr().err
