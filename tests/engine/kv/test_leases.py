"""Leases: KV that a client says it needs soon gives way after other KV, with a session or without one."""

import random

import numpy as np
import pytest

from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.sessions import Sessions
from rollout.engine.kv.snapshots import Snapshots
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_engine import EndSession
from rollout.engine.sequence.sequence_kv import NO_KEYS, SessionKV
from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench
from tests.support.engine.offloading import copies_pay, offloading
from tests.support.engine.updates import Mailbox, Update

LEASE_S = 1e6


class Books:
    """Sessions of two pages each, by name."""

    def __init__(self, most_pages: int = 100) -> None:
        self.pool = PagePool(101)
        self.sessions = Sessions(self.pool, 4, most_pages, Snapshots(0, 0, self.pool))

    def turn(self, name: str, now_s: float, lease_s: float = 0.0, session_lease_s: float = LEASE_S) -> None:
        fields = {"session": ("c", name), "session_lease_s": session_lease_s, "lease_s": lease_s}
        prompt = Prompt.of_tokens(np.zeros(9, np.int32))
        session = self.sessions.begin(Request(("c", f"{name}{now_s}"), prompt, 1, **fields))
        assert session is not None
        self.sessions.hand_over(session, 0)
        pages = [self.pool.allocate() for _ in range(2)]
        self.sessions.keep(session, SessionKV(np.zeros(8, np.int32), pages, 0, NO_KEYS), now_s)
        for page in pages:
            self.pool.release(page)
        self.sessions.check()

    @property
    def left(self) -> list[str]:
        """The sessions with pages."""
        names = [f"s{i}" for i in range(9)]
        prompt = Prompt.of_tokens(np.zeros(9, np.int32))
        return [name for name in names if self._has(name, prompt)]

    def _has(self, name: str, prompt: Prompt) -> bool:
        return self.sessions.turn_of(Request(("c", "-"), prompt, 1, session=("c", name))) is not None


def test_sessions_with_a_lease_give_way_after_the_others_and_the_oldest_first():
    books = Books()
    for name, lease_s in (("s0", 50.0), ("s1", 0.0), ("s2", 50.0), ("s3", 0.0)):
        books.turn(name, 1.0, lease_s)
    books.turn("s0", 2.0, 50.0)
    for left in (["s0", "s2", "s3"], ["s0", "s2"], ["s0"], []):
        assert books.sessions.evict_one() and books.left == left
        books.sessions.check()
    assert not books.sessions.evict_one()


def test_a_lease_that_is_over_counts_no_more_and_one_that_is_renewed_does():
    books = Books()
    books.turn("s0", 0.0, 10.0), books.turn("s1", 0.0, 20.0), books.turn("s2", 0.0)
    books.turn("s1", 15.0, 20.0)
    books.sessions.expire(30.0)
    assert books.sessions.evict_one() and books.left == ["s1", "s2"], "it was used before s2"
    assert books.sessions.evict_one() and books.left == ["s1"]
    books.turn("s3", 31.0)
    books.sessions.expire(35.0)
    assert books.sessions.evict_one() and books.left == ["s3"]


def test_a_lease_that_ends_while_the_next_turn_waits_does_not_make_it_give_way():
    books = Books()
    books.turn("s0", 0.0), books.turn("s1", 1.0, 10.0)
    prompt = Prompt.of_tokens(np.zeros(9, np.int32))
    books.sessions.begin(Request(("c", "next"), prompt, 1, session=("c", "s1"), session_lease_s=LEASE_S))
    books.sessions.expire(20.0)
    books.sessions.check()
    assert books.sessions.evict_one() and books.left == ["s1"]


def test_a_turn_without_a_lease_ends_the_one_of_the_turn_before():
    books = Books()
    books.turn("s0", 0.0, 50.0), books.turn("s1", 0.0, 50.0), books.turn("s0", 1.0)
    assert books.sessions.evict_one() and books.left == ["s1"]


def test_a_session_is_kept_for_its_lease_at_least():
    books = Books()
    books.turn("s0", 0.0, lease_s=50.0, session_lease_s=5.0), books.turn("s1", 0.0, session_lease_s=5.0)
    books.sessions.expire(49.0)
    assert books.left == ["s0"]
    books.sessions.expire(50.0)
    assert books.left == [] and books.pool.used == 0


def test_a_session_that_finds_all_room_under_lease_gives_way_at_once():
    books = Books(most_pages=4)
    books.turn("s0", 0.0, 50.0), books.turn("s1", 0.0, 50.0), books.turn("s2", 0.0)
    assert books.left == ["s0", "s1"]
    books.turn("s3", 0.0, 50.0)
    assert books.left == ["s1", "s3"]


def test_leases_over_many_turns_leave_the_books_in_order():
    draw = random.Random(7)
    books, now_s = Books(most_pages=30), 0.0
    for _ in range(2000):
        now_s += draw.random()
        match draw.randrange(6):
            case 0:
                books.sessions.evict_one()
            case 1:
                books.sessions.expire(now_s)
            case 2:
                books.sessions.end("c", f"s{draw.randrange(9)}")
            case _:
                books.turn(f"s{draw.randrange(9)}", now_s, draw.choice([0.0, 0.5, 5.0]), draw.choice([1.0, 9.0]))
        books.sessions.check()
    books.sessions.end("c")
    assert books.pool.used == 0 and books.left == []


# --- on the host ---


def kept(host: HostPageBooks, *keys: bytes) -> list[bytes]:
    """Keep these pages, then see which are left."""
    for key in keys:
        host.end_write(host.begin_write(), key)
    return [key for key in (b"a", b"b", b"c", b"d", b"e", b"f") if host.has(key)]


