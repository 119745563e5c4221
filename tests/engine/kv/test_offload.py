"""KV of preempted sequences goes to the host and comes back: the same tokens, and nothing computed twice."""

import random

import pytest
import torch

from rollout.engine.inspect import Inspector
from rollout.engine.messages.to_engine import Cancel
from tests.support.engine.harness import Bench, watch_prefills
from tests.support.engine.offloading import assert_as_if_undisturbed, counts, offloading, submit_six
from tests.support.engine.streams import LateDevice
from tests.support.kernels.grids import nightly


@pytest.mark.parametrize("depth", [1, 2])
def test_an_offloaded_sequence_resumes_without_recomputation(model, prompt_of, depth):
    bench = offloading(model, pipeline_depth=depth)
    prefills = watch_prefills(bench)
    submit_six(bench, prompt_of)
    bench.run()
    preemptions = bench.engine.roster.counters.preemptions
    assert preemptions > 0 and counts(bench).restored == counts(bench).offloaded == preemptions
    assert counts(bench).pages_out > 0 and counts(bench).pages_in > 0
    assert bench.engine.roster.counters.prompt_tokens == 6 * 10, "a return is no admission"
    assert sum(prefills) == 6 * 10 + preemptions, "each prompt once, and after a return the token that was drawn last"
    assert all(bench.completions[f"r{i}", 0].recomputed == () for i in range(6))
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_the_tokens_are_transformers(model, prompt_of, greedy):
    bench = offloading(model)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    assert counts(bench).restored > 0
    for i in range(6):
        assert bench.tokens(f"r{i}") == greedy(prompt_of(10, i), 60)


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 4))])
def test_late_streams_change_nothing(model, prompt_of, seed):
    rng = random.Random(seed)
    device = LateDevice({name: lambda: rng.random() * 0.001 for name in ("h2d", "compute", "d2h", "kv_out", "kv_in")})
    piece_pages = (1, 2, 7, 100)[seed]
    bench = offloading(model, piece_pages=piece_pages, device=device, pipeline_depth=1 + seed % 2)
    submit_six(bench, prompt_of)
    bench.run()
    assert counts(bench).restored > 0
    assert_as_if_undisturbed(bench, model, prompt_of)


@pytest.mark.parametrize("direction", ["out", "back"])
def test_the_tests_see_a_copy_that_is_not_waited_for(model, prompt_of, direction):
    """Out: pages are reused before they are copied. Back: rows go on before their KV is there."""
    late = {"out": "kv_out", "back": "kv_in"}[direction]
    bench = offloading(model, device=LateDevice({late: lambda: 0.05}))
    queue = getattr(bench.engine.executor.mover, direction)

    def hasty():
        over = list(queue.under_way)
        queue.under_way.clear()
        queue._spare += over
        return over

    queue.finished, bench.engine.parts.tier._note = hasty, lambda *of: None  # the real one reads the end time
    submit_six(bench, prompt_of)
    bench.run()
    with pytest.raises(AssertionError):
        assert_as_if_undisturbed(bench, model, prompt_of)
    bench.close(check=False)


def test_a_sequence_that_returns_waits_for_the_steps_in_flight(model):
    """A page may be given back while a step in flight still copies from it."""
    done: list[str] = []
    bench = offloading(model, device=LateDevice({"compute": lambda: 0.05, "kv_in": lambda: done.append("copy") or 0.0}))
    runner, mover = bench.engine.executor, bench.engine.executor.mover
    runner.compute.run(lambda: done.append("step"))
    mover.back.start([3], [5], None, mover.compute)
    mover.wait()
    assert done == ["step", "copy"] and len(mover.back.finished()) == 1


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_a_page_comes_back_as_it_was(model, kv_dtype):
    """Keys and values of all layers, scales of codes too; other pages are not touched."""
    page_bytes = model.spec.kv_bytes_per_token(torch.float8_e4m3fn if kv_dtype != "auto" else torch.float32) * 3
    bench = Bench(model, kv_pages=40, page_size=3, kv_dtype=kv_dtype, host_kv_gib=9 * page_bytes / 2**30)
    mover, tensors = bench.engine.executor.mover, bench.engine.executor.step.kv.tensors
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        noise = torch.randint(1, 100, tensor.shape, generator=generator)
        tensor.copy_(noise.to(tensor.dtype))
    before = [tensor.clone() for tensor in tensors]
    mover.out.start([7, 30, 2], [8, 0, 4], None)
    mover.wait()
    assert not mover.out.finished()[0].failure
    for tensor in tensors:
        tensor[[7, 30, 2]] = 0
    mover.back.start([11, 7], [8, 4], None, mover.compute)
    mover.wait()
    assert not mover.back.finished()[0].failure
    for tensor, was in zip(tensors, before, strict=True):
        was[11], was[7], was[30], was[2] = was[7].clone(), was[2].clone(), 0, 0
        assert torch.equal(tensor, was)


def test_fp8_kv_goes_and_comes_with_its_scales(model, prompt_of):
    runs = []
    for host_kv_gib in (0.001, 0.0):
        bench = Bench(model, kv_pages=40 if host_kv_gib else 600, kv_dtype="fp8_e4m3", host_kv_gib=host_kv_gib)
        submit_six(bench, prompt_of)
        bench.run()
        assert not host_kv_gib or counts(bench).restored > 0
        runs.append([bench.tokens(f"r{i}") for i in range(6)])
        bench.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("host_pages", [1, 12])
