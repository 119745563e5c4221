"""Preempted sequences that end, copies that fail, engines that are rebuilt: nothing leaks, no token is lost."""

import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.messages.to_engine import Cancel
from tests.support.engine.offloading import assert_as_if_undisturbed, counts, offloading, submit_six
from tests.support.engine.streams import BROKEN_BUS, BrokenBus, LateDevice
from tests.support.kernels.grids import nightly


@pytest.mark.parametrize("extra", [0, 9, *nightly(3, 6, 12, 15, 18, 21)])
def test_cancelling_at_any_moment_leaks_nothing(model, prompt_of, extra):
    """While pages are copied out, copied back, or a row waits; with late copies."""
    bench = offloading(model, device=LateDevice({"kv_out": lambda: 0.002, "kv_in": lambda: 0.004}), piece_pages=1)
    submit_six(bench, prompt_of)
    bench.tick_while(lambda: not (counts(bench).restored if extra > 10 else counts(bench).offloaded))
    bench.ticks(extra % 12)
    for i in range(5):
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
    bench.run()
    assert bench.completions["r5", 0].finish.reason == "length" and len(bench.tokens("r5")) == 60


@pytest.mark.parametrize("where", ["device", "enqueue"])
@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("piece", [2, *nightly(0)])
def test_a_copy_that_fails_ends_in_computing_again(model, prompt_of, direction, where, piece):
    bench = offloading(model, device=BrokenBus(f"kv_{direction}", piece, enqueued=where == "enqueue"))
    submit_six(bench, prompt_of)
    bench.run()
    assert BROKEN_BUS in bench.engine.parts.tier.failure
    assert counts(bench).restored < bench.engine.roster.counters.preemptions
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_a_rebuilt_engine_offloads_again_to_the_same_host_memory(model, prompt_of, greedy):
    from tests.support.engine.faults import fail_a_step

    bench = offloading(model, device=LateDevice({"kv_out": lambda: 0.005, "kv_in": lambda: 0.005}))
    submit_six(bench, prompt_of)
    bench.tick_until(lambda: counts(bench).offloaded)
    message, memory, offloaded = fail_a_step(bench), bench.engine.executor.mover.host_memory, counts(bench).offloaded
    for i in range(6):
        completion = bench.completions[f"r{i}", 0]
        assert completion.finish is not None and completion.finish.error in (message, None)
    rebuild_engine(bench.engine, bench.settings)
    assert bench.engine.executor.mover.host_memory is memory and counts(bench).offloaded == offloaded
    for i in range(6):
        bench.submit(f"again{i}", prompt_of(10, i), 60)
    bench.run()
    assert counts(bench).restored > 0
    for i in range(6):
        assert bench.tokens(f"again{i}") == greedy(prompt_of(10, i), 60)


def test_the_check_sees_a_leaked_host_page(model, prompt_of):
    bench = offloading(model)
    submit_six(bench, prompt_of)
    bench.run()
    bench.engine.parts.tier.offload.host.take()
    with pytest.raises(AssertionError, match="host page"):
        bench.engine.check_integrity()
    bench.close(check=False)
