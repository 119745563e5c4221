"""The memory by which pieces of an update go to followers: whose memory is used again, and in which order they go."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.ranks.device_relay import DeviceBacking
from rollout.ranks.relay import HostBacking, RelayMemory, RelaySizes
from rollout.ranks.ring import SharedMemory
from tests.support.bridge.file_memory import FileMemory

KIB = 1 << 10


class Event:
    """In the place of a device's: copies are done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Followers:
    """Notes what is given; `taken` is how much of it all followers have taken."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int, int]] = []
        self.taken = 0

    def give(self, start: int, nbytes: int, at: int) -> int:
        self.given.append((start, nbytes, at))
        return len(self.given)


@pytest.fixture
def followers() -> Followers:
    return Followers()


def relay_of(followers: Followers, most: int) -> RelayMemory:
    place = HostBacking(SharedMemory.create("pieces", 0), torch.device("cpu"))
    return RelayMemory(place, lambda: followers.taken, followers.give, RelaySizes(most, KIB))


@pytest.mark.parametrize("seed", range(8))
def test_memory_is_used_again_only_when_all_have_read_it(followers: Followers, seed: int) -> None:
    draws = random.Random(seed)
    relay = relay_of(followers, draws.choice([KIB, 5 * KIB]))
    relay.open(KIB, 1 << 20)
    unread: dict[int, tuple[int, int, Any]] = {}  # of pieces that somebody may still read: begin, end, event of rank 0
    stream, waited = 0, 0
    for number in range(1, 400):
        while not relay.has_room():
            waited += 1
            if followers.taken < len(followers.given):
                followers.taken += 1
            for _, _, event in unread.values():
                event.done |= draws.random() < 0.5
            unread = {n: piece for n, piece in unread.items() if n > followers.taken or not piece[2].done}
        nbytes, read = draws.randrange(1, KIB + 1), Event()
        memory = relay.reserve(nbytes)
        memory.fill_(number % 251)
        relay.pass_on(stream, None, read)  # type: ignore[arg-type]
        assert followers.given[-1][:2] == (stream, nbytes)
        begin = followers.given[-1][2]
        assert all(begin + nbytes <= other or end <= begin for other, end, _ in unread.values()), "memory in use"
        unread[number], stream = (begin, begin + nbytes, read), stream + nbytes
        read.done = draws.random() < 0.5
        followers.taken += draws.random() < 0.3 and followers.taken < len(followers.given)
        unread = {n: piece for n, piece in unread.items() if n > followers.taken or not piece[2].done}
    assert waited > 0 and relay.all_given()


def test_a_piece_that_a_device_writes_is_given_when_it_is_written_and_later_ones_after_it(followers: Followers) -> None:
    relay = relay_of(followers, 4 * KIB)
    relay.open(KIB, 1 << 20)
    written = Event()
    for start, event in ((0, written), (KIB, None)):
        assert relay.has_room()
        relay.reserve(KIB)
        relay.pass_on(start, event, event)  # type: ignore[arg-type]
    assert followers.given == [] and not relay.all_given()
    written.done = True
    assert relay.all_given() and [start for start, *_ in followers.given] == [0, KIB]


def test_what_was_not_given_of_a_dropped_update_never_is(followers: Followers) -> None:
    relay = relay_of(followers, 2 * KIB)
    relay.open(KIB, 1 << 20)
    pending = Event()
    for start, event in ((0, None), (KIB, pending)):
        assert relay.has_room()
        relay.reserve(KIB)
        relay.pass_on(start, event, event)  # type: ignore[arg-type]
    relay.drop()
    assert pending.done, "its memory is not written any more"
    relay.open(KIB, 1 << 20)
    followers.taken = 1
    assert relay.has_room() and relay.all_given() and [start for start, *_ in followers.given] == [0]


def test_memory_on_a_device_is_freed_once_all_followers_have_unmapped_it(tmp_path: Path) -> None:
    told, answers = list[int](), dict[int, bool]()
    files = lambda: len(list(tmp_path.iterdir()))  # noqa: E731

    def tell(handle: bytes, nbytes: int) -> int:
        told.append(nbytes)
        answers.clear()
        return len(told)

    def answered(order: int) -> list[bool] | None:
        return list(answers.values()) if order == len(told) and len(answers) == 2 else None

    def answer(follower: int, mapped: bool = True) -> None:
        answers[follower] = mapped

    place = DeviceBacking(FileMemory(tmp_path), tell, answered)

    place.grow(64)
    assert place.usable is None
    for follower in (0, 1):
        answer(follower)
    assert place.usable and files() == 1
    place.grow(128)  # in the place of the first one, which followers have mapped
    answer(0)
    assert place.usable is None and files() == 2
    answer(1)
    assert place.usable and files() == 1 and place.free() == 0
    place.unmap()
    assert told == [64, 128, 0]
    answer(0)
    assert place.free() == 0 and files() == 1
    answer(1)
    assert place.free() == 128 and files() == 0 and place.free() == 0
    place.grow(64)
    answer(0)
    answer(1, mapped=False)
    assert place.usable is False and files() == 1  # it is given back at the next sleep
    place.unmap()
    for follower in (0, 1):
        answer(follower)
    assert place.free() == 64 and files() == 0


def test_memory_grows_when_no_piece_is_in_use(followers: Followers) -> None:
    relay = relay_of(followers, KIB)
    relay.open(KIB, 1 << 20)
    assert relay.has_room()
    relay.reserve(KIB)
    relay.pass_on(0, None, None)
    relay.open(16 * KIB, 1 << 20)
    assert not relay.has_room()
    followers.taken = 1
    assert relay.has_room() and relay.reserve(16 * KIB).numel() == 16 * KIB
