"""Many adapters over few slots: each row has the tokens of an engine that has its adapter alone."""

from typing import Any

import pytest

from rollout.engine.messages.to_engine import DropAdapter, PutAdapter
from rollout.engine.messages.to_service import Done
from rollout.engine.schedule.preemption import change_weights
from rollout.models.lora_slots import AdapterWeights
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.adapted import table_of, versions_of
from tests.support.engine.harness import load, prompt_of
from tests.support.engine.sleeping import Sleeping
from tests.support.kernels.grids import nightly

TURNS, NEW = 3, 6


def weights_of(model: Any, i: int) -> AdapterWeights:
    return random_adapter(model.spec, 16, model.embed.dtype, i, 0.2)


def bench_of(model: Any, names: list[int], slots: int, **engine: Any) -> Sleeping:
    bench = Sleeping(model, adapter_slots=slots, adapter_rank=16, max_adapters=128, **engine)
    for i in names:
        bench.engine.inbox.put(PutAdapter(f"a{i}", weights_of(model, i)))
    return bench


def alone(folder: Any, i: int, prompts: list[list[int]]) -> list[Any]:
    """The completions of these prompts by an engine with one adapter, without caches."""
    bench = bench_of(load(folder), [i], 1, prefix_cache=False)
    for turn, prompt in enumerate(prompts):
        bench.submit(f"t{turn}", prompt, NEW, adapter=f"a{i}")
    bench.run()
    found = [bench.completions[f"t{turn}", 0] for turn in range(len(prompts))]
    bench.close()
    return found


def agrees(got: Any, expected: Any) -> bool:
    """Equal tokens, up to two that are equally likely within rounding."""
    for i, (token, other) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)):
        if abs(got.logprobs[i] - expected.logprobs[i]) > 1e-3:
            return False
        if token != other:
            return True
    return True


@pytest.mark.parametrize(("count", "slots"), [(12, 3), *nightly((100, 8))])
def test_conversations_of_many_adapters_go_on_through_evictions_a_sleep_and_a_new_base(folders, count, slots):
    """Each adapter loses its slot in each turn. All prompts begin alike, so that prefixes could be mixed up."""
    bench = bench_of(load(folders[0]), list(range(count)), slots, max_rows=3 * slots, kv_pages=64 * count)
    prompts = {(i, which): prompt_of(10) for i in range(count) for which in "sp"}  # with a session, and without
    asked: dict[tuple[int, str], list[list[int]]] = {key: [] for key in prompts}
    said: dict[tuple[int, str], list[Any]] = {key: [] for key in prompts}
    for turn in range(TURNS):
        for (i, which), prompt in prompts.items():
            kept = {"session": ("c", f"s{i}"), "session_lease_s": 1000.0} if which == "s" else {}
            asked[i, which].append(prompt)
            bench.submit(f"{i}{which}{turn}", prompt, NEW, adapter=f"a{i}", **kept)
        if turn == 1:
            bench.ticks(4)
            assert isinstance(bench.sleep(), Done)
            assert isinstance(bench.wake(), Done)
        bench.run()
        for i, which in prompts:
            said[i, which].append(bench.completions[f"{i}{which}{turn}", 0])
            prompts[i, which] = [*prompts[i, which], *said[i, which][-1].token_ids, 3]
        if turn == 1:
            change_weights(bench.engine.roster, 1, recompute=False)
    assert not any(bench.done[f"{i}s{TURNS - 1}"].cached_tokens for i in range(count)), "KV of the old base"
    assert table_of(bench).counts.loaded >= TURNS * count, "each adapter comes back in each turn"
    for i in range(count):
        expected = alone(folders[0], i, asked[i, "s"] + asked[i, "p"])
        assert all(map(agrees, said[i, "s"] + said[i, "p"], expected)), f"adapter {i}"
    assert len({tuple(turns[0].token_ids) for (_, which), turns in said.items() if which == "s"}) > count // 2


def test_versions_rise_amid_runs_of_many_adapters_and_a_name_comes_again(folders):
    """The odd ones get the weights of their neighbours while their rows run or wait; then names are given away."""
    model, count = load(folders[0]), 8
    bench = bench_of(model, list(range(count)), 2, max_rows=4)
    for i in range(count):
        bench.submit(f"r{i}", prompt_of(9), 20, adapter=f"a{i}")
    bench.ticks(6)
    for i in range(1, count, 2):
        bench.engine.inbox.put(PutAdapter(f"a{i}", weights_of(model, i + 1), version=5))
    bench.run()
    for i in range(count):
        versions = versions_of(bench, f"r{i}")
        assert versions == sorted(versions) and set(versions) <= ({0, 5} if i % 2 else {0})
    ran, waited = versions_of(bench, "r1"), versions_of(bench, "r7")
    assert ran[0] == 0 and ran[-1] == 5 and waited == [5] * 20
    expected = {i: alone(folders[0], i, [prompt_of(9)])[0].token_ids for i in (0, 2, 4, 6, 8)}
    assert bench.tokens("r7")[:NEW] == expected[8] and bench.tokens("r6")[:NEW] == expected[6]
    for i in range(count):
        bench.engine.inbox.put(DropAdapter(f"a{i}", 50 + i))
    bench.engine.inbox.put(PutAdapter("a0", weights_of(model, 4), token=90))
    bench.complete("again", prompt_of(9), NEW, adapter="a0")
    assert bench.answer(90) == Done(90) and bench.done["again"].cached_tokens == 0
    assert bench.tokens("again") == expected[4] and [a.name for a in bench.status().adapters] == ["a0"]
