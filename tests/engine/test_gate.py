"""The gate's table: what each state blocks, how the states combine, and who gets an answer when."""

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

from rollout.engine import gate as gate_module
from rollout.engine.gate import Gate
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_service import Done


def request(min_version: int = 0) -> Request:
    return Request(("c", "r"), Prompt.of_tokens(np.array([1], np.int32)), 4, min_version=min_version)


def granted(gate: Gate) -> None:
    gate.request_hold(lambda: None)
    gate.grant_hold()


def stale(gate: Gate) -> None:
    granted(gate)
    gate.fail_hold("half an update")


def asleep(gate: Gate, requests: str = "wait") -> None:
    gate.fall_asleep(1, requests)
    gate.slept(1)


#: state: launch, apply, admit, begin an update, name in a status
TABLE: dict[str, tuple[Callable[[Gate], object], tuple[bool, bool, bool, bool, str]]] = {
    "open": (lambda gate: None, (True, True, True, True, "serving")),
    "draining": (lambda gate: gate.drain(None), (True, True, False, True, "draining")),
    "paused": (lambda gate: gate.pause(1), (False, True, True, True, "paused")),
    "falling": (lambda gate: gate.fall_asleep(1, "wait"), (False, True, True, False, "asleep")),
    "falling, refusing": (lambda gate: gate.fall_asleep(1, "refuse"), (False, True, False, False, "asleep")),
    "asleep": (asleep, (False, False, True, False, "asleep")),
    "asleep, refusing": (lambda gate: asleep(gate, "refuse"), (False, False, False, False, "asleep")),
    "wanted": (lambda gate: gate.request_hold(lambda: None), (False, True, True, True, "serving")),
    "granted": (granted, (False, True, True, True, "serving")),
    "stale": (stale, (False, True, True, True, "stale")),
    "dropped": (lambda gate: gate.lose_weights("dropped"), (False, True, True, True, "stale")),
    "swapping": (lambda gate: gate.swap_begins(), (True, False, True, True, "serving")),
    "recomputing": (lambda gate: gate.note_recomputing(True), (True, False, True, True, "serving")),
}


@pytest.mark.parametrize("state", TABLE)
def test_each_state_allows_its_actions(state):
    gate = Gate(takes_weights=True)
    change, expected = TABLE[state]
    change(gate)
    launch, admit = not gate.blocked, gate.refusal(request(), 0) is None
    assert (launch, gate.may_apply, admit, gate.admit_update(), gate.state) == expected


def test_the_table_of_the_docstring_has_what_each_state_allows():
    assert gate_module.__doc__ is not None
    head, *lines = gate_module.__doc__.partition("    state ")[2].partition("\n\n")[0].splitlines()
    assert re.split(r"\s{2,}", head.strip()) == [
        "launch a step",
        "apply an update",
        "admit a request",
        "begin an update",
    ]
    listed = {line.split()[0]: re.findall(r"yes|no|as ordered", line.strip().partition(" ")[2]) for line in lines}
    expected = {}
    for state, (_, (*allowed, _)) in TABLE.items():
        expected[state] = ["yes" if each else "no" for each in allowed]
        if f"{state}, refusing" in TABLE:
            assert allowed[2] and not TABLE[f"{state}, refusing"][1][2]
            expected[state][2] = "as ordered"
    assert expected.pop("open") == ["yes"] * 4 and expected.pop("dropped") == expected["stale"]
    assert listed == {state: each for state, each in expected.items() if not state.endswith("refusing")}


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("paused", "falling", "asleep"),
        ("stale", "paused", "paused"),
        ("stale", "falling", "asleep"),
        ("falling", "draining", "draining"),
        ("stale", "draining", "draining"),
    ],
)
def test_the_state_in_a_status_is_the_one_that_ends_last(first, second, name):
    for order in ((first, second), (second, first)):
        gate = Gate()
        for state in order:
            TABLE[state][0](gate)
        assert gate.state == name


@pytest.mark.parametrize("state", ["paused", "falling", "wanted", "granted", "stale", "dropped"])
def test_recomputation_delays_no_update_while_no_step_may_be_launched(state):
    gate = Gate(takes_weights=True)
    gate.note_recomputing(True)
    assert not gate.may_apply and gate.update_waits_for == "recompute"
    TABLE[state][0](gate)
    assert gate.may_apply and gate.update_waits_for is None


