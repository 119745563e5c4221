"""Start-up: KV pages from measured memory, errors with the numbers, and steps on padding that leave no trace."""

import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_kernels.attention.gathered import MOST_GATHERED, pays

from rollout.config import EngineSettings, ModelSettings
from rollout.engine.device.streams import CpuDevice
from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.sizing import (
    DeviceMemory,
    DeviceTarget,
    PoolSize,
    check_row_state,
    kv_budget,
    kv_pages,
    usable_bytes,
)
from rollout.engine.step.device_step import DeviceStep
from rollout.engine.step.execute import Executor
from rollout.engine.step.graphs import forward_sizes, graph_sizes
from rollout.engine.step.rehearsal import (
    ALL_FEATURES,
    MemoryUse,
    StepNeeds,
    StepSizes,
    largest_prompts,
    longest_contexts,
    rehearse,
    steps_to_rehearse,
    taken_between,
)
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import RowNeeds
from rollout.models import load_model
from rollout.models.fused import FusedDecoder
from rollout.models.lora_slots import AdapterSlots
from scripts.bench.random_adapter import random_adapter
from tests.support.engine.harness import Bench
from tests.support.models.families import make_checkpoint
from tests.support.settings import settings_of

GIB = 2**30
CONTEXT = 1024
SAMPLED = {"temperature": 1.0, "seed": 3, "top_k": 20, "logit_bias": ((7, 1.0),), "presence_penalty": 0.5}


