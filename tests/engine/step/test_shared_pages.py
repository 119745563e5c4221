"""What rows share is found from their pages: every segment of every step is true, and finding it costs little."""

import random

import numpy as np
import pytest

from rollout.config import EngineConstants
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.step.shared_pages import SharedPages, same_pages
from rollout.engine.upload import RowNeeds
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import Bench

PAGE = 4
#: Sharing is worth it from a page on.
ANY = {"shared_positions": PAGE, "shared_saved_bytes": 1, "ahead_saved_bytes": 1}


class Seen:
    """Checks the segments of each decode step against the page tables that the step reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self.shared = self.most_levels = 0
        monkeypatch.setattr("rollout.engine.build_steps._shares_pages", lambda site: True)

    def watch(self, bench: Bench) -> Bench:
        step = bench.engine.executor.step
        begin = step.begin_decode

        def begin_decode(*how):
            token_ids_B, batch = begin(*how)
            self.look(batch.segments_SW.numpy(), batch.page_table_BP.numpy(), batch.context_lens_B.tolist())
            return token_ids_B, batch

        step.begin_decode = begin_decode
        return bench

    def look(self, segments: np.ndarray, table: np.ndarray, lens: list[int]) -> None:
        self.steps += 1
        size = len(lens)
        assert segments.shape == (2 * size, 5)
        for row, length in enumerate(lens):
            position, at, levels = segments[row, 2], segments[row, 4], 0
            assert position < max(length, 1), "a row writes to a page of its own"
            while at:
                first, rows, begin, end, before = segments[at - 1].tolist()
                assert at > size and first <= row < first + rows and end == position and end % PAGE == 0
                pages = table[first : first + rows, begin // PAGE : end // PAGE]
                assert (pages == pages[0]).all(), "rows of a segment have the same pages there"
                position, at, levels = begin, before, levels + 1
            assert position == 0
            self.shared += segments[row, 2] > 0
            self.most_levels = max(self.most_levels, levels)


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


def test_members_of_groups_are_found_and_stay_neighbours(model, prompt_of, seen):
    bench = seen.watch(Bench(model, max_rows=8, **ANY))
    for name, length in (("a", 33), ("b", 21)):
        bench.submit(name, prompt_of(length, length), 24, n=4)
    bench.run()
    assert seen.steps > 20 and seen.shared > 8 * 15 and seen.most_levels == 1
    bench.engine.check_integrity()


def test_a_system_prompt_before_groups_is_a_second_level(model, prompt_of, seen):
    bench = seen.watch(Bench(model, max_rows=8, **ANY))
    system = prompt_of(40, 1)
    for i in range(2):
        bench.submit(f"r{i}", [*system, *prompt_of(20, 5 + i)], 24, n=4)
    bench.run()
    assert seen.most_levels == 2


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_drafts_are_read_with_their_row(model, prompt_of, seen, wrong):
    """Rows of a group and rows alone, each with three drafts: only what a step may write is a draft row's own."""
    tokens: dict[tuple[str, int], list[int]] = {}
    bench, _ = drafting(model, tokens, wrong, max_rows=8, speculation_rows=24, **ANY)
    for each in map(seen.watch, (Bench(model, max_rows=8, **ANY), bench)):
        each.submit("a", prompt_of(33, 1), 40, n=3)
        each.submit("b", prompt_of(21, 2), 40)
        seen.shared = seen.most_levels = 0
        each.run()
        each.engine.check_integrity()
        each.close()
        done = {key: completion.token_ids for key, completion in each.completions.items()}
        assert tokens in ({}, done)
        tokens.update(done)
    assert seen.most_levels == 2, "the prompt of the group, and then each row with its drafts"
    drafts = bench.drafts
    assert seen.shared > drafts.drafted > 100 and drafts.accepted > 50


@pytest.mark.parametrize("seed", range(3))
def test_segments_stay_true_under_preemption_ends_and_arrivals(model, prompt_of, seen, seed):
    """Few pages, so that rows lose theirs and get others; ends at random; prompts of a few stems."""
    rng = random.Random(seed)
    stems = [prompt_of(rng.randint(8, 40), 100 + i) for i in range(3)]
    bench = seen.watch(Bench(model, max_rows=6, kv_pages=60, host_kv_gib=rng.choice([0.0, 0.001]), **ANY))
    for i in range(24):
        ids = [*rng.choice(stems), *prompt_of(rng.randint(1, 12), i)]
        bench.submit(f"r{i}", ids, rng.randint(2, 40), n=rng.choice([1, 1, 3]))
        bench.ticks(rng.randint(0, 6))
    bench.run()
    assert seen.shared > 100
    bench.engine.check_integrity()


def test_small_savings_are_not_worth_it(model, prompt_of, seen):
    bench = seen.watch(Bench(model, max_rows=8, **(ANY | {"shared_saved_bytes": 1 << 40})))
    bench.complete("a", prompt_of(33, 1), 24, n=4)
    assert seen.steps > 20 and seen.shared == 0


class _Row:
    """As much of a sequence as is looked at."""

    def __init__(self, pages: list[int]) -> None:
        self.kv = self
        self.pages = pages


def plan_of(rows: list[_Row]) -> Plan:
    spans, tokens = [Span(row, 0, 1, 1) for row in rows], len(rows)
    return Plan(spans, 0, RowNeeds.NONE, 1, tokens, tokens, [], [0] * tokens)


def test_segments_are_made_again_only_when_rows_change():
    def alone_from(segments: np.ndarray) -> list[int]:
        return segments[: len(rows), 2].tolist()

    shared = SharedPages(PAGE, 8, 1, EngineConstants(**ANY))
    rows = [_Row([1, 2, 3]), _Row([1, 2, 4]), _Row([1, 5])]
    made = shared.segments(plan_of(rows), 4)
    assert alone_from(made) == [2 * PAGE, 2 * PAGE, PAGE]
    for row in rows:
        row.pages.append(100 + len(row.pages))  # a row that grows shares what it shared
    assert alone_from(shared.segments(plan_of(rows), 4)) == alone_from(made)
    same = shared.segments(plan_of(rows), 4)
    assert shared.segments(plan_of(rows), 4) is same
    assert alone_from(shared.segments(plan_of(rows[:2]), 4))[:2] == [2 * PAGE, 2 * PAGE]
    rows[0].pages = [9, 2]  # preempted, and back with other pages
    assert alone_from(shared.segments(plan_of(rows), 4)) == [0, PAGE, PAGE]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [([], [], 0), ([1], [2], 0), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 5, 3], 1), ([7] * 9, [7] * 9, 9)],
)
def test_same_pages_are_counted_from_the_first_on(a, b, same):
    assert same_pages(a, b) == same