def test_a_sequence_that_finds_no_room_is_recomputed(model, prompt_of, host_pages):
    bench = offloading(model, host_pages=host_pages)
    prefills = watch_prefills(bench)
    submit_six(bench, prompt_of)
    bench.run()
    preemptions = bench.engine.roster.counters.preemptions
    assert counts(bench).refused > 0 and counts(bench).offloaded + counts(bench).refused == preemptions
    assert counts(bench).restored == counts(bench).offloaded and (counts(bench).offloaded > 0) == (host_pages > 1)
    assert sum(prefills) > 60 + preemptions
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_without_the_setting_nothing_is_offloaded(model, prompt_of):
    bench = Bench(model, kv_pages=40)
    submit_six(bench, prompt_of)
    bench.run()
    engine = bench.engine
    assert not engine.parts.tier.moving and engine.executor.mover is None
    assert engine.roster.counters.preemptions > 0 and bench.status().offload.pages_total == 0


@pytest.mark.parametrize(("gib", "message"), [(1e-7, "holds no page of"), (1e6, "this machine has")])
def test_host_memory_for_less_than_a_page_is_refused_with_the_numbers(model, gib, message):
    with pytest.raises(ValueError, match=message):
        Bench(model, host_kv_gib=gib)


# --- status and metrics ---


def test_status_and_gauges_count_moved_sequences(model, prompt_of):
    bench = offloading(model, prefix_cache=False)  # known pages are not moved
    submit_six(bench, prompt_of)
    bench.tick_until(lambda: counts(bench).offloaded)
    status = bench.status().offload
    assert status.sequences >= 1 and 0 < status.pages < status.pages_total == 512
    bench.run()
    status, page_bytes = bench.status().offload, bench.engine.executor.mover.host_memory.page_bytes
    assert (status.sequences, status.pages) == (0, 0)
    assert status.parked == status.restored == bench.engine.roster.counters.preemptions and status.refused == 0
    assert status.bytes_out == counts(bench).pages_out * page_bytes >= status.bytes_in > 0
    recent = bench.engine.parts.tier.recent
    assert sum(move.pages for move in recent if move.direction == "out") == counts(bench).pages_out
    assert all(0 < move.pages <= 3 and move.start_s <= move.end_s for move in recent)
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert (report["kv/restores"], report["kv/offloaded_bytes"]) == (status.restored, status.bytes_out)
    assert (report["kv/brought_back_bytes"], report["kv/host_used_pct"]) == (status.bytes_in, 0)


def test_waiting_for_pages_shows_in_the_status(model, prompt_of):
    """The only row left is on the host: nothing can be launched before it is back."""
    bench = offloading(model, device=LateDevice({"kv_in": lambda: 0.01}), piece_pages=1, prefix_cache=False)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.tick_while(lambda: not counts(bench).pages_out >= 4)
    for i in range(3):
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
    bench.run()
    idle = bench.engine.meter.idle_seconds()
    assert counts(bench).pages_in >= 3 and idle["offload"] > 0


# --- random schedules ---


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 5))])
def test_random_traffic_leaks_nothing_and_changes_no_token(model, prompt_of, seed):
    """Groups, priorities, cancels, stops, sessions and late streams; every completion equals its run alone."""
    rng = random.Random(seed)
    jobs = {}
    for i in range(14):
        prompt = prompt_of(rng.choice([3, 4, 5, 23, 40]), rng.choice([1, 2, 3]))
        jobs[f"r{i}"] = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, 60),
            "n": (n := rng.choice([1, 1, 3])),
            "priority": rng.choice([0, 0, 1]),
            "sampling": {"temperature": rng.choice([0.0, 1.0]), "seed": i},
            "stop": {"token_ids": tuple(rng.sample(range(97), 2))},
            **({"session": ("c", f"s{i}"), "session_lease_s": 1e6} if n == 1 and rng.random() < 0.3 else {}),
        }
    lateness = rng.choice([0.0, 0.0005, 0.002])
    late = {name: lambda: rng.random() * lateness for name in ("compute", "d2h", "kv_out", "kv_in")}
    crowd = offloading(
        model,
        host_pages=rng.choice([8, 25, 300]),
        piece_pages=rng.choice([1, 2, 5]),
        device=LateDevice(late),
        max_rows=rng.choice([3, 5]),
        kv_pages=30,
        prefix_cache=rng.random() < 0.7,
        pipeline_depth=rng.choice([1, 2]),
        prefill_chunk_tokens=rng.choice([5, 16, 64]),
    )
    cancelled = set()
    for name, job in jobs.items():
        crowd.submit(name, **dict(job))
        crowd.ticks(rng.randint(0, 8))
        if rng.random() < 0.15:
            cancelled.add(name)
            crowd.engine.inbox.put(Cancel(("c", name)))
    crowd.finish()
    alone = Bench(model, max_rows=4, kv_pages=600, prefix_cache=False)
    for name, job in jobs.items():
        alone.complete(name, **{**job, "session": None})
        for i in range(job["n"]):
            mine, theirs = crowd.tokens(name, i), alone.tokens(name, i)
            assert mine == (theirs[: len(mine)] if name in cancelled else theirs), name
