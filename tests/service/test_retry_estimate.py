"""The delay after which refused clients are asked to retry."""

import pytest

from rollout.engine.messages.to_service import Rejected
from rollout.service.generation import RetryEstimate
from tests.support.service.harness import serving


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def after(ends: int, each_s: float) -> tuple[RetryEstimate, Clock]:
    """One that has seen requests end at regular times, until now."""
    clock = Clock()
    patience = RetryEstimate(clock)
    for _ in range(ends):
        patience.ended(left=1)
        clock.now_s += each_s
    return patience, clock


@pytest.mark.parametrize(
    ("ends", "each_s", "waiting", "told_s"),
    [(0, 1.0, 50, 1.0), (10, 0.5, 20, 5.0), (1000, 0.01, 200, 1.0), (10, 0.001, 3, 0.05), (10, 5.0, 4096, 30.0)],
)
def test_it_is_the_time_for_half_of_the_queue_within_bounds(ends, each_s, waiting, told_s):
    patience, _ = after(ends, each_s)
    assert patience.retry_after_s(waiting) == pytest.approx(told_s)


def test_a_rate_of_long_ago_counts_no_more_and_a_pause_slows_it_down():
    patience, clock = after(10, 0.1)
    clock.now_s += 9.0
    assert patience.retry_after_s(10) == pytest.approx(5.0)
    clock.now_s += 60.0
    assert patience.retry_after_s(10) == 1.0


def test_requests_that_end_in_waves_count_the_time_between_waves():
    clock = Clock()
    patience = RetryEstimate(clock)
    for _ in range(3):
        clock.now_s += 20.0
        for _ in range(300):
            patience.ended(left=3000)
    assert patience.retry_after_s(300) == pytest.approx(150 * 40.0 / 900)


def test_a_pause_without_anything_to_do_does_not_count():
    patience, clock = after(10, 0.1)
    patience.ended(left=0)
    clock.now_s += 20.0
    assert patience.retry_after_s(10) == 1.0, "nothing is known yet"
    patience.ended(left=5)
    clock.now_s += 0.2
    assert patience.retry_after_s(10) == pytest.approx(1.0)
    patience.ended(left=4)
    assert patience.retry_after_s(10) == pytest.approx(0.5)


def test_a_refusal_of_the_engine_says_it_too():
    with serving() as bench:
        client = bench.client()
        client.send("generate", "long", prompt=[1], max_tokens=50)
        bench.submitted()
        for i in range(20):
            client.send("generate", f"r{i}", prompt=[1], max_tokens=1)
            bench.finish(bench.submitted())
            assert client.receive()["op"] == "result"
        client.send("generate", "full", prompt=[1], max_tokens=1)
        bench.put(Rejected(bench.submitted().key, "overloaded", "the queue is full"))
        error = client.receive()
        assert error["code"] == "overloaded" and 0 < error["retry_after_s"] < 1.0
