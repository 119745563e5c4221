"""Prompts with images on a GPU: no further from float32 than transformers' own bf16, in captured steps."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.models import load_model
from tests.support.engine.cuda_harness import tick_without_waiting
from tests.support.engine.harness import Bench
from tests.support.engine.images import encoded, submit
from tests.support.models.images import FAMILIES, ImagePrompt, logits_of, make_model, picture, prompt_with

pytestmark = pytest.mark.gpu
PAGES = {"kv_pages": 512, "page_size": 16, "prefill_chunk_tokens": 256}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A bf16 checkpoint; transformers' model of its weights in float32; and in bf16."""
    folder = tmp_path_factory.mktemp("images")
    exact = make_model(request.param, folder, large=True)
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict(rounded.float().state_dict())
    rounded.to(torch.bfloat16).save_pretrained(folder)
    return folder, exact.eval(), rounded.eval()


def make_bench(folder: Path, **engine: Any) -> Bench:
    settings = ModelSettings(path=str(folder), dtype="bfloat16", images=True)
    model = load_model(settings, torch.device("cuda")).model
    return Bench(model, make_device("cuda"), **(PAGES | engine))


def prompts() -> dict[str, ImagePrompt]:
    return {
        "text": prompt_with(40),
        "one": prompt_with(20, picture(8, 12), 30, seed=1),
        "several": prompt_with(3, picture(2, 8, 1), 1, picture(16, 12, 2), 4, picture(2, 2, 3), 9, seed=2),
        "long": prompt_with(4, picture(32, 40, 4), 20, seed=3),
    }


def test_logprobs_are_no_further_from_float32_than_those_of_transformers(models: tuple[Path, Any, Any]) -> None:
    folder, exact, rounded = models
    bench = make_bench(folder)
    assert bench.engine.executor.captures
    ours, theirs = [], []
    for name, prompt in prompts().items():
        submit(bench, name, prompt, 24, sampling={"temperature": 1.0, "seed": 5})
    bench.run()
    for name, prompt in prompts().items():
        done = bench.completions[name, 0]
        ids = torch.tensor(done.token_ids)[:, None]
        expected, bf16 = (
            logits_of(model, prompt, done.token_ids)[len(prompt.ids) - 1 : -1].float().log_softmax(-1).gather(1, ids)
            for model in (exact, rounded)
        )
        ours.append((torch.tensor(done.raw_logprobs) - expected[:, 0]).abs())
        theirs.append((bf16 - expected)[:, 0].abs())
    error, reference = torch.cat(ours).mean(), torch.cat(theirs).mean()
    assert error < 1.5 * reference + 1e-3, (error, reference)


def test_depth_one_and_two_are_equal_bit_for_bit(models: tuple[Path, Any, Any]) -> None:
    runs = []
    for depth in (1, 2):
        bench = make_bench(models[0], pipeline_depth=depth)
        for name, prompt in prompts().items():
            submit(bench, name, prompt, 40, n=2, sampling={"temperature": 1.0, "seed": 5})
        bench.run()
        assert encoded(bench) == 5
        runs.append({key: (done.token_ids, done.logprobs) for key, done in bench.completions.items()})
        bench.close()
    assert runs[0] == runs[1]


def test_the_host_does_not_wait_for_an_image(models: tuple[Path, Any, Any]) -> None:
    """An image is encoded while rows decode; the tick that launches it neither waits for a stream nor copies back."""
    bench = make_bench(models[0])
    for turn in range(2):  # the first time sizes are seen, libraries may wait
        submit(bench, f"rows{turn}", prompt_with(20, seed=turn), 200, n=4)
        bench.ticks(20)
        submit(bench, f"image{turn}", prompt_with(4, picture(16, 24, turn), 6), 8)
        if turn == 0:
            bench.run()
        else:
            tick_without_waiting(bench)
            bench.run()
    assert encoded(bench) == 2
