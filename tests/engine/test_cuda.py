"""The same engine on a GPU: transformers' tokens, both depths alike, swaps, nothing leaked."""

import pytest
import torch

from tests.support.engine.harness import Bench, load
from tests.support.engine.updates import Mailbox, Update, beside_a_fresh_engine
from tests.support.models.families import FAMILIES, make_checkpoint

pytestmark = pytest.mark.gpu
SAMPLED = {"temperature": 1.0, "seed": 11}


@pytest.fixture(autouse=True)
def full_precision():
    assert torch.get_float32_matmul_precision() == "highest", "float32 comparisons need float32 products"


def cuda_bench(model, **fields) -> Bench:
    from rollout.engine.device.streams import make_device

    return Bench(model, make_device("cuda"), **fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_are_transformers(family, tmp_path):
    hf_model = make_checkpoint(family, tmp_path).to("cuda")
    bench = cuda_bench(load(tmp_path, "cuda"), max_rows=4, kv_pages=75, prefill_chunk_tokens=23)
    vocab = bench.engine.executor.step.model.spec.vocab
    prompts = {
        f"r{i}": torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        for i, length in enumerate((3, 50, 17, 31, 4))
    }
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 60, n=2 if name == "r1" else 1)
    bench.run()
    for name, prompt in prompts.items():
        done = bench.completions[name, 0]
        with torch.inference_mode():
            ids = torch.tensor([prompt + done.token_ids], device="cuda")
            logits = hf_model(ids).logits[0, len(prompt) - 1 : -1].cpu()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done.raw_logprobs), expected, atol=2e-4)
        assert logits.argmax(-1).tolist() == done.token_ids


def test_both_depths_sample_the_same_tokens(folders, prompt_of):
    runs = []
    for depth in (1, 2):
        bench = cuda_bench(load(folders[0], "cuda"), pipeline_depth=depth)
        for i, length in enumerate((5, 17, 64, 130, 9)):
            bench.submit(f"r{i}", prompt_of(length, i), 40, sampling=SAMPLED)
        bench.run()
        runs.append([bench.tokens(f"r{i}") for i in range(5)])
        bench.close()
    assert runs[0] == runs[1]


def test_the_draws_are_those_of_a_cpu(folders, prompt_of):
    tokens = []
    for device in ("cpu", "cuda"):
        model = load(folders[0], device)
        bench = cuda_bench(model) if device == "cuda" else Bench(model)
        bench.complete("a", prompt_of(12), 60, sampling=SAMPLED)
        tokens.append(bench.tokens("a"))
        bench.close()
    assert tokens[0] == tokens[1]


def test_weights_change_between_two_steps(folders, prompt_of):
    model, other = load(folders[0], "cuda"), load(folders[1], "cuda")
    mailbox = Mailbox()
    bench = cuda_bench(model, receiver=mailbox, kv_on_swap="recompute")
    after, expected = beside_a_fresh_engine(
        bench, mailbox, Update(1, other, model), lambda: cuda_bench(load(folders[1], "cuda")), prompt_of(13)
    )
    assert after == expected
    assert mailbox.done[0][1] > 0


def test_step_times_lie_within_the_hosts_clock(folders, prompt_of):
    import time

    bench = cuda_bench(load(folders[0], "cuda"))
    began = time.perf_counter()
    bench.complete("a", prompt_of(12), 40)
    steps = bench.engine.meter.recent_steps()
    assert began - 1e-3 < steps[0].start_s < steps[-1].end_s < time.perf_counter() + 1e-3
    assert all(a.end_s <= b.start_s + 1e-4 for a, b in zip(steps, steps[1:], strict=False))