def test_pages_on_the_host_under_lease_give_way_after_the_others_and_the_end_of_a_prefix_first():
    host = HostPageBooks(3)
    host.lease([b"a", b"b"], 50.0)
    assert kept(host, b"a", b"b", b"c") == [b"a", b"b", b"c"]
    assert kept(host, b"d") == [b"a", b"b", b"d"] and kept(host, b"e") == [b"a", b"b", b"e"]
    host.lease([b"a", b"b"], 60.0)
    host.expire(50.0)
    assert kept(host, b"f") == [b"a", b"b", b"f"]
    host.expire(60.0)
    assert kept(host, b"c") == [b"a", b"c", b"f"] and kept(host, b"d") == [b"c", b"d", b"f"]
    host.check()


def test_leases_of_one_moment_for_shared_pages_end_once():
    host = HostPageBooks(3)
    kept(host, b"a", b"b")
    host.lease([b"a", b"b"], 50.0), host.lease([b"a"], 50.0)
    read = host.begin_read(b"a")
    host.expire(51.0)
    host.end_read(b"a", read.page)
    assert kept(host, b"c", b"d") == [b"a", b"c", b"d"]
    host.check()


def test_leases_of_keys_that_never_come_to_the_host_take_no_room():
    host = HostPageBooks(2)
    for i in range(1000):
        host.lease([i.to_bytes(8, "little")], 1e9)
    assert kept(host, b"a", b"b", b"c") == [b"b", b"c"]


@pytest.mark.parametrize("lease_s", [LEASE_S, 0.0])
def test_kv_under_lease_stays_on_the_host_when_others_fill_it(model, prompt_of, greedy, lease_s):
    bench = offloading(model, 40)
    copies_pay(bench)
    bench.complete("kept", prompt_of(33, 1), 9, lease_s=lease_s)
    for name, tokens in (("row", 90), ("large", 135)):  # pages of sessions are copied, then all are needed
        bench.complete(name, prompt_of(tokens, tokens), 20)
    assert bench.status().sessions.holding == 0
    crowd(bench, prompt_of)
    said = prompt_of(33, 1) + bench.tokens("kept") + prompt_of(5)
    bench.complete("next", said, 9)
    assert bench.done["next"].cached_tokens == (41 if lease_s else 0)
    assert bench.tokens("next") == greedy(said, 9)


# --- requests without a session ---


def crowd(bench: Bench, prompt_of, count: int = 12) -> None:
    """Other requests, one after the other, which need more pages than the pool has."""
    for i in range(count):
        bench.complete(f"crowd{len(bench.done)}", prompt_of(60, 7000 + i), 1)


@pytest.mark.parametrize("n", [1, 3])
def test_kv_under_lease_is_there_after_others_needed_pages_and_other_kv_is_not(model, prompt_of, greedy, n):
    bench = Bench(model, kv_pages=81)
    sampling = {"temperature": 1.0, "seed": 3}
    for name, fields in (("kept", {"lease_s": LEASE_S}), ("lost", {})):
        bench.submit(name, prompt_of(33, len(name)), 9, n=n, sampling=sampling, **fields)
        bench.complete(f"{name}2", prompt_of(33, 5 + len(fields)), 9, **fields)
    crowd(bench, prompt_of)
    for index in range(n):
        said = prompt_of(33, 4) + bench.tokens("kept", index) + prompt_of(5)
        bench.complete(f"next{index}", said, 9)
        assert bench.done[f"next{index}"].cached_tokens == 41, "prompt and completion but its last token"
        assert bench.tokens(f"next{index}") == greedy(said, 9)
    bench.complete("again", prompt_of(33, 5), 9)
    assert bench.done["again"].cached_tokens == 0


def test_rows_take_pages_under_lease_when_there_are_no_others(model, prompt_of, greedy):
    bench = Bench(model, kv_pages=61, max_rows=4)
    for i in range(6):
        bench.complete(f"kept{i}", prompt_of(36, i), 4, lease_s=LEASE_S)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(20, 50 + i), 38)
    bench.run()
    assert [bench.tokens(f"r{i}") for i in range(4)] == [greedy(prompt_of(20, 50 + i), 38) for i in range(4)]
    assert bench.engine.roster.counters.preemptions == 0


@pytest.mark.parametrize("fields", [{"prefix_cache": False}, {"session_share": 0.0}])
def test_a_lease_that_is_of_no_use_keeps_nothing(model, prompt_of, fields):
    bench = Bench(model, **fields)
    bench.complete("r", prompt_of(33), 9, lease_s=LEASE_S)
    assert bench.status().sessions.holding == 0


def test_leases_end_with_their_client_and_with_the_weights(model, folders, prompt_of):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    for client in ("c", "d"):
        bench.complete(f"of {client}", prompt_of(33), 9, client=client, lease_s=LEASE_S)
    assert bench.status().sessions.holding == 2
    bench.engine.inbox.put(EndSession("c"))
    bench.run()
    assert bench.status().sessions.holding == 1
    mailbox.ready = Update(1, model, model)
    bench.run()
    assert bench.status().sessions.holding == 0


def test_a_lease_of_a_session_holds_beside_sessions_without_one(model, prompt_of):
    bench = Bench(model, kv_pages=61, session_share=1.0, prefix_cache=False)
    kept, other = Conversation(bench, "k", prompt_of), Conversation(bench, "oo", prompt_of)
    kept.say(40, lease_s=LEASE_S), other.say(40)
    bench.complete("row", prompt_of(150, 9), 9)
    kept.say(3)
    assert kept.reused == 48
    other.say(3)
    assert other.reused == 0
