"""Requests that wait or have ended cost neither memory nor time."""

from rollout.engine.messages.to_engine import Cancel
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.sequence.sequence_kv import PrefixKeys
from tests.support.alive import alive
from tests.support.engine.harness import Bench


def sequences() -> int:
    """Sequences that anything in this process still refers to."""
    return len(alive(Sequence))


def test_a_request_that_ended_is_not_kept_until_its_deadline(model, prompt_of):
    bench = Bench(model)
    before = sequences()
    for i in range(100):
        bench.complete(f"r{i}", prompt_of(9), 2, deadline_s=1e6)
    assert sequences() - before < 50


def test_cancelled_requests_do_not_pile_up_behind_one_that_waits(model, prompt_of):
    bench = Bench(model, max_rows=1, max_queue=4)
    bench.submit("runs", prompt_of(9), 400)
    bench.submit("waits", prompt_of(9), 4)
    bench.engine.tick()
    before = sequences()
    for i in range(200):
        bench.submit(f"r{i}", prompt_of(9), 3)
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
        bench.engine.tick()
    assert sequences() - before < 50
    bench.run()


def test_the_prefix_of_a_request_that_waits_for_pages_is_not_hashed_at_each_step(model, prompt_of, monkeypatch):
    hashed = []
    next_key = PrefixKeys.next_key
    monkeypatch.setattr(PrefixKeys, "next_key", lambda self, page: hashed.append(1) or next_key(self, page))
    bench = Bench(model, max_rows=4, kv_pages=100)
    bench.submit("runs", prompt_of(200), 100)
    bench.ticks(20)
    bench.submit("waits", prompt_of(200) + prompt_of(180, 5), 8)
    bench.engine.tick()
    assert bench.engine.roster.waiting == 1
    del hashed[:]
    bench.ticks(20)
    assert len(hashed) < 100, "20 steps: at most the keys of the running row's new pages, and one look for the prefix"
    bench.run()
