"""The soak: a short one is clean, and its ledger does not let pass what it is there to find."""

import asyncio
import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.check.soak.faults import EVERY_S, plan_faults
from scripts.check.soak.hostile import bad_message
from scripts.check.soak.ledger import Asked, Collector, Ledger, Place
from scripts.check.soak.run import soak
from tests.support.worker.harness import TEXTS, token_ids
from trainer_bridge.client.results import Chunk, Completion
from trainer_bridge.wire import codec as wire
from trainer_bridge.wire.errors import ConnectionLost

TEXT = " 18 19 20 21"
ASKED = Asked("test", "17:", len(TEXT))


@pytest.mark.nightly
def test_ten_seconds_of_traffic_and_faults_leave_nothing_wrong_lost_or_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROLLOUT_", "WANDB_"):
        monkeypatch.delenv(name, raising=False)
    report = asyncio.run(soak(10.0, 2, 7, 6, tmp_path, print))
    assert report.complaints == [] and report.clean
    assert report.restarts >= 1 and report.resumes + sum(report.excused.values()) > 0
    expected = {"worker killed", "connection cut", "client vanished", "bad message", "raw connection"}
    assert expected <= set(report.faults) and sum(report.finished.values()) > 5
    assert report.reclaimed > 0


# --- what the ledger must find ---------------------------------------------------------------------------------------


def completion(written: str = TEXT, **changes: Any) -> Completion:
    tokens = np.array(token_ids(written), np.int32)
    likely = np.full(len(tokens), -1e-6, np.float32)
    whole = Completion(0, tokens, likely, likely, [(0, len(tokens))], finish_reason="length", seed=1)
    return dataclasses.replace(whole, **changes)


def complaints(asked: Asked, found: Completion, published: set[int] | None = None) -> list[str]:
    ledger = Ledger(TEXTS.__getitem__)
    ledger.published |= published or set()
    ledger.check(asked, found)
    assert ledger.wrong_count == len(ledger.wrong)
    return ledger.wrong


def test_a_right_completion_is_counted_and_passes() -> None:
    assert complaints(ASKED, completion()) == []
    across = [(2, 6), (0, 6)]  # from one worker to another that was started again
    assert complaints(ASKED, completion(versions=across), {2}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": [(1, 12)]}, "expected"),
        ({"versions": [(4, 12)]}, "versions [4] were never published"),
        ({"text": " 18 19 20 2"}, "its text"),
        ({"finish_reason": "cancelled"}, "ended as cancelled"),
        ({"finish_reason": "error", "error": "broken"}, "broken"),
        ({"logprobs": np.full(12, np.nan, np.float32)}, "logprobs from nan"),
        ({"raw_logprobs": np.full(12, -1.0, np.float32)}, "raw_logprobs from -1"),
    ],
)
def test_what_is_wrong_is_complained_of(changes: dict[str, Any], message: str) -> None:
    (found, *_) = complaints(ASKED, completion(**changes), {1})
    assert message in found


def test_a_wrong_token_and_a_wrong_length_are_complained_of() -> None:
    assert "expected" in complaints(ASKED, completion(" 18 19 20 22"))[0]
    assert "expected" in complaints(ASKED, completion(" 18 19 19 20"))[0]  # a number twice
    assert "11 tokens of 12" in complaints(ASKED, completion(TEXT[:-1]))[0]
    assert "version from 2 on" in complaints(
        dataclasses.replace(ASKED, one_worker=True), completion(versions=[(2, 6), (0, 6)]), {2}
    )[0]  # fmt: skip


def test_a_stop_string_must_end_it_and_be_nowhere_before() -> None:
    asked = Asked("test", "17:", 40, ("stop", "length"), " 20 ")
    right = completion(" 18 19 20 ", finish_reason="stop", stop=" 20 ", text=" 18 19")
    assert complaints(asked, right) == []
    assert "is at 6 of 11" in complaints(asked, completion(" 18 19 20 2", finish_reason="stop"))[0]
    assert "' 20 ' is at 6" in complaints(dataclasses.replace(asked, max_tokens=12), completion())[0]


def test_a_token_twice_or_missing_in_a_stream_is_complained_of() -> None:
    whole = completion()

    def part(start: int, end: int) -> Chunk:
        return Chunk(start, completion(TEXT[start:end], finish_reason=None))

    for chunks, count in (([(0, 5), (5, 12)], 0), ([(0, 5), (4, 12)], 2), ([(0, 5), (6, 12)], 2), ([(0, 5)], 1)):
        ledger = Ledger(TEXTS.__getitem__)
        collector = Collector(ledger, "test")
        for start, end in chunks:
            collector.take(part(start, end))
        collector.compare(whole)
        assert ledger.wrong_count == count, chunks


def test_an_error_is_excused_by_a_fault_of_its_worker_only() -> None:
    ledger, now = Ledger(TEXTS.__getitem__), time.monotonic()
    place = Place(0, "tcp://a", "tcp://b")
    error = ConnectionLost("gone")
    ledger.excuse(place, now, True, error)
    assert ledger.wrong_count == 1
    place.cut_s = now
    ledger.excuse(place, now, False, error)  # it was not through the proxy
    assert ledger.wrong_count == 2
    ledger.excuse(place, now, True, error)
    place.back_s = now + 1
    ledger.excuse(place, now, False, error)
    assert ledger.wrong_count == 2 and ledger.excused == {"ConnectionLost": 2}
    ledger.excuse(place, now + 60, True, error)
    assert ledger.wrong_count == 3


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_same_seed_plans_the_same_faults() -> None:
    plan = plan_faults(3, 600.0, 2)
    assert plan == plan_faults(3, 600.0, 2) != plan_faults(4, 600.0, 2)
    kinds = [fault.kind for fault in plan]
    assert {*EVERY_S, "kill", "kill last"} == set(kinds) and kinds.count("kill") > 10
    assert max(fault.at_s for fault in plan if fault.kind == "kill last") < 0.2 * 600
    assert {fault.kind for fault in plan_faults(3, 15.0, 2)} >= {"kill", "cut", "vanish", "messages", "zmq"}


def test_the_id_of_a_bad_message_is_known() -> None:
    rng = random.Random(5)
    for number in range(500):
        frames, request_id = bad_message(rng, f"id-{number}")
        assert (wire.header_id(frames) or "") == request_id
