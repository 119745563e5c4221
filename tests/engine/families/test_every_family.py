"""Every native family through the whole engine: tokens and log-probs are transformers', whatever happens meanwhile."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.models.registry import supported_architectures
from tests.support.engine.harness import Bench, Completion, load
from tests.support.engine.scores import Wanted
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models import images
from tests.support.models.every_family import EVERY_FAMILY

#: Tokens of the prompts; the second one is of a group.
_PROMPTS = (3, 50, 17, 31, 8, 1)
_PAGE_TOKENS = 4
#: One of each kind of layer. The logits of every family are compared in tests/unit/models, too.
_KINDS = (
    *("llama", "qwen3_moe", "Gemma3", "Phi3 long", "GptOss", "Glm4Moe", "MiMo", "Qwen3_5", "Qwen3Next", "OlmoHybrid"),
    *(
        "DeepseekV3",
        "DeepseekV4",
        "Glm4MoeLite",
        "images: Qwen3.5",
        "GraniteMoeHybrid",
        "NemotronH",
        "Gemma4",
        "MiniMaxM3VL",
    ),
)


def prompt_of(vocab: int, length: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 28) for name in _KINDS),
        *nightly(*((name, steps) for name in EVERY_FAMILY for steps in (40, 200))),
    ],
)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, steps: int, tmp_path: Path) -> None:
    """Prompts in chunks, a group, rows that come, go and are preempted, and other weights in the middle.

    The update drops all KV, so every token is that of its own version on the whole text before it.
    """
    torch.set_num_threads(1)
    references = [EVERY_FAMILY[name](tmp_path / str(seed), seed) for seed in range(2)]
    model, other = (load(tmp_path / str(seed)) for seed in range(2))
    vocab, mailbox = model.spec.vocab, Mailbox()
    steps = min(steps, model.spec.max_positions - max(_PROMPTS))
    bench = Bench(
        model,
        receiver=mailbox,
        max_rows=5,
        page_size=_PAGE_TOKENS,
        kv_pages=30 if steps < 40 else 45 if steps == 40 else 75,
        prefill_chunk_tokens=23,
        kv_on_swap="recompute",
    )
    prompts = [prompt_of(vocab, length, i) for i, length in enumerate(_PROMPTS)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, steps - 4 * i, n=2 if i == 1 else 1)
        for _ in range(3):
            bench.engine.tick()  # the batch changes as they come and go
    chosen = np.random.default_rng(0).integers(0, vocab, (19, 5)).astype(np.int32)
    wanted = Wanted(last=19, tops=30, chosen=chosen, entropy=True)
    bench.submit("scored", prompts[1], 0, **wanted.fields())
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0 and len(mailbox.done) == 1
    for i, prompt in enumerate(prompts):
        assert len(bench.tokens(f"r{i}")) == steps - 4 * i
        for index in range(2 if i == 1 else 1):
            agrees(references, prompt, bench.completions[f"r{i}", index])
    assert set(bench.completions["r0", 0].versions) == {0, 1}
    version = bench.done["scored"].prompt_version
    wanted.check(bench.done["scored"], prompts[1], references[version])
    bench.complete("again", prompts[1], 0, **wanted.fields())
    wanted.check(bench.done["again"], prompts[1], references[1])
    assert bench.tokens("scored") == [] and bench.completions["scored", 0].finish.reason == "length"


def agrees(references: list[Any], prompt: list[int], completion: Completion) -> None:
    """Tokens are transformers' greedy choice with the weights of each token, and log-probs within 1e-4 of its own."""
    tokens, versions = completion.token_ids, torch.tensor(completion.versions)
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens])
        logits = torch.stack([model(input_ids=ids).logits[0, len(prompt) - 1 : -1] for model in references])
    logits = logits[versions, torch.arange(len(tokens))]
    assert logits.argmax(-1).tolist() == tokens
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.raw_logprobs), logprobs, atol=1e-4, rtol=0)


def test_every_architecture_that_runs_natively_is_here(tmp_path: Path) -> None:
    made = set()
    for name, make in EVERY_FAMILY.items():
        make(tmp_path / name, 0)
        made.add(json.loads((tmp_path / name / "config.json").read_text())["architectures"][0])
    towers = {
        f"{stem}ForConditionalGeneration" for stem, *_ in images.MODELS.values()
    }  # tests/engine/features/images/test_images.py
    assert made | towers == set(supported_architectures())
