"""What the Chrome trace event format asks of a file of JSON objects."""

import json

from rollout.metrics.chrome_trace import TRACKS


def check_chrome_trace(trace: dict) -> list[dict]:
    """Assert what the Chrome trace event format asks of JSON objects; gives the slices."""
    json.dumps(trace, allow_nan=False)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "C", "M")
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert isinstance(event["ts"], float) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], float) and event["dur"] >= 0 and event["cat"]
        else:
            assert all(type(value) is int for value in event["args"].values()) and len(event["args"]) == 1
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for track in TRACKS.values():
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices if event["tid"] == track.tid)
        for (_, end), (begin, _) in zip(own, own[1:], strict=False):
            assert begin >= end - 0.002, "slices of one track overlap"
    return slices
