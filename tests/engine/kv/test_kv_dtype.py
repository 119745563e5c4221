"""Keys and values as e4m3 codes through the whole engine, against transformers with its own rounded in the same way."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rollout_kernels.common.fp8 import quantize_heads, quantize_values, values_of
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollout.config import EngineSettings
from rollout.demo.counting import Counter
from rollout.engine.sizing import DeviceMemory, kv_dtype, kv_pages
from rollout.engine.step.rehearsal import StepNeeds
from rollout.models.batch import KVCache
from rollout.models.spec import KVShape
from tests.support.engine.harness import Bench, Completion, load
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import checkered, nightly
from tests.support.models.families import make_checkpoint

FP8, INT8 = {"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_int8"}
DEMO = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints" / "ones"


def rounded(x_BGSD: torch.Tensor, quantize=quantize_heads) -> torch.Tensor:
    codes, scales = quantize(x_BGSD)
    return values_of(codes) * scales[..., None]


def attention_with_rounded_kv(module, query, key, value, mask, **options):
    return sdpa_attention_forward(module, query, rounded(key), rounded(value), mask, **options)


def attention_with_int8_values(module, query, key, value, mask, **options):
    return sdpa_attention_forward(module, query, rounded(key), rounded(value, quantize_values), mask, **options)


def reference(folder: Path, fp8: bool, int8: bool = False):
    """transformers' model in float32, with keys and values that were codes once, or as they are."""
    implementation = ("int8_values" if int8 else "rounded_kv") if fp8 else "sdpa"
    if fp8:
        AttentionInterface.register(implementation, attention_with_int8_values if int8 else attention_with_rounded_kv)
        AttentionMaskInterface.register(implementation, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


@contextmanager
def with_experts_of(done: Completion, hf_model) -> Iterator[None]:
    """Within, transformers' routers take the experts that the engine says its own took for these tokens.

    A value that became another code may turn a near tie of two experts, and then far more than rounding differs.
    """
    chosen_NLK = torch.from_numpy(np.concatenate(done.routing)).long()

    def take(chosen_NK: torch.Tensor, logits_TE: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor):
        experts_TK = torch.cat([chosen_NK, experts_TK[len(chosen_NK) :]])  # the last token's are not needed
        regret = logits_TE.scatter(1, experts_TK, -torch.inf).amax(1) - logits_TE.gather(1, experts_TK).amin(1)
        assert regret.max() < 0.05, "except near ties, they are its own"
        probs_TK = logits_TE.float().softmax(-1).gather(1, experts_TK)
        return logits_TE, (probs_TK / probs_TK.sum(-1, keepdim=True)).to(weights_TK.dtype), experts_TK

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, chosen=chosen_NLK[:, i]: take(chosen, *out))
        for i, layer in enumerate(hf_model.model.layers)
    ]
    yield
    for hook in hooks:
        hook.remove()


def errors(hf_model, prompt: list[int], bench: Bench, name: str) -> torch.Tensor:
    """How far a completion's log-probs are from a model's."""
    done = bench.completions[name, 0]
    with torch.inference_mode():
        logits = hf_model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    return (torch.tensor(done.raw_logprobs) - logprobs).abs()


FAMILIES = ["qwen3", "mixtral", "llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """With a window, with experts, with one KV head and biases."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    return folder


@pytest.mark.parametrize(("family", "int8"), checkered(FAMILIES, [False, True]), indirect=["family"])
@pytest.mark.parametrize("pages", [75, *nightly(600)], ids=["with preemptions", "roomy"])
def test_logprobs_are_those_of_transformers_with_the_same_rounding(family, pages, int8):
    """Chunked prompts, decode, prefix hits, group shares, preemption: nothing but the rounding differs.

    float32's own errors are below 1e-4, as without codes. Where they carry a value over the middle between two codes,
    that value is a step (an eighth) off; so few do that the mean keeps to 1e-3, and one changes a log-prob by less than
    0.1. Rounding itself costs more than ten times that mean, so a scale or a code that is another's shows.
    """
    model, exact, coded = load(family), reference(family, fp8=False), reference(family, fp8=True, int8=int8)
    sparse = model.spec.moe is not None
    bench = Bench(model, max_rows=5, kv_pages=pages, prefill_chunk_tokens=23, routing=sparse, **(INT8 if int8 else FP8))
    kv = bench.engine.executor.step.kv
    assert all(cache.dtype == torch.uint8 for cache in kv.k)
    assert all(cache.dtype == (torch.int8 if int8 else torch.uint8) for cache in kv.v)
    prompts = {
        f"r{i}": torch.randint(0, model.spec.vocab, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        for i, length in enumerate((3, 50, 17, 31, 4, 8))
    }
    prompts["again"] = prompts["r1"]  # from the prefix cache
    for i, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, 60 + 5 * i, n=2 if i == 1 else 1, routing_from=0 if sparse else None)
    bench.run()
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 75)
    off = []
    for name, prompt in prompts.items():
        with with_experts_of(bench.completions[name, 0], coded) if sparse else nullcontext():
            off.append(errors(coded, prompt, bench, name))
    off = torch.cat(off)
    cost = torch.cat([errors(exact, prompt, bench, name) for name, prompt in prompts.items()])
    assert off.mean() < 1e-3 and off.max() < 0.1, (off.mean(), off.max())
    assert cost.mean() > 10 * off.mean() and cost.mean() > 3e-3, cost.mean()
    assert bench.tokens("r1", 1) == bench.tokens("r1", 0)


