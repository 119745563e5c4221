"""The meter's spans on a GPU against the profiler's: in the same steps, the same share of time has a step running."""

from __future__ import annotations

import statistics

import pytest
from harness import Bench

from rollout.bench.peers.ours_engine import load_random
from rollout.bench.profiled_steps import profile_steps, summarise
from rollout.engine.device import make_device

pytestmark = pytest.mark.gpu
STEPS = 48
MOST_POINTS = 1.0  # of a hundred, that the two may be apart
MOST_LATE_S = 2e-4


@pytest.mark.parametrize("depth", [1, 2])
def test_the_meter_and_the_profiler_see_the_same_activity(depth):
    """With a shape whose steps take long enough, 1.3 ms, to be told apart from launches."""
    device = make_device("cuda")
    model = load_random("qwen3-1.7b", device.torch_device).model
    bench = Bench(model, device, max_rows=8, page_size=16, kv_pages=400, pipeline_depth=depth)
    for i in range(8):
        bench.submit(f"r{i}", range(5, 25), 400, sampling={"temperature": 1.0, "seed": i})
    while len(bench.engine.scheduler.decoding) < 8 or bench.engine.meter.steps < 40:
        bench.engine.tick()

    scheduler, meter = bench.engine.scheduler, bench.engine.meter

    def come_to_rest() -> None:
        scheduler.paused = True
        while bench.engine.pipeline.in_flight:
            bench.engine.tick()

    def some_steps() -> None:
        scheduler.paused = False
        for _ in range(STEPS):
            bench.engine.tick()
        come_to_rest()

    come_to_rest()
    before = meter.steps
    events = profile_steps(some_steps)
    steps = meter.recent_steps()[-(meter.steps - before) :]
    seen = summarise(events, len(steps))
    assert len(steps) == STEPS and seen.kernels > 8 * 28
    active = sum(step.end_s - step.start_s for step in steps) / (steps[-1].end_s - steps[0].start_s)
    assert seen.kernel_share <= seen.active_share
    if depth == 2:
        assert abs(active - seen.active_share) * 100 <= MOST_POINTS, (active, seen)
    else:
        # A profiled launch into an idle device begins late, after the graph has recorded the step's start.
        late_s = statistics.mean(step.end_s - step.start_s for step in steps) - seen.step_s
        assert 0 <= late_s <= MOST_LATE_S, (late_s, seen)
    scheduler.paused = False
    bench.run()
    bench.close()
