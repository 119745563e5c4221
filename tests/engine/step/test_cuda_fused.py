"""The captured, fused decode step of a GPU against the generic path, against transformers, and against itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rollout.engine.device.streams import make_device
from rollout.engine.step.graphs import graph_sizes
from tests.support.engine.cuda_harness import FUSED_SIZES, assert_one_launch_a_step, assert_steady, load_bf16
from tests.support.engine.harness import Bench

pytestmark = pytest.mark.gpu
SAMPLED = {"temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def checkpoint(request, tmp_path_factory):
    """A bf16 model with sizes that the fused kernels take, and the same weights in transformers."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen2": Qwen2Config}[request.param]
    torch.manual_seed(3)
    config = kind(vocab_size=1031, tie_word_embeddings=False, **FUSED_SIZES)
    hf_model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    folder = tmp_path_factory.mktemp(request.param)
    hf_model = hf_model.to(torch.bfloat16)
    hf_model.save_pretrained(folder)
    return folder, hf_model.to("cuda").float().eval()


def run(folder, prompt_of, rows: int = 5, **fields) -> Bench:
    bench = Bench(load_bf16(folder), make_device("cuda"), **fields)
    assert bench.engine.executor.captures == (fields.get("cuda_graph_rows", 256) > 0)
    for i in range(rows):
        bench.submit(f"r{i}", prompt_of(5 + 13 * i, i), 60, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    return bench


def test_logprobs_are_within_bf16_of_a_float32_reference(checkpoint, prompt_of):
    """The captured step's error against float32 on the same tokens, beside the generic bf16 path's."""
    folder, reference = checkpoint
    errors = {}
    for graphs in (True, False):
        bench = run(folder, prompt_of, cuda_graph_rows=256 * graphs, kv_pages=512, page_size=16)
        differences = []
        for i in range(5):
            done, prompt = bench.completions[f"r{i}", 0], prompt_of(5 + 13 * i, i)
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + done.token_ids], device="cuda")).logits[
                    0, len(prompt) - 1 : -1
                ]
            ids = torch.tensor(done.token_ids, device="cuda")[:, None]
            expected = logits.log_softmax(-1).gather(1, ids)[:, 0].cpu()
            differences.append((torch.tensor(done.logprobs) - expected).abs())
        errors[graphs] = torch.cat(differences)
        bench.close()
    assert errors[True].mean() < 1.3 * errors[False].mean() + 1e-4, {k: v.mean() for k, v in errors.items()}
    assert errors[True].mean() < 0.05


def test_depth_one_and_two_are_equal_bit_for_bit(checkpoint, prompt_of):
    runs = []
    for depth in (1, 2):
        bench = run(checkpoint[0], prompt_of, pipeline_depth=depth, kv_pages=512, page_size=16)
        runs.append([dataclasses.astuple(Row(bench, i)) for i in range(5)])
        bench.close()
    assert runs[0] == runs[1]


@dataclasses.dataclass
class Row:
    tokens: list
    logprobs: list

    def __init__(self, bench: Bench, i: int) -> None:
        self.tokens, self.logprobs = bench.tokens(f"r{i}"), bench.completions[f"r{i}", 0].logprobs


def test_rows_with_changed_logits_share_a_step_with_plain_ones(checkpoint, prompt_of):
    bench = Bench(load_bf16(checkpoint[0]), make_device("cuda"), kv_pages=512, page_size=16)
    bench.submit("plain", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 4})
    bench.run()
    alone = bench.tokens("plain")
    bench.submit("plain2", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 4})
    bench.submit("biased", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 5, "logit_bias": ((7, 80.0),)})
    bench.submit("cut", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 6, "top_k": 1})
    bench.submit("greedy", prompt_of(9), 40)
    bench.run()
    same = next((i for i, (a, b) in enumerate(zip(bench.tokens("plain2"), alone, strict=True)) if a != b), 40)
    assert same >= 3, "the same draws; later tokens may part by rounding in another batch size"
    assert bench.tokens("biased") == [7] * 40
    assert bench.tokens("cut")[:5] == bench.tokens("greedy")[:5]
    bench.close()


def test_padding_rows_disturb_nothing(checkpoint, prompt_of):
    """Seven rows run in a graph of eight: the padded row is row 0, whose state stays as it was."""
    bench = run(checkpoint[0], prompt_of, rows=7, kv_pages=512, page_size=16)
    assert 7 not in graph_sizes(8)
    state = bench.engine.executor.step.rows
    assert not state.ints[0].any() and not state.pages[0].any()
    bench.close()


def test_a_steady_step_neither_allocates_nor_synchronises(checkpoint, prompt_of, monkeypatch):
    bench = Bench(load_bf16(checkpoint[0]), make_device("cuda"), kv_pages=512, page_size=16)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(9, i), 200, sampling=SAMPLED)
    assert_one_launch_a_step(bench)
    assert_steady(bench, monkeypatch)
    bench.close()
