"""Decode attention that reads shared pages once, in the captured steps of a GPU: as exact as without, and as steady."""

import pytest
import torch

from rollout.engine.device.streams import make_device
from rollout.engine.step.shared_pages import SharedPages
from tests.support.engine.cuda_harness import FUSED_SIZES, assert_steady, load_bf16
from tests.support.engine.harness import Bench

pytestmark = pytest.mark.gpu
VOCAB, LENGTH, TOKENS = 1031, 1100, 50


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A bf16 model that the fused kernels take, and the same weights in transformers, in float32 on the GPU."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(3)
    hf_model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=VOCAB, tie_word_embeddings=False, **FUSED_SIZES))
    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    folder = tmp_path_factory.mktemp("groups")
    hf_model = hf_model.to(torch.bfloat16)
    hf_model.save_pretrained(folder)
    return folder, hf_model.to("cuda").float().eval()


def prompt(length: int, salt: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(salt)).tolist()


SYSTEM = prompt(640, 99)
#: Two groups behind one system prompt, one group on its own, and a row that shares nothing.
PROMPTS = {
    "a": ([*SYSTEM, *prompt(460, 1)], 6),
    "b": ([*SYSTEM, *prompt(300, 2)], 5),
    "c": (prompt(900, 3), 4),
    "d": (prompt(333, 4), 1),
}


def run(folder, group_attention: bool, **fields) -> Bench:
    settings = {"kv_pages": 1200, "page_size": 16, "max_rows": 16, "prefill_chunk_tokens": 512, **fields}
    settings["shared_saved_bytes"] = 1
    bench = Bench(load_bf16(folder), make_device("cuda"), group_attention=group_attention, **settings)
    assert bench.engine.executor.step.shares_pages == group_attention
    for i, (name, (ids, n)) in enumerate(PROMPTS.items()):
        bench.submit(name, ids, TOKENS + 5 * i, n=n, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    bench.engine.check_integrity()
    return bench


def errors_of(bench: Bench, reference) -> torch.Tensor:
    differences = []
    for name, (ids, n) in PROMPTS.items():
        for index in range(n):
            done = bench.completions[name, index]
            with torch.inference_mode():
                logits = reference(torch.tensor([ids + done.token_ids], device="cuda")).logits[0, len(ids) - 1 : -1]
            chosen = torch.tensor(done.token_ids, device="cuda")[:, None]
            expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu()
            differences.append((torch.tensor(done.logprobs) - expected).abs())
    return torch.cat(differences)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("graphs", [True, False])
def test_logprobs_are_as_close_to_float32_as_those_of_rows_alone(checkpoint, kv_dtype, graphs):
    folder, reference = checkpoint
    errors = {}
    for group_attention in (True, False):
        bench = run(folder, group_attention, kv_dtype=kv_dtype, cuda_graph_rows=256 * graphs)
        errors[group_attention] = errors_of(bench, reference)
        bench.close()
    means = {shared: of.mean().item() for shared, of in errors.items()}
    assert means[True] < 1.15 * means[False] + 1e-4 and means[True] < 0.1, means


def test_rows_are_read_together(checkpoint, monkeypatch):
    """What the other tests compare is not twice the same."""
    folder, _ = checkpoint
    seen = []
    make = SharedPages.segments
    monkeypatch.setattr(SharedPages, "segments", lambda *of: seen.append(make(*of)) or seen[-1])
    run(folder, True).close()
    most = max(int((segments[len(segments) // 2 :, 1] > 0).sum()) for segments in seen)
    assert most >= 4, "the system prompt of both groups, each group, and the third"


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_deterministic_bits_do_not_depend_on_who_shares(checkpoint, kv_dtype):
    folder, _ = checkpoint
    runs = []
    for group_attention in (True, False):
        bench = run(folder, group_attention, deterministic=True, kv_dtype=kv_dtype)
        runs.append({key: (done.token_ids, done.logprobs) for key, done in bench.completions.items()})
        bench.close()
    assert runs[0] == runs[1] and len(runs[0]) == 16


def test_a_steady_step_neither_allocates_nor_synchronises(checkpoint, monkeypatch):
    bench = Bench(
        load_bf16(checkpoint[0]),
        make_device("cuda"),
        kv_pages=1200,
        page_size=16,
        max_rows=8,
        prefill_chunk_tokens=512,
        shared_saved_bytes=1,
    )
    bench.submit("a", prompt(700, 1), 300, n=8, sampling={"temperature": 1.0, "seed": 1})
    bench.ticks(6)
    assert_steady(bench, monkeypatch)
