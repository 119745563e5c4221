"""How an engine starts on a GPU: memory from a measured peak, errors with numbers, graphs of every size."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from rollout_kernels.linear.table import MOST_ROWS

from rollout.engine import build_steps
from rollout.engine.device.streams import make_device
from rollout.engine.sizing import kv_pages
from rollout.engine.step.graphs import capturable
from tests.support.engine.cuda_harness import FUSED_SIZES, assert_steady, load_bf16, watch_compilation
from tests.support.engine.harness import Bench

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
VOCAB = 40_009
MIB = 2**20
SHAPES = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "logit_bias": ((7, 1.0),),
    "presence_penalty": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bf16 model whose logits are large beside its weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(5)
    config = Qwen3Config(vocab_size=VOCAB, tie_word_embeddings=True, **FUSED_SIZES)
    path = tmp_path_factory.mktemp("start")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


def driver_free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def largest_steps(folder) -> tuple[int, Any]:
    """Bytes of memory that the largest steps of a model take, and the memory that was measured."""
    rows, chunk, seen = 200, 4096, []

    def watched(settings, model, dtype, context, memory):
        seen.append(memory)
        return kv_pages(settings, model, dtype, context, memory)

    fields = {"max_rows": rows, "prefill_chunk_tokens": chunk, "kv_memory_fraction": 0.1, "page_size": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_steps, "kv_pages", watched)
        bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=None, **fields)
    (memory,) = seen
    kv = bench.engine.executor.step.kv
    pool = sum(cache.numel() * cache.element_size() for cache in (*kv.k, *kv.v))
    for i in range(rows):
        stop = {"token_ids": (3,), "min_tokens": 9}
        bench.submit(f"r{i}", prompt(20, i), 20, sampling={**SHAPES, "seed": i}, stop=stop)
    bench.run()
    # `memory.free` was read when the pool was sized: the row state has its memory already.
    taken = memory.free - driver_free() - pool
    bench.close()
    return taken, memory


def test_the_largest_steps_fit_into_the_measured_memory(folder):
    """In a process of their own, as a worker has: the allocator has no gaps from other engines."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        taken, memory = process.submit(largest_steps, folder).result()
    assert memory.needs.total > 200 * MIB, "200 rows of 40,009 logits are changed, sorted and drawn from"
    # The margin is for kernels whose code is first loaded here, for the pool's rounding to 2 MiB a tensor and for gaps.
    assert taken < memory.needs.total + 128 * MIB, (taken / MIB, memory)


def test_steps_that_do_not_fit_are_an_error_with_the_numbers(folder):
    model = load_bf16(folder)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 400 * MIB) / total)
    try:
        with pytest.raises(ValueError, match=r"one step of max_rows = 512 .* lower these"):
            Bench(model, make_device("cuda"), max_rows=512, prefill_chunk_tokens=8192)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    Bench(model, make_device("cuda"), max_rows=4).close()


def test_pages_beyond_the_memory_are_an_error_with_the_numbers(folder):
    model = load_bf16(folder)
    page = model.spec.kv_bytes_per_token(torch.bfloat16) * 4
    with pytest.raises(ValueError, match=r"kv_pages = \d+ .* GiB"):
        Bench(model, make_device("cuda"), kv_pages=torch.cuda.mem_get_info()[0] // page)


def test_more_rows_than_our_own_products_take_are_captured_too(folder):
    rows, runs = MOST_ROWS + 32, []
    for graphs in (True, False):
        fields = {"max_rows": rows, "page_size": 16, "kv_pages": 3 * rows, "prefill_chunk_tokens": 2048}
        bench = Bench(load_bf16(folder), make_device("cuda"), cuda_graph_rows=rows * graphs, **fields)
        assert graphs == bench.engine.executor.captures
        for i in range(rows):
            bench.submit(f"r{i}", prompt(6, i), 30, sampling={"temperature": 1.0, "seed": i})
        bench.run()
        # Not all rows start together, so the last ones draw their last tokens in steps that are padded in graphs only.
        runs.append([(bench.tokens(f"r{i}")[:20], bench.completions[f"r{i}", 0].logprobs[:20]) for i in range(rows)])
        bench.close()
    assert runs[0] == runs[1], "the same kernels on the same rows"


def test_a_step_begins_when_the_device_does_and_not_when_its_upload_is_there(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), pipeline_depth=1)
    graphs = bench.engine.executor.graphs
    replay = graphs.run

    def late(*args):
        time.sleep(0.02)
        replay(*args)

    graphs.run = late
    bench.complete("a", prompt(9, 0), 20)
    steps = [step for step in bench.engine.meter.recent_steps() if step.kind == "decode"]
    assert len(steps) > 5 and max(step.end_s - step.start_s for step in steps) < 0.01


def test_rows_above_the_captured_sizes_are_launched_singly(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), cuda_graph_rows=3, page_size=16)
    assert bench.engine.executor.graphs.sizes.whole == [1, 2, 3] and bench.engine.executor.graphs.sizes.size_for(4) == 0
    for i in range(6):
        bench.submit(f"r{i}", prompt(9, i), 20 + i)
    bench.run()
    assert all(len(bench.tokens(f"r{i}")) == 20 + i for i in range(6))


def test_models_without_fused_kernels_are_captured_too(folders):
    from tests.support.engine.harness import load

    model = load(folders[0], "cuda")
    bench = Bench(model, make_device("cuda"))
    assert capturable(model) and bench.engine.executor.captures


@pytest.mark.parametrize("rows", [4, MOST_ROWS + 12])
def test_a_steady_step_neither_allocates_nor_synchronises_at_any_size(folder, rows, monkeypatch):
    fields = {"max_rows": rows, "page_size": 16, "kv_pages": 16 * rows, "prefill_chunk_tokens": 2048}
    bench = Bench(load_bf16(folder), make_device("cuda"), **fields)
    for i in range(rows):
        bench.submit(f"r{i}", prompt(9, i), 200, sampling={"temperature": 1.0, "seed": i})
    assert_steady(bench, monkeypatch)


def test_nothing_is_compiled_while_serving(folder, monkeypatch):
    fields = {"max_rows": 12, "page_size": 16, "kv_pages": 600, "prefill_chunk_tokens": 256}
    bench = Bench(load_bf16(folder), make_device("cuda"), **fields)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 5, 20, 40, 70, 130, 256, 300, 700, 17, 33, 64, 3, 9, 12)):
        bench.submit(f"r{i}", prompt(length, i), 10 + i, n=1 + i % 3, sampling={**(SHAPES if i % 2 else {}), "seed": i})
    bench.run()
    assert compiled == []


def test_capture_takes_seconds_for_256_rows(folder, caplog):
    with caplog.at_level("INFO", "rollout"):
        Bench(load_bf16(folder), make_device("cuda"), max_rows=256, kv_pages=600, page_size=16).close()
    record = [record for record in caplog.records if record.message.startswith("captured")][-1]
    assert record.took_s < 15, vars(record)
