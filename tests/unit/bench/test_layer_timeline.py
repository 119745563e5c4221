"""The time line of a layer: what overlaps counts once, and layers that differ are refused."""

import pytest

from scripts.bench.layer_timeline import KernelTime, layer_timeline


def trace(layers: int = 8, steps: int = 2) -> list[dict]:
    """Each layer: `attend` for 4, `product` that is there 1 earlier and ends 5 later, `norm` 2 after a gap of 1."""
    events, now = [], 0.0
    for _ in range(steps):
        events.append({"name": "begin", "ts": now, "dur": 3.0})
        now += 3
        for _ in range(layers):
            events.append({"name": "attend", "ts": now, "dur": 4.0})
            events.append({"name": "product", "ts": now + 3, "dur": 6.0})
            events.append({"name": "norm", "ts": now + 10, "dur": 2.0})
            now += 12
    return events


def test_what_kernels_add_is_the_layers_time():
    found = layer_timeline(trace(), 2, "attend")
    assert found == [
        KernelTime("attend", 0.0, 4.0, 4.0),
        KernelTime("product", -1.0, 6.0, 5.0),
        KernelTime("norm", 1.0, 2.0, 3.0),
    ]
    assert sum(kernel.adds_us for kernel in found) == 12


def test_a_kernel_that_ends_before_the_one_before_it_adds_nothing():
    events = trace()
    for event in events:
        if event["name"] == "product":
            event["dur"] = 0.5
    assert [kernel.adds_us for kernel in layer_timeline(events, 2, "attend")] == [4.0, 0.0, 8.0]


def test_kernels_that_are_no_equal_steps_are_refused():
    with pytest.raises(ValueError, match="2 equal steps"):
        layer_timeline(trace()[:-1], 2, "attend")
    events = trace()
    events[11]["name"] = "other"
    with pytest.raises(ValueError, match="layers differ"):
        layer_timeline(events, 2, "attend")
