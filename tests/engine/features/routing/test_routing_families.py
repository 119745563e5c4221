"""Records of experts equal the experts that transformers runs: other routers, shared experts, states, latents.

The reference is what transformers hands to its experts, so it holds for every rule of a router. A shared expert is in
no record: transformers gives it no index, and an index of ours for it would be one that no router can choose.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench, load
from tests.support.engine.routing import routing_of
from tests.support.kernels.grids import nightly
from tests.support.models.every_family import EVERY_FAMILY

_FAMILIES = (
    "Qwen3_5Moe",  # states, and a shared expert with a gate that is stored with the others
    "Qwen3Next",  # states, a shared expert of another width, a dense layer between sparse ones
    "Glm4Moe",  # scores with a bias
    "Afmoe",
    "GptOss",
    "DeepseekV3",  # latents, and scores in groups
    "DeepseekV4",  # square roots of softplus, and a table
    *nightly("Qwen2Moe", "MiniMaxM2", "DeepseekV2 groups", "Glm4MoeLite"),
)


@pytest.fixture(scope="module", params=_FAMILIES)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Our model and transformers'."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("family")
    hf_model = EVERY_FAMILY[request.param](folder, 0)
    return load(folder), hf_model


def prompts_for(vocab: int) -> Callable[..., list[int]]:
    def prompt_of(length: int, seed: int = 0) -> list[int]:
        return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    return prompt_of


def chosen_by(hf_model: Any, tokens: list[int]) -> torch.Tensor:
    """[positions, sparse layers, K]: the experts that transformers runs for all tokens but the last, sorted."""
    found: list[torch.Tensor] = []
    blocks = [module for module in hf_model.modules() if type(module).__name__.endswith("Experts")]

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        with torch.inference_mode():
            hf_model(torch.tensor([tokens[:-1]]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(found) == len(blocks) > 0
    return torch.stack([experts.view(len(tokens) - 1, -1) for experts in found], dim=1).sort(-1).values


def agrees(model: Any, hf_model: Any, prompt: list[int], tokens: list[int], routing: np.ndarray) -> None:
    """Entry i is what transformers runs for token i."""
    expected = chosen_by(hf_model, prompt + tokens)
    told = torch.from_numpy(np.sort(routing.astype(np.int64), axis=-1))
    assert told.shape == expected.shape and int(told.max()) < model.spec.moe.experts
    assert (told == expected).float().mean() > 0.995, "only near ties may differ, by rounding"


def test_records_of_chunks_groups_and_preempted_rows(family: tuple[Any, Any]) -> None:
    model, hf_model = family
    prompt_of = prompts_for(model.spec.vocab)
    bench = Bench(model, max_rows=5, kv_pages=45, prefill_chunk_tokens=23, routing=True)
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate((3, 50, 17, 31, 8))}
    for i, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, 40, n=2 if i == 1 else 1, routing_from=0, stream_every=7 * (i % 2))
        bench.ticks(3)
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    for name, prompt in prompts.items():
        for index in range(2 if name == "r1" else 1):
            agrees(model, hf_model, prompt, bench.tokens(name, index), routing_of(bench, name, index))


def test_records_of_tokens_that_were_known_before(family: tuple[Any, Any]) -> None:
    """From a snapshot or full pages, of a group, and of the turn before; the last page is a copy."""
    model, hf_model = family
    prompt_of = prompts_for(model.spec.vocab)
    bench = Bench(model, routing=True, prefill_chunk_tokens=16)
    base = prompt_of(38, 3)
    for name, prompt, n in (("first", base, 3), ("equal", base, 1), ("longer", base + prompt_of(9, 4), 1)):
        bench.complete(name, prompt, 12, n=n, routing_from=0)
        for index in range(n):
            agrees(model, hf_model, prompt, bench.tokens(name, index), routing_of(bench, name, index))
        assert (bench.done[name].cached_tokens > 30) == (name != "first")
    talk = Conversation(bench, "s", prompt_of)
    for turn in range(3):
        tokens = talk.say(13, routing_from=0)
        prompt = talk.said[: -len(tokens)]
        agrees(model, hf_model, prompt, tokens, routing_of(bench, talk.turn))
        assert (talk.reused > 0) == (turn > 0)
