"""Likeliest tokens and prompt log-probs on a GPU: transformers', without a synchronisation, a compilation or a gap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engine.device.streams import make_device
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint, tick_without_waiting, watch_compilation
from tests.support.engine.harness import Bench, load
from tests.support.models.families import make_checkpoint

pytestmark = pytest.mark.gpu


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("captured", [True, False])
def test_tops_and_prompts_are_transformers(tmp_path, captured):
    hf_model = make_checkpoint("qwen3", tmp_path, max_position_embeddings=1024).to("cuda")
    bench = Bench(
        load(tmp_path, "cuda"), make_device("cuda"), kv_pages=90, prefill_chunk_tokens=150, cuda_graphs=captured
    )
    wishes = [(140, 20), (300, 3), (7, 0), (33, 1), (1, 5)]
    for i, (length, k) in enumerate(wishes):
        sampling = {"temperature": 0.8, "seed": i, **({"top_k": 9} if i == 1 else {})}
        asked = {"prompt_logprobs": i != 2, "prompt_tops": None if i == 2 else k}
        bench.submit(f"r{i}", prompt(length, i), 40, sampling=sampling, top_logprobs=k, **asked)
    bench.run()
    for i, (length, k) in enumerate(wishes):
        done, ids = bench.completions[f"r{i}", 0], prompt(length, i)
        with torch.inference_mode():
            logits = hf_model(torch.tensor([ids + done.token_ids], device="cuda")).logits[0].cpu()
        expected = logits.log_softmax(-1)
        if k:
            rows = expected[length - 1 : -1]
            assert torch.allclose(torch.tensor(done.top_logprobs), rows.topk(k).values, atol=2e-4)
            assert torch.allclose(
                torch.tensor(done.top_logprobs), rows.gather(1, torch.tensor(done.top_ids)), atol=2e-4
            )
        if i != 2:
            chosen = expected[: length - 1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            assert np.isnan(done.prompt_logprobs[0])
            assert torch.allclose(torch.tensor(done.prompt_logprobs[1:]), chosen, atol=2e-4)
            before, tops = expected[: length - 1], done.prompt_tops
            assert torch.allclose(torch.tensor(tops.logprobs[1:]), before.topk(k).values, atol=2e-4)
            ids = torch.tensor(tops.ids[1:]).long()
            assert torch.allclose(torch.tensor(tops.logprobs[1:]), before.gather(1, ids), atol=2e-4)
            surely, perhaps = ((before > chosen[:, None] + margin).sum(1) + 1 for margin in (2e-4, -2e-4))
            ranks = torch.tensor(tops.ranks[1:])
            assert (surely <= ranks).all() and (ranks <= perhaps).all()
    bench.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that the fused kernels run."""
    return make_fused_checkpoint(tmp_path_factory.mktemp("scores"))


def test_prompts_that_fill_the_context_are_scored_without_a_token(tmp_path):
    hf_model = make_checkpoint("qwen3", tmp_path, max_position_embeddings=1024).to("cuda")
    sizes = {"page_size": 16, "kv_pages": 90, "prefill_chunk_tokens": 100, "max_context_tokens": 289}
    bench = Bench(load(tmp_path, "cuda"), make_device("cuda"), **sizes)
    bench.submit("draws", prompt(20, 9), 60)
    lengths = (1, 16, 17, 100, 288, 289)
    for i, length in enumerate(lengths):
        bench.submit(f"r{i}", prompt(length, i), 0, prompt_logprobs=True, n=1 + i % 2)
    bench.run()
    for i, length in enumerate(lengths):
        ids, told = prompt(length, i), bench.done[f"r{i}"].prompt_logprobs
        with torch.inference_mode():
            expected = hf_model(torch.tensor([ids], device="cuda")).logits[0].cpu().log_softmax(-1)
        chosen = expected[: length - 1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(told[1:]), chosen, atol=2e-4) and bench.tokens(f"r{i}") == []
    assert len(bench.tokens("draws")) == 60
    bench.close()


def test_without_scores_a_prompt_fills_the_cache_and_nothing_is_compiled_for_it(folder, monkeypatch):
    bench = Bench(load_bf16(folder), make_device("cuda"), max_rows=12, page_size=16, kv_pages=600)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 16, 70, 256)):
        bench.submit(f"r{i}", prompt(length, i), 0, n=3, prompt_logprobs=i % 2 == 0)
    bench.run()
    bench.submit("next", prompt(256, 3), 5)
    bench.run()
    assert bench.done["next"].cached_tokens == 255 and not compiled
    bench.close()


def test_steps_with_tops_never_wait_for_the_device(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=600)
    for i in range(6):
        bench.submit(f"r{i}", prompt(20, i), 400, top_logprobs=5 * (i % 2))
    for _ in range(20):
        bench.engine.tick()
    tick_without_waiting(bench)
    bench.run()
    assert all(len(bench.completions[f"r{i}", 0].top_ids) == (400 if i % 2 else 0) for i in range(6))
    bench.close()


def test_a_launch_with_tops_returns_before_the_step_has_run(folder):
    """A copy to unpinned memory would wait for the step, and no debug mode detects that."""
    bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=600)
    for i in range(3):
        bench.submit(f"r{i}", prompt(20, i), 100, top_logprobs=5 * (i % 2))
    for _ in range(20):
        bench.engine.tick()
    bench.engine.executor.compute.run(lambda: torch.cuda._sleep(2_000_000_000))
    bench.engine.tick()
    newest = bench.engine.pipeline.steps()[-1]
    assert newest.header.tops and not newest.slot.d2h_done.query()
    bench.run()
    bench.close()


def test_a_launch_that_scores_a_prompt_returns_before_the_step_has_run(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=600)
    bench.submit("a", prompt(20, 0), 100)
    for _ in range(20):
        bench.engine.tick()
    bench.engine.executor.compute.run(lambda: torch.cuda._sleep(2_000_000_000))
    bench.submit("b", prompt(200, 1), 5, prompt_logprobs=True, prompt_tops=5)
    bench.engine.tick()
    newest = bench.engine.pipeline.steps()[-1]
    assert newest.header.ranked and newest.header.prompt_tops and not newest.slot.d2h_done.query()
    bench.run()
    bench.close()


def test_nothing_is_compiled_for_them_while_serving(folder, monkeypatch):
    bench = Bench(load_bf16(folder), make_device("cuda"), max_rows=12, page_size=16, kv_pages=600)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 5, 20, 40, 70, 130, 256, 300)):
        asked = {"prompt_logprobs": i % 2 == 0, "prompt_tops": i if i % 4 == 0 else None}
        bench.submit(f"r{i}", prompt(length, i), 10 + i, top_logprobs=i, **asked)
    bench.run()
    assert compiled == []
    bench.close()
