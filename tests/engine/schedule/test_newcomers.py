"""New sessions wait while those that are there need their pages: for whom, and until when."""

from typing import Any

import pytest

from rollout.engine.messages.to_engine import Cancel, EndSession
from rollout.engine.schedule.admission import LONG_IDLE_S, LONGEST_WAIT_S
from tests.support.engine.conversation import LEASE_S, Conversation
from tests.support.engine.harness import Bench

PAGES = 48


class Loop:
    """An engine whose clock the test sets, with two idle sessions of 10 pages each and a long row: 13 are left."""

    def __init__(self, model: Any, prompt_of: Any, **engine: Any) -> None:
        self.now = 0.0
        self.bench = Bench(model, kv_pages=PAGES + 1, clock=lambda: self.now, **engine)
        self.prompt_of = prompt_of
        self.talks = [Conversation(self.bench, name, prompt_of) for name in ("a", "bb")]
        for talk in self.talks:
            talk.say(31)
        self.bench.submit("row", prompt_of(20, 77), 60)
        self.tick(4)
        assert self.bench.status().sessions.pages == 20

    def tick(self, count: int = 6) -> None:
        for _ in range(count):
            self.bench.engine.tick()

    def arrive(self, length: int = 84, name: str = "new", **fields: Any) -> None:
        given = {"session": ("c", "new"), "session_lease_s": LEASE_S} | fields
        self.bench.submit(name, self.prompt_of(length, 5), 8, **given)
        self.tick()

    @property
    def waits(self) -> bool:
        return self.bench.status().queue_waiting == 1

    @property
    def holding(self) -> int:
        return self.bench.status().sessions.holding

    def end(self) -> None:
        self.bench.run()
        self.bench.close()


@pytest.fixture
def loop(model, prompt_of):
    return Loop(model, prompt_of)


def test_a_new_session_waits_while_idle_ones_have_the_pages_and_a_row_runs(loop):
    loop.arrive()
    assert loop.waits and loop.holding == 2
    loop.bench.engine.inbox.put(Cancel(("c", "row")))
    loop.tick()
    assert not loop.waits, "without a row nothing is gained by waiting"
    loop.end()


@pytest.mark.parametrize("fields", [{"session": None}, {"length": 20}])
def test_requests_without_a_session_and_those_that_fit_do_not_wait(loop, fields):
    loop.arrive(**fields)
    assert not loop.waits
    loop.end()


def test_a_turn_that_has_kv_does_not_wait_and_one_whose_kv_gave_way_does(loop):
    evicted, kept = loop.talks
    loop.bench.engine.roster.allocator.sessions.evict_one()
    evicted.submit(0, prompt=loop.prompt_of(130, 9))
    loop.tick()
    assert loop.waits
    kept.submit(2)
    loop.tick(3)
    assert loop.waits and loop.bench.status().rows_running == 2
    loop.end()


def test_the_end_of_a_session_makes_room(loop):
    loop.arrive()
    assert loop.waits
    loop.bench.engine.inbox.put(EndSession("c", "a"))
    loop.tick()
    assert not loop.waits and loop.holding == 1
    loop.end()


def test_a_session_that_was_idle_for_long_gives_way(loop):
    loop.now = LONG_IDLE_S + 1
    loop.arrive()
    assert not loop.waits and loop.holding == 1
    loop.end()


def test_nobody_waits_for_longer_than_the_limit(loop):
    """Sessions that come back again and again do not starve it."""
    loop.arrive()
    while loop.now <= LONGEST_WAIT_S:
        assert loop.waits
        loop.now += 7.0
        for talk in loop.talks:  # each turn ends, and its session is idle from then on
            talk.submit(0, max_tokens=1, prompt=talk.said)
            loop.tick(4)
            talk.ended()
    loop.tick()
    assert not loop.waits
    loop.end()


def test_the_first_that_came_is_the_first_that_gets_room_and_the_cancelled_is_forgotten(loop):
    for i in range(3):
        loop.arrive(name=f"new{i}", session=("c", f"new{i}"))
    assert loop.bench.status().queue_waiting == 3
    loop.bench.engine.inbox.put(Cancel(("c", "new0")))
    loop.tick(1)
    assert loop.bench.done["new0"] and loop.bench.status().queue_waiting == 2
    loop.bench.engine.inbox.put(EndSession("c", "a"))
    loop.tick(3)
    assert loop.bench.status().queue_waiting == 1
    loop.bench.run()
    done = list(loop.bench.done)
    assert done.index("new1") < done.index("new2")
    loop.end()


def test_a_small_one_that_fits_does_not_wait_for_a_large_one_that_came_before(loop):
    for length, name in ((150, "large"), (84, "small")):
        loop.arrive(length, name, session=("c", name))
    assert loop.bench.status().queue_waiting == 2
    loop.bench.engine.inbox.put(EndSession("c", "a"))
    loop.tick()
    assert loop.waits and loop.bench.engine.roster.groups["c", "large"].sequences[0].kv.pages == []
    loop.end()


def test_tokens_are_those_of_an_engine_with_room(loop, model):
    loop.arrive()
    loop.bench.run()
    roomy = Bench(model)
    roomy.complete("new", loop.prompt_of(84, 5), 8)
    assert loop.bench.tokens("new") == roomy.tokens("new")
    roomy.close(), loop.end()
