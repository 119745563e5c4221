"""Answers that need slow work: their limits, their errors, and the memory that they leave."""

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from rollout.service.connections import ReplyAddress
from rollout.service.slow_answers import SlowAnswers
from tests.support.patience import PATIENCE_S
from trainer_bridge.wire.errors import BadRequest, Overloaded, RolloutError


class Answers(SlowAnswers):
    """Slow answers whose service thread is the test's. `refused` has the codes of errors."""

    def __init__(self, most: int, most_bytes: int = 0) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.refused: list[tuple[str, str]] = []
        super().__init__("adapters", most, self.posted.put, self.note, most_bytes)

    def note(self, peer: ReplyAddress, error: RolloutError) -> None:
        self.refused.append((peer.id, error.code))

    def go_on(self) -> None:
        """Take the next outcome."""
        self.posted.get(timeout=PATIENCE_S)()


@contextmanager
def answers(most: int, most_bytes: int = 0) -> Iterator[Answers]:
    made = Answers(most, most_bytes)
    try:
        yield made
    finally:
        made.close()


def peer(name: str) -> ReplyAddress:
    return ReplyAddress(b"c", False, name)


@pytest.mark.parametrize(("most", "most_bytes", "sizes"), [(2, 0, [0, 0]), (8, 30, [20, 10]), (8, 30, [1000])], ids=str)
def test_a_full_queue_is_an_error_and_a_message_alone_may_have_any_size(
    most: int, most_bytes: int, sizes: list[int]
) -> None:
    gate, found = threading.Event(), list[bool]()
    with answers(most, most_bytes) as slow:
        for number, nbytes in enumerate(sizes):
            slow.begin(peer(str(number)), lambda: gate.wait(PATIENCE_S), found.append, nbytes)
        with pytest.raises(Overloaded):
            slow.begin(peer("late"), lambda: True, found.append, 1)
        assert [each.id for each in slow.waiting()] == [str(number) for number in range(len(sizes))]
        gate.set()
        for _ in sizes:
            slow.go_on()
        assert slow.waiting() == [] and found == [True] * len(sizes) and slow.refused == []
        slow.begin(peer("later"), lambda: True, found.append, 1)
        slow.go_on()
        assert len(found) == len(sizes) + 1


@pytest.mark.parametrize("turned", [False, True])
def test_refused_work_keeps_no_memory(turned: bool) -> None:
    read: list[weakref.ref[np.ndarray]] = []

    def broken() -> None:
        weights = np.zeros(1000)
        read.append(weakref.ref(weights))
        raise (ValueError if turned else BadRequest)(f"{len(weights)} weights are wrong")

    def work() -> None:
        try:
            broken()
        except ValueError as error:
            raise BadRequest(str(error)) from None

    gc.collect()
    gc.disable()  # a large adapter must not stay until the next collection
    try:
        with answers(2) as slow:
            slow.begin(peer("x"), work, lambda _: None)
            slow.go_on()
            assert slow.refused == [("x", "bad_request")]
            assert read[0]() is None
    finally:
        gc.enable()


def test_a_fault_is_an_internal_error_and_the_next_message_is_answered() -> None:
    found = list[int]()
    with answers(1) as slow:
        slow.begin(peer("x"), lambda: [][1], found.append)
        slow.go_on()
        slow.begin(peer("y"), lambda: 7, lambda value: found.append(value // 0))
        slow.go_on()
        slow.begin(peer("z"), lambda: 7, found.append)
        slow.go_on()
        assert slow.refused == [("x", "internal"), ("y", "internal")] and found == [7]
