"""Pages of rows dealt to ranks: each rank has an equal part, and no page of a sequence is with another rank."""

import random

import numpy as np
import pytest

from rollout.config import EngineSettings
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.sequence.sequence_kv import NO_KEYS, PrefixKeys, SessionKV
from tests.support.settings import settings_of


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_use_keeps_pages_with_their_rank(ranks: int) -> None:
    pool, draws = PagePool(12 * ranks, ranks=ranks), random.Random(3)
    used: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    evicted = 0
    for number in range(4000):
        rank = draws.randrange(ranks)
        if draws.random() < 0.5 and (available := pool.available_of(rank)):
            page = pool.allocate(rank)
            assert page // 12 == rank == pool.rank_of(page) and page % 12, "a dump page is never handed out"
            assert pool.available_of(rank) == available - 1
            evicted += not pool.free
            used[rank].append(page)
            if draws.random() < 0.5:
                pool.remember(number.to_bytes(4, "little"), page, 0)
        elif used[rank]:
            pool.release(used[rank].pop(draws.randrange(len(used[rank]))))
        if number % 500 == 0:
            pool.forget_all() if draws.random() < 0.3 else None
            pool.check()
        assert sum(map(pool.available_of, range(ranks))) == pool.available
    assert all(pool.available_of(rank) + len(used[rank]) == pool.total_of_rank == 11 for rank in range(ranks))


def test_a_rank_without_pages_takes_none_of_another() -> None:
    pool = PagePool(6, ranks=2)
    assert [pool.allocate(1) for _ in range(3)] == [4, 5, 0]
    assert pool.available_of(0) == 2
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(3, ranks=2)


def test_sessions_of_the_rank_give_way_and_no_others() -> None:
    pool = PagePool(40, ranks=2)
    sessions = Sessions(pool, 4, 40, Snapshots(0, 0, pool))
    for name, rank in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        request = Request(("x", name), Prompt.of_tokens(np.zeros(9, np.int32)), 1, session=("x", name))
        session = sessions.begin(request)
        assert session is not None
        pages = [pool.allocate(rank) for _ in range(2)]
        sessions.keep(session, SessionKV(np.zeros(8, np.int32), pages, 0, NO_KEYS), 1.0)
        for page in pages:
            pool.release(page)
    assert [sessions.pages_of(rank) for rank in (0, 1)] == [4, 4]
    assert sessions.evict_one(1) and [sessions.pages_of(rank) for rank in (0, 1)] == [4, 2]
    assert sessions.evict_one(1) and not sessions.evict_one(1)
    assert pool.available_of(1) == 19 and pool.available_of(0) == 15
    sessions.check()


def test_ranks_have_keys_of_their_own() -> None:
    first, second = (PrefixKeys.begin(0, 0, rank) for rank in (0, 1))
    assert first.next_key(b"same") != second.next_key(b"same")
    assert second.fork(0).next_key(b"same") == second.next_key(b"same")
    assert first.next_key(b"same") == PrefixKeys.begin(0).next_key(b"same")


@pytest.mark.parametrize(
    ("split", "other"),
    [
        *(("rows", other) for other in ({"host_kv_gib": 1.0}, {"speculation": "suffix"}, {"deterministic": True})),
        *(("context", other) for other in ({"page_size": 15}, {"speculation": "heads"}, {"deterministic": True})),
        *((split, {"tensor_parallel": 1}) for split in ("rows", "context")),
    ],
)
def test_what_a_split_of_attention_lacks_is_refused_by_name(split: str, other: dict) -> None:
    with pytest.raises(ValueError, match=f"attention_split = {split} needs {next(iter(other))} = "):
        settings_of(EngineSettings, attention_split=split, **{"tensor_parallel": 2} | other)
