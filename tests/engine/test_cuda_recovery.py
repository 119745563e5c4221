"""The engine on a GPU after its memory ran out amid generation."""

import pytest
import torch

from rollout.engine.build import rebuild_engine
from tests.support.engine.harness import Bench, load

pytestmark = pytest.mark.gpu


def test_an_engine_that_ran_out_of_memory_is_rebuilt_and_gives_the_same_tokens(folders, prompt_of):
    from rollout.engine.device.streams import make_device

    bench = Bench(load(folders[0], "cuda"), make_device("cuda"))
    bench.complete("before", prompt_of(9), 60)
    bench.submit("cut", prompt_of(9), 60)
    bench.ticks(20)
    execute = bench.engine.executor.execute

    def execute_and_run_out(upload, slot) -> None:
        execute(upload, slot)
        bench.engine.executor.compute.run(lambda: torch.empty(1 << 50, device="cuda"))

    bench.engine.executor.execute = execute_and_run_out
    with pytest.raises(torch.OutOfMemoryError) as caught:
        bench.run()
    bench.engine.fail(str(caught.value))
    cut = bench.tokens("cut")
    assert bench.completions["cut", 0].finish.reason == "error" and 5 <= len(cut) < 60
    for cache in bench.engine.executor.step.kv.k:
        cache.fill_(float("nan"))
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("after", prompt_of(9), 60)
    assert bench.tokens("after") == bench.tokens("before") and bench.tokens("before")[: len(cut)] == cut
