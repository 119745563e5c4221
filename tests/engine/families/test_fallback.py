"""Models that run through transformers' own code, through the whole engine: its greedy tokens are transformers' own."""

import copy
import random

import pytest
import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.build import sleeping_memory
from rollout.engine.device.streams import CpuDevice
from rollout.models import load_model
from rollout.models.fallback.experts import is_plain
from rollout.models.fallback.tested import TESTED, TestedArchitecture
from tests.support.engine.harness import Bench
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle
from tests.support.models.fallback import CONFIGS, make_checkpoint
from tests.support.models.paged import PagedRunner

#: In every run: bounded scores and windows; sinks and experts with biases; keys and values of different dimensions and
#: merged names of experts; layer norms with biases and learned positions; states, also beside attention; attention of
#: the module's own. All others only at night.
_ALWAYS = (
    *("Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel"),
    *("MambaForCausalLM", "GraniteMoeHybridForCausalLM", "StableLmForCausalLM"),
)


def load(folder):
    settings = ModelSettings(path=str(folder), dtype="float32", model_impl="transformers")
    return load_model(settings, torch.device("cpu")).model


@pytest.fixture(
    scope="module",
    params=[name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.nightly) for name in CONFIGS],
)
def made(request, tmp_path_factory):
    """Our model, transformers' model of the same weights, and one of other weights in both forms."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    references = [make_checkpoint(request.param, folder / str(seed), seed) for seed in (0, 1)]
    return [load(folder / str(seed)) for seed in (0, 1)], references


def prompt_of(model, length, seed):
    return torch.randint(0, model.spec.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(reference, ids):
    with torch.inference_mode():
        return reference(torch.tensor([ids]), use_cache=False).logits[0].float()


def test_all_architectures_of_the_table_are_held_here():
    assert set(TESTED) == set(CONFIGS) and len(TESTED) >= 25 and set(_ALWAYS) < set(TESTED)


def traits_of(model):
    """The special traits of a model, from its layers."""
    layers = model.spec.layers
    special = {
        "windows": any(layer.window is not None for layer in layers),
        "softcap": any(layer.softcap for layer in layers),
        "sinks": any(layer.sinks for layer in layers),
        "values of another dimension": any(layer.kv.k_dim != layer.kv.v_dim for layer in layers),
        "shared KV": any(layer.shared for layer in layers),
        "states": any(layer.states for layer in model.spec.caches),
        "gathered": model.spec.way.attention == "gathered",
    }
    blocks = [module for module in model.module.modules() if hasattr(module, "_apply_gate")]
    experts = "none" if not blocks else "ours" if all(is_plain(block) for block in blocks) else "transformers'"
    return TestedArchitecture(", ".join(name for name, present in special.items() if present) or "plain", experts)


def test_what_the_table_says_of_a_model_is_so(made):
    (model, _), _ = made
    assert TESTED[model.spec.architecture] == traits_of(model)


def test_prefill_and_decode_give_the_logits_of_eager_attention(made):
    (model, _), (reference, _) = made
    ids = [prompt_of(model, length, length) for length in (240, 211)]
    runner, sizes = PagedRunner(model, rows=2, max_tokens=240), random.Random(3)
    ours = [[], []]
    while any(runner.lengths[row] < 40 for row in (0, 1)):
        begin = list(runner.lengths)
        pieces = {row: ids[row][begin[row] : min(40, begin[row] + sizes.randint(1, 15))] for row in (1, 0)}
        for row, logits in runner.prefill({row: piece for row, piece in pieces.items() if piece}).items():
            ours[row].append(logits)
    for position in range(40, 240):
        step = {row: ids[row][position] for row in (0, 1) if position < len(ids[row])}
        for row, logits in runner.decode(step, padding=position % 3).items():
            ours[row].append(logits[None])
    double = copy.deepcopy(reference).double()
    for row in (0, 1):
        exact = logits_of(double, ids[row])
        rounding = (logits_of(reference, ids[row]) - exact).abs().max()  # up to 2e-4 with GraniteMoe
        assert (torch.cat(ours[row]) - exact).abs().max() < max(1e-4, 3 * rounding)


def test_greedy_tokens_equal_transformers_through_preemptions_and_a_swap(made):
    (model, other), references = made
    mailbox = Mailbox()
    bench = Bench(model, receiver=mailbox, max_rows=4, kv_pages=50, prefill_chunk_tokens=23, kv_on_swap="recompute")
    before = {name: view.clone() for name, view in model.hf_views().items()}
    prompts = {f"r{i}": prompt_of(model, length, i) for i, length in enumerate((50, 1, 31, 17, 8))}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 40, n=2 if name == "r0" else 1)
        bench.engine.tick()
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 25)
    assert bench.engine.roster.counters.preemptions > 0
    swapped = 0
    for name, prompt in prompts.items():
        tokens, versions = bench.tokens(name), bench.completions[name, 0].versions
        assert len(tokens) == 40
        by_version = [logits_of(reference, prompt + tokens)[len(prompt) - 1 : -1] for reference in references]
        for index, (token, version) in enumerate(zip(tokens, versions, strict=True)):
            logits = by_version[version][index]
            assert logits[token] > logits.max() - 1e-3  # the largest one, whatever the rounding of this CPU
        logprobs = torch.stack(
            [by_version[v][i].log_softmax(-1)[t] for i, (t, v) in enumerate(zip(tokens, versions, strict=True))]
        )
        assert (torch.tensor(bench.completions[name, 0].raw_logprobs) - logprobs).abs().max() < 1e-4
        swapped += set(versions) == {0, 1}
    assert swapped, "no row went on over the swap"
    for name, view in model.hf_views().items():
        view.copy_(before[name])


@pytest.fixture(scope="module")
def cohere(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cohere")
    return folder, make_checkpoint("CohereForCausalLM", folder)


def greedy(reference, prompt, count):
    tokens = []
    for _ in range(count):
        tokens.append(int(logits_of(reference, prompt + tokens)[-1].argmax()))
    return tokens


def test_weights_and_kv_of_a_fallback_model_come_back_after_a_sleep(cohere):
    folder, reference = cohere
    model = load(folder)
    settings = Settings(engine=EngineSettings(sleep=True, max_rows=4, kv_pages=64, page_size=4))
    memory = sleeping_memory(settings, CpuDevice(), model)
    assert memory is not None
    memory.save()
    memory.release()
    memory.restore()
    bench = Bench(model, sleep=True)
    prompt = prompt_of(model, 20, 5)
    bench.complete("a", prompt, 20)
    assert bench.tokens("a") == greedy(reference, prompt, 20)


def test_a_cache_of_codes_gives_the_log_probs_of_the_native_family_with_one(tmp_path):
    make_checkpoint("LlamaForCausalLM", tmp_path)
    prompt = list(range(3, 60))
    logprobs = []
    for impl in ("native", "transformers"):
        settings = ModelSettings(path=str(tmp_path), dtype="float32", model_impl=impl)
        bench = Bench(load_model(settings, torch.device("cpu")).model, kv_dtype="fp8_e4m3", prefill_chunk_tokens=23)
        bench.complete("a", prompt, 0, prompt_logprobs=True)
        logprobs.append(torch.tensor(bench.completions["a", 0].prompt_logprobs[1:]))
        bench.close()
    assert (logprobs[0] - logprobs[1]).abs().median() < 1e-3
