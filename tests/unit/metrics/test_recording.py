"""Recorded steps as columns, as a Chrome trace, and as shares of who worked when."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rollout.metrics.chrome_trace import TRACKS, chrome_trace
from rollout.metrics.meter import Meter
from rollout.metrics.overlap import clipped, device_intervals, host_intervals, overlap, shares
from rollout.metrics.recording import Recording
from rollout.metrics.step_timing import StepTiming, SwapTiming
from tests.support.chrome_format import check_chrome_trace
from trainer_bridge.wire.codec import REPLY_LIMITS, decode, encode


def step(at: float, **fields) -> StepTiming:
    """A step planned at `at` that runs from 1 to 4 ms after that; commit and the end of its turn take 1 ms each."""
    base: dict = dict(kind="decode", rows=8, zombie_rows=1, tokens=7, plan_s=0.0002, launch_s=0.0003, commit_s=0.001)
    moments = dict(start_s=at + 0.001, end_s=at + 0.004, planned_at_s=at, committed_at_s=at + 0.005)
    spans = dict(h2d=(at + 0.0004, at + 0.0006), d2h=(at + 0.004, at + 0.0045), finalized_at_s=at + 0.007)
    return StepTiming(**(base | moments | spans | dict(version=3) | fields))


STEPS = [step(100.0), step(100.01, kind="prefill", version=4), step(100.02, h2d=None, d2h=None, finalized_at_s=None)]
SWAPS = [SwapTiming(3, 90.0, 90.5), SwapTiming(4, 100.007, 100.008)]


def test_a_recording_survives_the_wire():
    sent = Recording.of(STEPS, SWAPS)
    assert sent.steps[0].planned_at_s == 0.0 and sent.swaps == (SwapTiming(4, *sent_times(SWAPS[1])),)
    received = Recording.from_fields(decode(encode({"v": 1} | sent.to_fields()), REPLY_LIMITS))
    assert received == sent
    assert received.steps[2].h2d is None and received.steps[2].finalized_at_s is None


def test_the_wait_for_masks_is_the_hosts_in_the_trace():
    steps = [step(100.0, mask_wait=(100.002, 100.0035)), step(100.01)]
    received = Recording.from_fields(Recording.of(steps, []).to_fields())
    assert received.steps[0].mask_wait == pytest.approx((0.002, 0.0035)) and received.steps[1].mask_wait is None
    compute = [e for e in chrome_trace(received, "w")["traceEvents"] if e.get("cat") == "compute"]
    assert [event["dur"] for event in compute] == pytest.approx([1000, 500, 3000])
    host = [(begin, end) for begin, end in host_intervals(received.steps) if begin < 0.003 < end]
    assert host == [pytest.approx((0.002, 0.0035))]
    assert [span for span in device_intervals(received.steps) if span[0] < 0.003 < span[1]] == []


def sent_times(swap: SwapTiming) -> tuple[float, float]:
    return swap.start_s - 100.0, swap.end_s - 100.0


def test_a_recording_without_steps_is_one():
    empty = Recording.of([], SWAPS)
    assert Recording.from_fields(empty.to_fields()) == empty and empty.steps == () == empty.swaps


@pytest.mark.parametrize(
    "breaks",
    [
        lambda fields: fields.pop("origin_s"),
        lambda fields: fields.update(origin_s=math.nan),
        lambda fields: fields.update(steps=[]),
        lambda fields: fields["steps"].pop("rows"),
        lambda fields: fields["steps"].update(rows=np.zeros(7)),
        lambda fields: fields["steps"].update(rows=3),
        lambda fields: fields["steps"].update(kind=np.full(3, 2, np.uint8)),
        lambda fields: fields["steps"].update(end_s=np.full(3, np.nan)),
        lambda fields: fields["steps"].update(h2d_end_s=np.full(3, np.inf)),
        lambda fields: fields["swaps"].update(version=np.zeros((1, 1))),
    ],
)
def test_a_recording_that_no_worker_sends_is_refused(breaks):
    fields = Recording.of(STEPS, SWAPS).to_fields()
    breaks(fields)
    with pytest.raises(ValueError, match="recording"):
        Recording.from_fields(fields)


def test_the_trace_has_every_phase_on_its_track():
    slices = check_chrome_trace(chrome_trace(Recording.of(STEPS, SWAPS), "a worker"))
    first = {event["name"]: event for event in slices if event["args"].get("step") == 0}
    assert {name: TRACKS["loop"].tid for name in ("plan", "launch", "commit", "finalize")}.items() <= {
        name: event["tid"] for name, event in first.items()
    }.items()
    times = {name: (round(event["ts"], 1), round(event["dur"], 1)) for name, event in first.items()}
    assert times == {
        "plan": (0.0, 200.0),
        "launch": (200.0, 300.0),
        "h2d": (400.0, 200.0),
        "decode": (1000.0, 3000.0),
        "d2h": (4000.0, 500.0),
        "commit": (5000.0, 1000.0),
        "finalize": (6000.0, 1000.0),
    }
    (swap,) = (event for event in slices if event["name"] == "swap")
    assert (swap["tid"], round(swap["ts"], 1), swap["args"]) == (TRACKS["swap"].tid, 7000.0, {"version": 4})
    assert [event["name"] for event in slices if event["tid"] == TRACKS["compute"].tid] == [
        "decode",
        "prefill",
        "decode",
    ]


def test_the_trace_says_what_its_tracks_mean():
    trace = chrome_trace(Recording.of(STEPS, SWAPS), "a worker")
    titles = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert trace["otherData"]["legend"].keys() == titles | counters


def test_rows_and_zombies_are_counters():
    events = chrome_trace(Recording.of(STEPS, ()), "a worker")["traceEvents"]
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == [("rows", {"rows": 8}), ("zombie rows", {"zombie rows": 1})] * 3


def test_the_host_waits_while_there_is_nothing_to_launch():
    busy = [step(0.0), step(0.01)]
    assert [end for _, end in host_intervals(busy)][-1] == pytest.approx(0.017)
    assert any(begin < 0.009 < end for begin, end in host_intervals(busy))  # from a commit to the next launch
    idle = [replace(busy[0], idle_after=True), busy[1]]
    assert not any(begin < 0.009 < end for begin, end in host_intervals(idle))


def test_shares_are_of_the_whole_time():
    device, host = [(0.0, 2.0), (5.0, 6.0)], [(1.0, 3.0)]
    assert shares(overlap(device, host)) == pytest.approx(
        {"both": 100 / 6, "device": 200 / 6, "host": 100 / 6, "neither": 200 / 6}
    )
    assert clipped([(0.0, 1.0), (1.5, 4.0), (5.0, 6.0)], 2.0, 3.0) == [(2.0, 3.0)]


def test_the_meter_keeps_when_a_steps_turn_ended_and_the_swaps():
    meter = Meter(lambda: 200.0)
    first, second = replace(STEPS[0], finalized_at_s=None), replace(STEPS[1], finalized_at_s=None)
    meter.step(first)
    meter.finalized(100.5, True)
    meter.step(second)
    meter.swap(101.0, 101.25, 9)
    assert meter.recent_steps() == [replace(first, finalized_at_s=100.5, idle_after=True), second]
    assert meter.recent_steps(1) == [second] and meter.recent_steps(2) == meter.recent_steps()
    assert meter.recent_swaps() == [SwapTiming(9, 101.0, 101.25)]


def test_idle_shares_forget_what_is_older_than_ten_seconds():
    meter = Meter(lambda: 0.0)
    meter.step(step(1.0))  # there was no work until 1.0
    meter.no_work(1.01)
    assert meter.idle_shares(2.0)["no_work"] == pytest.approx(99.6, abs=0.2)
    busy = [step(2.0 + i, start_s=2.0 + i, end_s=3.0 + i, planned_at_s=2.0 + i) for i in range(22)]
    for record in busy:
        meter.step(record)
        shares_now = meter.idle_shares(record.end_s)
    assert shares_now["no_work"] == 0.0


def test_tokens_by_second_are_those_of_the_last_ten():
    meter = Meter(lambda: 100.0)
    for at, tokens in ((100.05, 5), (108.25, 7), (109.95, 11)):
        meter.step(step(at - 0.004, end_s=at, tokens=tokens))
    assert meter.tokens_by_second(109.99) == (5, 0, 0, 0, 0, 0, 0, 0, 7, 11)
    assert meter.tokens_by_second(200.0) == (0,) * 10
