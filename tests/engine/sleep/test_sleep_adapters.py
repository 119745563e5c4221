"""Adapters across a sleep: rows have the tokens of a run that never slept, slots hold nothing that is stale."""

import pytest

from rollout.engine.messages.to_engine import PutAdapter
from rollout.engine.messages.to_service import Done
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.adapted import table_of
from tests.support.engine.harness import load
from tests.support.engine.sleeping import Sleeping


@pytest.mark.parametrize("sleeps, host_kv_gib", [((2, 9, 20), 0.0), ((1, 3, 4), 0.0), ((2, 9, 20), 0.001)])
def test_rows_of_several_adapters_have_the_tokens_of_a_run_that_never_slept(folders, prompt_of, sleeps, host_kv_gib):
    tokens = []
    for at in ((), sleeps):
        model = load(folders[0])
        bench = Sleeping(model, adapter_slots=2, adapter_rank=16, host_kv_gib=host_kv_gib)
        for i in range(3):  # more than there are slots
            weights = random_adapter(model.spec, 16, model.embed.dtype, i, 0.3)
            bench.engine.inbox.put(PutAdapter(f"a{i}", weights, token=i))
        for i in range(5):
            bench.submit(f"r{i}", prompt_of(12), 25, adapter=f"a{i % 3}" if i < 4 else None)
        for ticks in at:
            bench.ticks(ticks)
            assert isinstance(bench.sleep(), Done)
            table = table_of(bench)
            assert not any(adapter.in_slot for adapter in table.known.values())
            if ticks == 9:  # a newer version of one comes meanwhile, the same weights
                again = random_adapter(model.spec, 16, model.embed.dtype, 1, 0.3)
                bench.engine.inbox.put(PutAdapter("a1", again, token=77))
                bench.ticks(2)
                assert bench.answer(77) == Done(77)
            assert isinstance(bench.wake(), Done)
        bench.run()
        tokens.append([bench.tokens(f"r{i}") for i in range(5)])
        bench.close()
    assert tokens[0] == tokens[1] and len({tuple(some) for some in tokens[0]}) == 4, "each adapter has its own"
