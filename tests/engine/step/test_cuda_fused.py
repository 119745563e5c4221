"""The captured, fused decode step of a GPU against the generic path, against transformers, and against itself."""

import dataclasses

import pytest
import torch

from rollout.engine.device.streams import make_device
from rollout.engine.step.graphs import graph_sizes
from rollout.models.fused import FusedDecoder
from tests.support.engine.cuda_harness import (
    FUSED_SIZES,
    assert_one_launch_a_step,
    assert_steady,
    load_bf16,
    use_modules,
)
from tests.support.engine.harness import Bench

pytestmark = pytest.mark.gpu
SAMPLED = {"temperature": 1.0, "seed": 11}
_GEMMA = {
    "query_pre_attn_scalar": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
#: What is not the default of a family, or of `FUSED_SIZES`.
FAMILIES = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA,
    "olmo2": {"num_key_value_heads": 4},
    "glm4": {"attention_bias": True},
    "granite": {"attention_multiplier": 0.1, "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """A bf16 model with sizes that the fused kernels take, and the same weights in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = FUSED_SIZES | FAMILIES[request.param]
    plain = {"vocab_size": 1031, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(request.param, **plain, **sizes)
    hf_model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
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
    """The captured step's error against float32 on the same tokens, beside that of steps without graphs."""
    folder, reference = checkpoint
    errors = {}
    for graphs in (True, False):
        bench = run(folder, prompt_of, cuda_graph_rows=256 * graphs, kv_pages=512, page_size=16)
        errors[graphs] = torch.cat([logprob_errors(bench, reference, i, prompt_of(5 + 13 * i, i)) for i in range(5)])
        bench.close()
    assert errors[True].mean() < 1.3 * errors[False].mean() + 1e-4, {k: v.mean() for k, v in errors.items()}
    assert errors[True].mean() < 0.05


def test_logprobs_are_as_close_to_float32_as_those_of_the_torch_modules(checkpoint, prompt_of, monkeypatch):
    """The same prompts, in steps of the kernels and of the modules, each beside float32 on its own tokens."""
    folder, reference = checkpoint
    errors = {}
    for fused in (True, False):
        if not fused:
            use_modules(monkeypatch)
        bench = run(folder, prompt_of, kv_pages=512, page_size=16)
        assert isinstance(bench.engine.executor.step.forward, FusedDecoder) == fused
        errors[fused] = torch.cat([logprob_errors(bench, reference, i, prompt_of(5 + 13 * i, i)) for i in range(5)])
        bench.close()
    assert errors[True].mean() < 1.3 * errors[False].mean() + 1e-4, {k: v.mean() for k, v in errors.items()}


def logprob_errors(bench: Bench, reference, row: int, prompt: list) -> torch.Tensor:
    """Distances of a completion's log-probs from those of float32 on its tokens."""
    done = bench.completions[f"r{row}", 0]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + done.token_ids], device="cuda")).logits[0, len(prompt) - 1 : -1]
    ids = torch.tensor(done.token_ids, device="cuda")[:, None]
    return (torch.tensor(done.logprobs) - logits.log_softmax(-1).gather(1, ids)[:, 0].cpu()).abs()


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
    bench.complete("plain", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 4})
    alone = bench.tokens("plain")
    bench.submit("plain2", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 4})
    bench.submit("biased", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 5, "logit_bias": ((7, 80.0),)})
    bench.submit("cut", prompt_of(9), 40, sampling={"temperature": 1.0, "seed": 6, "top_k": 1})
    bench.complete("greedy", prompt_of(9), 40)
    same = next((i for i, (a, b) in enumerate(zip(bench.tokens("plain2"), alone, strict=True)) if a != b), 40)
    assert same >= 3, "the same draws; later tokens may part by rounding in another batch size"
    assert bench.tokens("biased") == [7] * 40
    assert bench.tokens("cut")[:5] == bench.tokens("greedy")[:5]


def test_padding_rows_disturb_nothing(checkpoint, prompt_of):
    """Seven rows run in a graph of eight: the padded row is row 0, whose state stays as it was."""
    bench = run(checkpoint[0], prompt_of, rows=7, kv_pages=512, page_size=16)
    assert 7 not in graph_sizes(8)
    state = bench.engine.executor.step.rows
    assert not state.ints[0].any() and not state.pages[0].any()


def test_a_steady_step_neither_allocates_nor_synchronises(checkpoint, prompt_of, monkeypatch):
    bench = Bench(load_bf16(checkpoint[0]), make_device("cuda"), kv_pages=512, page_size=16)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(9, i), 200, sampling=SAMPLED)
    assert_one_launch_a_step(bench)
    assert_steady(bench, monkeypatch)