def test_weights_that_change_bring_new_codes(model, folders, prompt_of):
    """`kv_on_swap = recompute`: after the swap the tokens equal those of a fresh engine with the new weights."""
    other, mailbox = load(folders[1]), Mailbox()
    bench = Bench(model, receiver=mailbox, kv_on_swap="recompute", **FP8)
    bench.submit("a", prompt_of(13), 50)
    bench.ticks(20)
    mailbox.ready = Update(1, other, model)
    bench.run()
    k = bench.completions["a", 0].versions.index(1)
    fresh = Bench(load(folders[1]), **FP8)
    fresh.complete("b", prompt_of(13) + bench.tokens("a")[:k], 50 - k)
    assert fresh.tokens("b") == bench.tokens("a")[k:]
    bench.close(), fresh.close()


def test_the_demo_counts_right_with_kv_in_fp8():
    """Greedy text of 600 tokens, and log-probs as close to transformers' as its own rounding leaves them."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), load(DEMO)
    bench = Bench(model, kv_pages=600, page_size=16, **FP8)
    starts = {f"{n}:": n for n in (17, 995)}
    prompts = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in starts}
    for text, prompt in prompts.items():
        bench.submit(text, prompt, 600)
    bench.run()
    exact, coded = reference(DEMO, fp8=False), reference(DEMO, fp8=True)
    for text, prompt in prompts.items():
        counter = Counter(starts[text])
        for character in tokenizer.decode(bench.tokens(text)):
            assert character == counter.expected(1)
            counter.push(character)
        assert counter.numbers > 100
        assert errors(coded, prompt, bench, text).max() < 1e-2
        assert errors(exact, prompt, bench, text).max() < 0.1


@pytest.mark.parametrize("codes", [FP8, INT8])
def test_the_pool_counts_codes_and_scales(codes, model):
    fp8 = EngineSettings(max_rows=4, **codes)
    dtype = kv_dtype(fp8, model)
    kv = KVCache.allocate(model.spec, 5, 16, dtype, "cpu")
    held = sum(tensor.numel() * tensor.element_size() for tensor in kv.tensors)
    page = model.spec.kv_bytes_per_token(dtype) * 16
    assert held == 5 * page and page == 16 * 2 * 2 * 2 * (12 + 4), "layers, K and V, heads; codes and a scale"
    memory = DeviceMemory(0, 100 * page + page // 2, StepNeeds())
    assert kv_pages(EngineSettings(max_rows=4, kv_memory_fraction=0.5, **codes), model, dtype, 1024, memory) == 50
    assert kv_dtype(EngineSettings(), model) == torch.float32


def test_a_rebuilt_engine_clears_its_pages(model, prompt_of):
    from rollout.engine.build import rebuild_engine

    bench = Bench(model, **FP8)
    bench.complete("a", prompt_of(9), 20)
    for tensor in bench.engine.executor.step.kv.tensors:
        tensor.fill_(0x7F if tensor.dtype == torch.uint8 else float("nan"))
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("b", prompt_of(9), 20)
    assert bench.tokens("b") == bench.tokens("a")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_on_a_gpu_captured_steps_keep_codes_as_well_as_launched_ones(kind, tmp_path, prompt_of, monkeypatch):
    """By fused kernels in bf16: no farther from float32 with rounded KV than the generic path in bf16.

    Both are some way off, since a value that bf16 has moved may get the next code, which is an eighth of it away.
    """
    from rollout.engine.device.streams import make_device
    from tests.support.engine.cuda_harness import load_bf16, use_modules

    even = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint(kind, tmp_path, **even, **({"head_dim": 64} if kind == "qwen3" else {}))
    coded, model = reference(tmp_path, fp8=True), load_bf16(tmp_path)
    prompts = {f"r{i}": [token % 90 for token in prompt_of(5 + 37 * i, i)] for i in range(6)}
    means = {}
    for fused in (True, False):
        if not fused:
            use_modules(monkeypatch)
        bench = Bench(model, make_device("cuda"), page_size=16, cuda_graph_rows=256 * fused, **FP8)
        assert bench.engine.executor.captures == fused
        for i, (name, prompt) in enumerate(prompts.items()):
            bench.submit(name, prompt, 60, sampling={"temperature": 1.0, "seed": i})
        bench.run()
        means[fused] = torch.cat([errors(coded, ids, bench, name) for name, ids in prompts.items()]).mean()
        bench.close()
    assert means[True] < 1.3 * means[False] + 1e-2, means


def test_a_head_dimension_that_the_kernels_read_no_codes_of_is_refused_at_the_start() -> None:
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    model: Any = SimpleNamespace(spec=SimpleNamespace(kv_shapes=(KVShape(1, 6, 6),)), embed=on_gpu)
    with pytest.raises(ValueError, match="multiple of 4"):
        kv_dtype(EngineSettings(**FP8), model)
    assert kv_dtype(EngineSettings(), model) == torch.bfloat16
