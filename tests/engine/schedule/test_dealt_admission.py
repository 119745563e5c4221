"""Rows dealt to ranks get a row where there is room. One rank runs the pages of both, by a pool of two ranks."""

import pytest

from rollout.engine import build_kv
from rollout.engine.kv.pool import PagePool
from tests.support.engine.harness import Bench


@pytest.fixture
def dealt(model, monkeypatch):
    """Makes a bench whose pool has the pages of two ranks, 31 each to hand out."""

    def make(**changes: object) -> Bench:
        with monkeypatch.context() as patch:
            patch.setattr(build_kv, "PagePool", lambda pages, ranks: PagePool(pages, ranks=2))
            return Bench(model, **{"kv_pages": 64, "max_rows": 16, **changes})

    return make


def ranks_of(bench: Bench) -> list[int]:
    return sorted(seq.kv.rank for seq in bench.engine.roster.decoding + bench.engine.roster.prefilling)


def ticks(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.engine.tick()


def test_a_group_goes_to_another_rank_when_its_own_is_full(dealt, model, prompt_of):
    bench = dealt()
    prompt, sampling = prompt_of(70, 1), {"temperature": 1.0, "seed": 3}
    fields = {"n": 8, "sampling": sampling}
    bench.submit("g", prompt, 40, **fields)
    seen = set()
    for _ in range(60):
        ticks(bench, 1)
        seen.add(tuple(ranks_of(bench)))
    assert any(ranks.count(0) >= 2 and ranks.count(1) >= 2 for ranks in seen), "each has room for some of these rows"
    bench.run()
    alone = Bench(model, max_rows=16)
    alone.complete("g", prompt, 40, **fields)
    assert [bench.tokens("g", i) for i in range(8)] == [alone.tokens("g", i) for i in range(8)]


def test_a_rank_keeps_a_page_free_for_each_of_its_own_rows_alone(dealt, prompt_of):
    bench = dealt(prefix_cache=False)
    for i in range(14):
        bench.submit(str(i), prompt_of(9, i), 4)
    ticks(bench, 3)
    assert ranks_of(bench).count(0) == ranks_of(bench).count(1) == 7
    bench.run()


def test_random_requests_have_the_tokens_of_one_pool(dealt, model, prompt_of):
    results = []
    for bench in (dealt(kv_pages=56), Bench(model, max_rows=16)):
        for i in range(24):
            prompt = prompt_of(8 * (i % 3), 7) + prompt_of(3 + 5 * (i % 7), i)
            session = {"session": ("c", f"s{i % 4}")} if i % 4 == 1 and i < 8 else {}
            sampling = {"temperature": float(i % 2), "seed": i}
            bench.submit(str(i), prompt, 10 + 3 * (i % 9), n=1 + i % 3, sampling=sampling, **session)
            ticks(bench, 1)
        bench.run()
        results.append({key: done.token_ids for key, done in bench.completions.items()})
    assert results[0] == results[1]


def test_a_new_session_takes_free_pages_of_a_rank_or_waits_for_one_rank_to_have_enough(dealt, prompt_of):
    """Each rank has an idle session of 14 pages. The free pages of one rank count, not those of both."""
    bench = dealt()
    for seed, name in enumerate("ab"):
        bench.submit(name, prompt_of(52, seed), 4, session=("c", name), session_lease_s=60.0)
        bench.run()
    sessions = bench.engine.roster.allocator.sessions
    assert min(sessions.pages_of(0), sessions.pages_of(1)) > 0
    bench.submit("row", prompt_of(20, 7), 100)
    ticks(bench, 4)
    before = [sessions.pages_of(rank) for rank in (0, 1)]
    pool = bench.engine.roster.allocator.pool
    free = [pool.available_of(rank) for rank in (0, 1)]
    page, fits = bench.engine.roster.allocator.page_size, max(free) - 4
    bench.submit("wide", prompt_of((sum(free) - 8) * page, 8), 4, session=("c", "wide"), session_lease_s=60.0)
    ticks(bench, 4)
    assert bench.status().queue_waiting == 1, "no rank has this many"
    bench.submit("new", prompt_of(fits * page, 9), 4, session=("c", "new"), session_lease_s=60.0)
    ticks(bench, 4)
    assert bench.status().queue_waiting == 1 and [sessions.pages_of(rank) for rank in (0, 1)] == before
    bench.run()


@pytest.mark.parametrize(("session", "rank"), [(("c", "new"), 1), (None, 0)])
def test_a_new_session_leaves_its_prefix_where_it_would_cost_an_idle_session_its_pages(dealt, prompt_of, session, rank):
    bench = dealt()
    for seed, name in enumerate("abc"):  # two on rank 0, one on rank 1
        bench.submit(name, prompt_of(28, seed), 4, session=("c", name), session_lease_s=60.0)
        bench.run()
    roster = bench.engine.roster
    assert [roster.allocator.sessions.pages_of(rank) for rank in (0, 1)] == [16, 8]
    roster.rows_by_rank = lambda: [12, 0]
    bench.submit(
        "new", prompt_of(28, 0) + prompt_of(17, 9), 4, session=session, session_lease_s=60.0 if session else 0.0
    )
    ticks(bench, 2)
    assert ranks_of(bench) == [rank]
    bench.run()
