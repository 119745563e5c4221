"""Each command gets its answer: pause, resume, shutdown, and a request that is refused."""

from rollout.engine.messages.to_engine import Pause, Resume, Shutdown
from rollout.engine.messages.to_service import Done, Rejected
from tests.support.engine.harness import Bench


def done_tokens(bench: Bench) -> list[int]:
    return [event.token for event in bench.events if isinstance(event, Done)]


def test_a_pause_that_is_resumed_at_once_is_still_answered(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 300)
    bench.ticks(5)
    bench.engine.inbox.put(Pause("keep", 1))
    bench.engine.inbox.put(Resume(2))
    bench.ticks(50)
    assert sorted(done_tokens(bench)) == [1, 2], "rows still run; a client waits for the answer to its pause"
    bench.run()


def test_every_shutdown_is_answered(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 300)
    bench.engine.inbox.put(Shutdown("drain", 1))
    bench.engine.tick()
    bench.engine.inbox.put(Shutdown("now", 2))
    bench.tick_until(lambda: bench.engine.gate.stopped)
    assert sorted(done_tokens(bench)) == [1, 2]


def test_a_group_that_no_queue_can_hold_is_not_told_to_retry(model, prompt_of):
    bench = Bench(model, max_queue=4)
    bench.complete("g", prompt_of(4), 3, n=8)
    refusal = next(event for event in bench.events if isinstance(event, Rejected))
    assert refusal.code != "overloaded"
