"""Likeliest tokens and prompt log-probs on a GPU: transformers', without a synchronisation, a compilation or a gap."""

import numpy as np
import pytest
import torch

from rollout.engine.device.streams import make_device
from rollout.engine.features.scores.feature import asked_scores
from tests.support.engine.cuda_harness import load_bf16, make_fused_checkpoint, tick_without_waiting, watch_compilation
from tests.support.engine.harness import Bench, load
from tests.support.engine.scores import Wanted
from tests.support.models.families import make_checkpoint

pytestmark = pytest.mark.gpu


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("captured", [True, False])
def test_tops_and_prompts_are_transformers(tmp_path, captured):
    hf_model = make_checkpoint("qwen3", tmp_path, max_position_embeddings=1024).to("cuda")
    bench = Bench(
        load(tmp_path, "cuda"),
        make_device("cuda"),
        kv_pages=90,
        prefill_chunk_tokens=150,
        cuda_graph_rows=256 * captured,
    )
    wishes = [(140, 20), (300, 3), (7, 0), (33, 1), (1, 5)]
    for i, (length, k) in enumerate(wishes):
        sampling = {"temperature": 0.8, "seed": i, **({"top_k": 9} if i == 1 else {})}
        asked = {"prompt_logprobs": i != 2, "prompt_top_logprobs": None if i == 2 else k}
        bench.submit(f"r{i}", prompt(length, i), 40, sampling=sampling, logprobs=k, **asked)
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


#: What teachers ask about a prompt of 300 tokens.
TEACHERS = [
    Wanted(last=130, chosen=np.arange(130 * 256, dtype=np.int32).reshape(130, 256) % 90, entropy=True),
    Wanted(last=1, tops=50),
    Wanted(chosen=np.array([3, 89], np.int32)),
    Wanted(last=299, entropy=True, tops=20),
    Wanted(last=40),
]


def test_what_teachers_ask_for_is_transformers_also_on_known_prefixes(tmp_path):
    hf_model = make_checkpoint("qwen3", tmp_path, max_position_embeddings=1024).float()
    bench = Bench(load(tmp_path, "cuda"), make_device("cuda"), kv_pages=300, prefill_chunk_tokens=150)
    for turn in range(2):
        for i, wanted in enumerate(TEACHERS):
            bench.submit(f"{turn}{i}", prompt(300, i % 2), 3 * (i % 2), **wanted.fields())
        bench.run()
    for i, wanted in enumerate(TEACHERS):
        for turn in range(2):
            wanted.check(bench.done[f"{turn}{i}"], prompt(300, i % 2), hf_model, atol=2e-4)
    assert [bench.done[f"1{i}"].cached_tokens > 0 for i in range(5)] == [True, True, False, False, True]


def test_teachers_compile_nothing_and_leave_other_scores_bit_for_bit(folder, monkeypatch):
    compiled = watch_compilation(monkeypatch)

    def scores(*teachers: Wanted) -> np.ndarray:
        bench = Bench(load_bf16(folder), make_device("cuda"), page_size=16, kv_pages=600, deterministic=True)
        compiled.clear()
        bench.submit("a", prompt(300, 9), 4, prompt_logprobs=True, prompt_top_logprobs=20)
        for i, wanted in enumerate(teachers):
            bench.submit(f"t{i}", prompt(300, i), 0, **wanted.fields())
        bench.run()
        assert not compiled
        bench.close()
        tops = bench.done["a"].prompt_tops
        return np.concatenate([bench.done["a"].prompt_logprobs[1:, None], tops.logprobs[1:], tops.ids[1:]], axis=1)

    np.testing.assert_array_equal(scores(), scores(*TEACHERS))


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


def test_without_scores_a_prompt_fills_the_cache_and_nothing_is_compiled_for_it(folder, monkeypatch):
    bench = Bench(load_bf16(folder), make_device("cuda"), max_rows=12, page_size=16, kv_pages=600)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 16, 70, 256)):
        bench.submit(f"r{i}", prompt(length, i), 0, n=3, prompt_logprobs=i % 2 == 0)
    bench.run()
    bench.complete("next", prompt(256, 3), 5)
    assert bench.done["next"].cached_tokens == 255 and not compiled


def test_steps_with_tops_never_wait_for_the_device(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=600)
    for i in range(6):
        bench.submit(f"r{i}", prompt(20, i), 400, logprobs=5 * (i % 2))
    bench.ticks(20)
    tick_without_waiting(bench)
    bench.run()
    assert all(len(bench.completions[f"r{i}", 0].top_ids) == (400 if i % 2 else 0) for i in range(6))


def test_a_launch_with_tops_returns_before_the_step_has_run(folder):
    """A copy to unpinned memory would wait for the step, and no debug mode detects that."""
    bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=600)
    for i in range(3):
        bench.submit(f"r{i}", prompt(20, i), 100, logprobs=5 * (i % 2))
    bench.ticks(20)
    bench.engine.executor.compute.run(lambda: torch.cuda._sleep(2_000_000_000))
    bench.engine.tick()
    newest = bench.engine.pipeline.steps()[-1]
    assert asked_scores(newest.header).tops and not newest.slot.d2h_done.query()
    bench.run()


def test_a_launch_that_scores_a_prompt_returns_before_the_step_has_run(folder):
    bench = Bench(load_bf16(folder), make_device("cuda"), kv_pages=600)
    bench.submit("a", prompt(20, 0), 100)
    bench.ticks(20)
    bench.engine.executor.compute.run(lambda: torch.cuda._sleep(2_000_000_000))
    bench.submit("b", prompt(200, 1), 5, prompt_logprobs=True, prompt_top_logprobs=5)
    bench.engine.tick()
    newest = bench.engine.pipeline.steps()[-1]
    asked = asked_scores(newest.header)
    assert asked.narrow.ranked and asked.narrow.tops and not newest.slot.d2h_done.query()
    bench.run()


def test_nothing_is_compiled_for_them_while_serving(folder, monkeypatch):
    bench = Bench(load_bf16(folder), make_device("cuda"), max_rows=12, page_size=16, kv_pages=600)
    compiled = watch_compilation(monkeypatch)
    for i, length in enumerate((1, 5, 20, 40, 70, 130, 256, 300)):
        asked = {"prompt_logprobs": i % 2 == 0, "prompt_top_logprobs": i if i % 4 == 0 else None}
        bench.submit(f"r{i}", prompt(length, i), 10 + i, logprobs=i, **asked)
    bench.run()
    assert compiled == []
