"""A prefill has prompts of all ranks to which rows are dealt, so that no rank waits for the attention of another."""

import pytest

from rollout.engine.schedule.scheduler import prompt_spans
from tests.support.engine.harness import Bench


@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [
        ([0, 0, 0, 0], [12, 4, 0, 0]),
        ([0, 0, 1, 1], [8, 0, 8, 0]),
        ([1, 0, 1, 2], [6, 6, 0, 4]),
    ],
)
def test_each_rank_has_an_equal_part_of_the_tokens(model, prompt_of, ranks: list[int], lengths: list[int]) -> None:
    bench = Bench(model, prefill_chunk_tokens=16)
    for i in range(4):
        bench.submit(str(i), prompt_of(12, i), 3)
    bench.engine.commands.take(bench.engine.parts)
    scheduler, roster = bench.engine.scheduler, bench.engine.roster
    scheduler.plan()
    seqs = sorted(roster.prefilling, key=lambda seq: seq.arrival)
    for seq, rank in zip(seqs, ranks, strict=True):
        seq.kv.rank = rank
    spans = {span.seq: span.tokens_in for span in prompt_spans(roster, scheduler.limits, lambda seq, length: 0)}
    assert [spans.get(seq, 0) for seq in seqs] == lengths
    for seq in seqs:
        seq.kv.rank = 0
    bench.run()
    bench.close()
