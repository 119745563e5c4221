"""Two small checkpoints of one shape, made by transformers, and the engine's view of them."""

import functools
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.engine.adapted import Adapters, make_adapters
from tests.support.engine.harness import VOCAB, Bench, load, prompt_of
from tests.support.engine.sleeping import Sleeping, outcome, submit_some
from tests.support.models.hybrids import make_hybrid


def build_qwen3(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # transformers' initial weights give nearly flat distributions
    return model


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Close the engines that a test has made and left open: nothing may have leaked in any of them."""
    Bench.opened = opened = []
    passed = False
    try:
        result = yield
        passed = True
        return result
    finally:
        while opened:
            opened[-1].close(check=passed)
        Bench.opened = None


@pytest.fixture(scope="session")
def hf_models() -> list[Qwen3ForCausalLM]:
    torch.set_num_threads(1)
    return [build_qwen3(seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def folders(hf_models, tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("qwen3")
    folders = [base / str(i) for i in range(len(hf_models))]
    for hf_model, folder in zip(hf_models, folders, strict=True):
        hf_model.save_pretrained(folder)
    return folders


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """Folders and transformers' models with states by family and seed, made when first asked for."""
    torch.set_num_threads(1)

    @functools.cache
    def make(stem: str = "Qwen3_5", seed: int = 0) -> tuple[Path, torch.nn.Module]:
        folder = tmp_path_factory.mktemp(f"{stem}-{seed}")
        return folder, make_hybrid(stem, folder, seed)

    return make


@pytest.fixture
def model(folders):
    """A fresh decoder with the first checkpoint's weights; a test may change them."""
    return load(folders[0])


@pytest.fixture
def other(folders):
    """A fresh decoder with the second checkpoint's weights."""
    return load(folders[1])


@pytest.fixture(scope="session")
def base(hf_models) -> Qwen3ForCausalLM:
    return hf_models[0]


@pytest.fixture(scope="module")
def adapters(hf_models, folders, tmp_path_factory) -> Adapters:
    return make_adapters(hf_models[0], folders[0], tmp_path_factory)


@pytest.fixture(scope="session")
def greedy(hf_models):
    """transformers' own greedy continuation, which tests with the same prompt share."""
    known: dict[tuple[int, ...], list[int]] = {}

    def run(prompt: list[int], count: int, which: int = 0) -> list[int]:
        found = known.setdefault((which, *prompt), [])
        if (missing := count - len(found)) > 0:
            ids = torch.tensor([[*prompt, *found]])
            options = {"max_new_tokens": missing, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            out = hf_models[which].generate(ids, attention_mask=torch.ones_like(ids), **options)
            found += out[0, -missing:].tolist()
        return found[:count]

    return run


@pytest.fixture(name="prompt_of")
def _prompt_of():
    return prompt_of


@pytest.fixture(scope="session")
def never_slept(folders):
    """The outcome of `submit_some` at an engine that stays awake."""
    bench = Sleeping(load(folders[0]))
    submit_some(bench, prompt_of)
    bench.finish()
    return outcome(bench)
