"""The meter's spans on a GPU against the profiler's: in the same steps, the same share of time has a step running."""

from __future__ import annotations

import pytest
import torch
from cuda_harness import load_bf16
from harness import Bench

from rollout.bench.profiled_steps import profile_steps, summarise
from rollout.engine.device import make_device

pytestmark = pytest.mark.gpu
STEPS = 48
MOST_POINTS = 1.0  # of a hundred, that the two may be apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bf16 model whose steps take long enough to be told apart from launches."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=40_009,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
    )
    path = tmp_path_factory.mktemp("meter")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("depth", [1, 2])
def test_the_meter_and_the_profiler_see_the_same_activity(folder, depth):
    bench = Bench(load_bf16(folder), make_device("cuda"), max_rows=8, page_size=16, kv_pages=400, pipeline_depth=depth)
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
    active = sum(step.end_s - step.start_s for step in steps) / (steps[-1].end_s - steps[0].start_s)
    assert len(steps) == STEPS
    assert abs(active - seen.active_share) * 100 <= MOST_POINTS, (active, seen)
    assert seen.kernel_share <= seen.active_share and seen.kernels > 12 * 5
    scheduler.paused = False
    bench.run()
    bench.close()