def test_an_update_waits_for_a_wake_and_for_the_swap_before_it():
    gate = Gate(takes_weights=True)
    gate.note_recomputing(True)
    gate.swap_begins()
    assert gate.update_waits_for == "swap"
    gate.swap_ends()
    asleep(gate)
    assert gate.update_waits_for == "wake"
    gate.wake_up()
    gate.note_recomputing(False)
    assert gate.update_waits_for is None


def test_a_hold_counts_as_a_swap_and_not_as_rest():
    gate = Gate()
    granted(gate)
    assert gate.blocked == "held" and not gate.at_rest
    gate.fail_hold("half an update")
    assert gate.blocked == "stale" and gate.at_rest
    gate.request_hold(lambda: None)  # the update that cures it
    assert gate.blocked == "stale" and gate.hold == "granted"
    gate.clear_hold()
    assert not gate.blocked and gate.stale == ""


def test_a_pause_is_confirmed_once_no_step_is_in_flight():
    gate = Gate()
    gate.pause(1)
    gate.pause(2)
    assert gate.take_answers(in_flight=1, unfinished=5) == []
    assert gate.take_answers(in_flight=0, unfinished=5) == [Done(1), Done(2)]
    assert gate.take_answers(in_flight=0, unfinished=5) == []


def test_a_resume_confirms_the_pauses_that_wait():
    gate = Gate()
    gate.pause(1)
    assert gate.resume(2) == [Done(1), Done(2)]
    assert not gate.blocked and gate.take_answers(in_flight=0, unfinished=0) == []


def test_a_drain_ends_a_pause_and_stops_when_nothing_is_left():
    gate = Gate()
    gate.pause(1)
    gate.drain(2)
    gate.pause(3)
    assert not gate.blocked, "a paused request could never finish"
    assert gate.take_answers(in_flight=0, unfinished=1) == [Done(1), Done(3)] and not gate.stopped
    assert gate.take_answers(in_flight=1, unfinished=0) == [] and not gate.stopped
    assert gate.take_answers(in_flight=0, unfinished=0) == [Done(2)] and gate.stopped


def test_the_drain_deadline_is_that_of_the_first_shutdown():
    now_s = [100.0]
    gate = Gate(drain_s=30.0, clock=lambda: now_s[0])
    assert not gate.drain_overdue
    gate.drain(1)
    now_s[0] = 129.0
    gate.drain(2)
    assert not gate.drain_overdue
    now_s[0] = 130.0
    assert gate.drain_overdue and gate.fail() == [Done(1), Done(2)]


def test_no_hold_is_granted_during_a_swap():
    gate, grants = Gate(), []
    gate.swap_begins()
    gate.request_hold(lambda: grants.append(1))
    gate.grant_hold()
    assert grants == []
    gate.swap_ends()
    gate.grant_hold()
    assert grants == [1]


def test_the_loop_is_told_of_what_it_has_to_act_on():
    told = []

    def notify():
        assert not gate._lock.locked()
        told.append((gate.blocked, gate.update_inside))

    gate = Gate(notify=notify)
    gate.request_hold(lambda: None)
    assert told.pop() == ("held", False), "it grants the hold"
    gate.grant_hold()
    gate.request_hold(lambda: None)
    assert told == [], "granted at once: the loop has nothing to do"
    gate.clear_hold()
    assert told.pop() == ("", False), "it generates again"
    gate.updates_done()
    assert told == [], "there was no update"
    gate.admit_update()
    gate.fall_asleep(1, "wait")
    gate.updates_done()
    assert told == [("asleep", False)], "the sleep may go on"


def test_a_deeper_sleep_may_be_ordered_while_asleep():
    gate = Gate()
    gate.fall_asleep(1, "wait")
    gate.slept(77)
    gate.fall_asleep(2, "refuse")
    gate.fall_asleep(1, "refuse")
    status = gate.sleep_status()
    assert gate.asleep and (status.level, status.requests, status.freed_bytes) == (2, "refuse", 77)
    gate.wake_up()
    assert gate.sleep_status() is None and not gate.blocked


def test_an_update_is_inside_or_the_sleep_knows_that_it_is_not():
    """Begins from another thread against sleeps: no begin is admitted after the order."""
    for _ in range(300):
        gate, admitted = Gate(), []
        thread = threading.Thread(target=lambda gate=gate, admitted=admitted: admitted.append(gate.admit_update()))
        thread.start()
        gate.fall_asleep(1, "wait")
        inside = gate.update_inside
        thread.join()
        assert admitted == [inside]