class Small(CpuDevice):
    """A device with little memory."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self) -> int:
        return self.free


def pages(model, free: int, activations: int = 0, graphs: int = 0, **engine) -> int:
    memory = DeviceMemory(5 * GIB, free, StepNeeds(activations, graphs))
    settings = settings_of(EngineSettings, **{"max_rows": 4, "page_size": 16, **engine})
    return kv_pages(settings, model, torch.float32, CONTEXT, memory)


def page_bytes(model) -> int:
    return model.spec.kv_bytes_per_token(torch.float32) * 16


def test_steps_take_their_share_before_kv_does(model):
    page = page_bytes(model)
    assert pages(model, 100 * page, kv_memory_fraction=0.5) == 50
    assert pages(model, 100 * page, 20 * page, 7 * page, kv_memory_fraction=0.5) == 23
    assert pages(model, 100 * page + page // 2, 20 * page, 7 * page, kv_memory_fraction=0.5) == 23
    assert pages(model, 2000 * page) == 4 * CONTEXT // 16 + 1, "no more than all rows can use"
    assert pages(model, 1000 * page, kv_memory_max_gib=30 * page / GIB) == 30


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("speculation", ["off", "suffix", "ngram", "auto"])
def test_pages_are_as_large_as_they_are_counted(model, speculation, kv_dtype):
    """Also where they have the ids of their tokens; in the memory of the device, and of the host."""
    fields = {"speculation": speculation, "kv_dtype": kv_dtype, "page_size": 16}
    bench = Bench(model, host_kv_gib=0.01, **fields)
    step, mover = bench.engine.executor.step, bench.engine.executor.mover
    page = sum(tensor[0].nbytes for tensor in step.kv.tensors)
    dtype = torch.float32 if kv_dtype == "auto" else torch.float8_e4m3fn
    ids = speculation in ("ngram", "auto")
    assert page == 16 * (model.spec.kv_bytes_per_token(dtype) + 4 * ids)
    assert mover.host_memory.page_bytes == page and mover.host_memory.pages == int(0.01 * GIB) // page
    memory = DeviceMemory(0, 2 * 101 * page - 1, StepNeeds())
    settings = settings_of(EngineSettings, max_rows=4, kv_memory_fraction=0.5, **fields)
    assert kv_pages(settings, model, dtype, CONTEXT, memory) == 100


def test_on_a_cpu_most_of_the_memory_stays_free_unless_it_is_asked_for(model):
    page = page_bytes(model)
    assert pages(model, 400 * page) == 100
    assert pages(model, 200 * page, kv_memory_fraction=0.85) == 170


@pytest.mark.parametrize(
    ("free_gib", "sleep", "kept_gib"),
    [(100, False, 5.0), (60, False, 3.0), (30, False, 3.0), (10, False, 1.5), (1, False, 0.15), (100, True, 15.0)],
)
def test_on_a_gpu_little_more_than_a_constant_stays_free(free_gib, sleep, kept_gib):
    """Small GPUs keep a share of theirs, and workers that share a GPU with a trainer leave it more."""
    settings = settings_of(EngineSettings, sleep=sleep)
    memory, gpu = DeviceMemory(0, free_gib * GIB, StepNeeds(GIB // 4, GIB // 4)), DeviceTarget("cuda", (9, 0))
    assert kv_budget(settings, memory, gpu) == pytest.approx((free_gib - kept_gib - 0.5) * GIB)
    assert usable_bytes(settings_of(EngineSettings, kv_memory_fraction=0.5), 8 * GIB, gpu) == 4 * GIB


def test_each_start_logs_the_size_of_the_kv_pool(model, caplog):
    caplog.set_level("INFO", logger="rollout")
    Bench(model, kv_pages=4, page_size=16, max_rows=2).close()
    (line,) = [record for record in caplog.records if hasattr(record, "kv_pages")]
    facts = (line.kv_pages, line.kv_tokens, line.longest_sequence, line.rows_of_that_length)
    assert facts == (4, 48, 48, 1)


@pytest.mark.parametrize(
    ("pages", "context", "rows", "expected"),
    [(4, 1024, 2, (48, 48, 1)), (1025, 1024, 4, (16384, 1024, 4)), (130, 1024, 4, (2064, 1024, 2))],
)
def test_the_figures_of_a_pool(pages, context, rows, expected):
    size = PoolSize(pages, 16, context, rows)
    assert (size.tokens, size.longest, size.full_rows) == expected


def test_too_little_for_a_page_a_row_is_an_error_with_the_numbers(model):
    page = page_bytes(model)
    assert pages(model, 13 * page, 5 * page, 3 * page, kv_memory_fraction=0.98, max_rows=3) == 4
    with pytest.raises(ValueError, match="lower max_rows or prefill_chunk_tokens") as caught:
        pages(model, 2 * GIB, GIB, 3 * GIB // 4, kv_memory_fraction=0.5)
    message = str(caught.value)
    for number in ("5.00 GiB", "2.00 GiB", "1.00 GiB", "0.75 GiB", "max_rows = 4", f"{page} bytes"):
        assert number in message, message


def test_pages_that_were_asked_for_have_to_fit(model):
    page = page_bytes(model)
    assert pages(model, 50 * page, 10 * page, kv_pages=40) == 40, "kv_memory_fraction does not bound what was asked for"
    with pytest.raises(ValueError, match=r"kv_pages = 41 .* lower kv_pages") as caught:
        pages(model, 50 * page, 6 * page, 4 * page, kv_pages=41)
    assert "the weights take 5.00 GiB" in str(caught.value)


def test_rows_whose_state_does_not_fit_are_refused_before_it_is_allocated(model):
    rows = RowState(5, 9, 97, torch.device("cpu"))
    held = sum(t.numel() * t.element_size() for t in vars(rows).values() if isinstance(t, torch.Tensor))
    assert held <= RowState.nbytes(5, 9, 97) <= held + 6 * 9 * 4, "the page table of a step is a GPU's"
    check_row_state(EngineSettings(max_rows=5), 9, model, RowState.nbytes(5, 9, 97))
    with pytest.raises(ValueError, match=r"max_rows = 4096 .* lower max_rows"):
        Bench(model, Small(1 << 20), max_rows=4096)


def test_an_engine_that_does_not_fit_leaves_no_thread_behind(model):
    before = set(threading.enumerate())  # of which some may end meanwhile
    with pytest.raises(ValueError, match="kv_pages = 256"):
        Bench(model, Small(1 << 18))
    assert set(threading.enumerate()) <= before


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(2, 3000))
def test_the_largest_prefill_is_one_that_the_scheduler_can_plan(rows, chunk_tokens, context):
    lengths = largest_prompts(rows, chunk_tokens, context)
    assert len(lengths) == min(rows, chunk_tokens) and all(1 <= length <= context for length in lengths)
    assert sum(lengths) == min(chunk_tokens, len(lengths) * context)


def test_a_rehearsal_runs_the_most_tokens_and_draws_for_every_row(model):
    bench = Bench(model, max_rows=6, prefill_chunk_tokens=50)
    executor, tokens, draws = bench.engine.executor, [], []
    step, forward, sample = executor.step, executor.step.model.forward, executor.step.sample
    step.model.forward = lambda ids, *rest: (tokens.append(len(ids)), forward(ids, *rest))[1]
    step.sample = lambda logits, rows, features, *rest: (
        draws.append((len(logits), features)),
        sample(logits, rows, features, *rest),
    )
    rehearse(executor, bench.engine.pipeline.acquire(), StepSizes(6, 50, 40, graph_rows=0))
    most = ALL_FEATURES & ~RowNeeds.VARIANT
    assert max(tokens) == 50 and draws.count((6, most)) == 2 and {1, 2, 4} <= {count for count, _ in draws}
    assert most.reshapes and all(feature in ALL_FEATURES for feature in RowNeeds)
    bench.close(check=False)


def rehearsed(model, max_rows: int, graph_rows: int) -> tuple[list[int], list[tuple[int, ...]], set[int]]:
    """Sizes at which the kernels change, and what is rehearsed: lengths of prompts, and rows of decode steps."""
    bench = Bench(model, max_rows=max_rows)
    step = DeviceStep(model, FusedDecoder(model), bench.engine.executor.step.kv, bench.engine.executor.step.rows)
    executor = Executor(bench.device, bench.engine.executor.streams, step)
    steps = steps_to_rehearse(executor, StepSizes(max_rows, 700, 300, graph_rows))
    bench.close()
    return step.forward.kernel_sizes(), [one.prompts for one in steps if one.prompts], {one.rows for one in steps}


@pytest.mark.filterwarnings("ignore:no measured plan")
def test_a_rehearsal_runs_every_size_at_which_experts_take_other_kernels(tmp_path):
    make_checkpoint("mixtral", tmp_path)
    model = load_model(ModelSettings(path=str(tmp_path), dtype="bfloat16"), torch.device("cpu")).model
    sizes, prefills, decodes = rehearsed(model, 40, 0)
    assert sizes[0] < 40 < sizes[-1]
    assert max(max(lengths) for lengths in prefills) == 300, "no span is longer than a context"
    assert {sum(lengths) for lengths in prefills} >= {size for size in sizes if size <= 700}
    assert decodes >= {size for size in sizes if size <= 40}


def test_a_rehearsal_for_few_rows_runs_every_size_at_which_products_take_other_kernels(tmp_path):
    """Prompts have any number of tokens, however few rows decode steps have."""
    make_checkpoint("qwen3", tmp_path)
    model = load_model(ModelSettings(path=str(tmp_path), dtype="bfloat16"), torch.device("cpu")).model
    _, prefills, _ = rehearsed(model, 1, 1)
    assert {sum(lengths) for lengths in prefills} >= {1, 2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize("context", [300, 1024])
def test_a_rehearsal_runs_the_most_tokens_with_adapters_and_without(tmp_path, context):
    """Kernels of many tokens may run only where no row has an adapter; contexts may be shorter than a step."""
    make_checkpoint("qwen3", tmp_path)
    model = load_model(ModelSettings(path=str(tmp_path), dtype="bfloat16"), torch.device("cpu")).model
    bench = Bench(model, max_rows=6)
    slots = AdapterSlots(model.spec, 2, 8, torch.bfloat16, torch.device("cpu"))
    kv, rows = bench.engine.executor.step.kv, RowState(6, 99, model.spec.vocab, torch.device("cpu"), ["adapters"])
    step = DeviceStep(
        model, FusedDecoder(model), kv, rows, features=[AdapterMemory(slots, bench.device, 6, AdapterRegistry(2))]
    )
    steps = steps_to_rehearse(
        Executor(bench.device, bench.engine.executor.streams, step), StepSizes(6, 700, context, 0)
    )
    largest = [one.needs for one in steps if sum(one.prompts) == 700 and not one.earlier]
    assert {bool(features & RowNeeds.VARIANT) for features in largest} == {False, True}


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(2, 3000))
def test_long_contexts_that_are_rehearsed_are_ones_that_the_scheduler_can_plan(rows, chunk_tokens, context):
    for spans in longest_contexts(rows, chunk_tokens, context):
        assert len(spans) <= rows and sum(spans) <= chunk_tokens and all(1 <= length <= context for length in spans)


def test_a_rehearsal_gathers_as_much_as_prefill_attention_may(model):
    """Four spans, each over a quarter of what is set aside for gathered keys and values; five are too many."""
    bench = Bench(model, max_rows=6)
    longest = MOST_GATHERED // 4
    steps = steps_to_rehearse(bench.engine.executor, StepSizes(6, 16384, longest, 0))
    late = [one for one in steps if one.earlier]
    assert all(one.earlier + one.prompts[0] == longest for one in late)
    assert [len(one.prompts) for one in late] == [1, 4, 5]
    paid = []
    for one in late:
        starts = itertools.accumulate(one.prompts, initial=0)
        chunks = tuple(
            (start, length, one.earlier + length) for start, length in zip(starts, one.prompts, strict=False)
        )
        paid.append(pays(chunks, 32, 8, None))
    assert paid == [True, True, False]


def test_a_rehearsal_leaves_no_trace(model, prompt_of):
    tokens = []
    for rehearsed in (False, True):
        bench = Bench(model)
        if rehearsed:
            slot = bench.engine.pipeline.free_slots[0]
            rehearse(bench.engine.executor, slot, StepSizes(8, 64, 1024, graph_rows=0))
            state = bench.engine.executor.step.rows
            assert not any(part.any() for part in (state.ints, state.counts, state.pages))
            assert all(
                not cache[1:].any() for cache in (*bench.engine.executor.step.kv.k, *bench.engine.executor.step.kv.v)
            )
        for i in range(5):
            bench.submit(f"r{i}", prompt_of(9 + 7 * i, i), 30, sampling=SAMPLED)
        bench.run()
        tokens.append([bench.tokens(f"r{i}") for i in range(5)])
        bench.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("most", [1, 5, 8, 33, 128, 256, 300])
def test_captured_sizes_waste_little(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(3, size / 5), (rows, size)


def test_a_forward_alone_is_captured_at_few_sizes_that_hold_every_step():
    sizes = graph_sizes(200)
    few = forward_sizes(sizes)
    assert set(few) <= set(sizes) and few[-1] == 200 and len(few) < len(sizes) / 3
    assert all(b <= 2 * a for a, b in zip(few, few[1:], strict=False))


def test_slots_of_adapters_and_the_buffers_of_offloading_are_not_planned_twice(model, monkeypatch):
    """The pool gets what both leave, down to the page."""
    device, page = Small(0), page_bytes(model)

    class Taking(AdapterSlots):
        """As on a GPU, where what is allocated is free no more."""

        def __init__(self, *of) -> None:
            super().__init__(*of)
            device.free -= self.nbytes

    monkeypatch.setattr("rollout.engine.features.adapters.memory.AdapterSlots", Taking)
    slots = AdapterSlots.bytes_for(model.spec, 2, 16, torch.float32)
    both = {
        "adapter_slots": 2,
        "adapter_rank": 16,
        "host_kv_gib": 8 * page / GIB,
        "host_kv_piece_mib": 3 * page / 2**20,
    }
    for fields, taken in ((both, slots + 6 * page), ({}, 0)):
        device.free = taken + 201 * page
        bench = Bench(model, device, kv_pages=None, page_size=16, max_rows=4, kv_memory_fraction=0.5, **fields)
        assert len(bench.engine.executor.step.kv.k[0]) == 100
        if fields:
            mover = bench.engine.executor.mover
            staged = sum(queue.staging_NW.nbytes for queue in (mover.out, mover.back))
            assert (find_feature(bench.engine.executor.step.features, AdapterMemory).slots.nbytes, staged) == (
                slots,
                6 * page,
            )
        bench.close()


def test_host_memory_for_kv_leaves_room_for_adapters(model, monkeypatch):
    """Adapters that are loaded later, too: each takes a whole slot."""
    page = page_bytes(model)
    fields = {"host_kv_gib": 8 * page / GIB, "adapter_slots": 1, "adapter_rank": 16, "max_adapters": 5}
    needed = 5 * AdapterSlots.bytes_for(model.spec, 1, 16, torch.float32)
    assert random_adapter(model.spec, 16, torch.float32, 0).nbytes * 5 == needed
    left = 8 * page
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: left)
    bench = Bench(model, Small(GIB), page_size=16, host_kv_gib=fields["host_kv_gib"])
    bench.close()
    left = 8 * page + needed
    bench = Bench(model, Small(GIB), page_size=16, **fields)
    assert bench.engine.executor.mover.host_memory.pages == 8
    bench.close()
    left -= 1
    with pytest.raises(ValueError, match=r"host_kv_gib = .* max_adapters = 5 adapters may take .* lower one"):
        Bench(model, Small(GIB), page_size=16, **fields)


@pytest.mark.parametrize(
    ("others_took", "counted"),
    [(0, 3 * GIB), (90 * GIB, 4 * GIB), (-2 * GIB, 2 * GIB)],
    ids=["alone", "another worker starts", "another worker ends"],
)
def test_what_other_processes_take_meanwhile_is_not_counted_as_needs_of_steps(others_took, counted):
    """Steps take 2 GiB of torch's allocator, and 1 GiB beside it."""
    before = MemoryUse(free=100 * GIB, held=4 * GIB)
    after = MemoryUse(free=97 * GIB - others_took, held=6 * GIB)
    assert taken_between(before, after) == counted
