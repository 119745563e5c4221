"""Models through transformers' own code on a GPU: captured where they can be, as near to float32 as transformers."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.models import load_model
from rollout.models.fallback.model import TransformersModel
from tests.support.engine.cuda_harness import assert_one_launch_a_step, assert_steady
from tests.support.engine.harness import Bench
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.updates import Mailbox, Update, beside_a_fresh_engine
from tests.support.models.fallback import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:no measured plan")]
VOCAB = 89
prompt_of = functools.partial(any_prompt, vocab=VOCAB)
#: Sizes that the kernels take.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
#: A dense model; bounded scores and windows; sinks, with experts of transformers; experts by our kernels.
CAPTURED: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": {"hidden_size": 256, "intermediate_size": 640},
    "Gemma2ForCausalLM": {**WIDE, "query_pre_attn_scalar": 64},
    "GraniteMoeForCausalLM": {**WIDE, "intermediate_size": 128},
}
LAUNCHED: dict[str, dict[str, Any]] = {"DeepseekV3ForCausalLM": {}}


def load(folder: Path, dtype: str) -> Any:
    settings = ModelSettings(path=str(folder), dtype=dtype, model_impl="transformers")
    return load_model(settings, torch.device("cuda")).model


def bench_of(model: Any, **engine: Any) -> Bench:
    bench = Bench(model, make_device("cuda"), **{"kv_pages": 512, "page_size": 16, **engine})
    assert isinstance(bench.engine.executor.step.model, TransformersModel)
    return bench


def made(architecture: str, folder: Path, seed: int = 0) -> Any:
    """A checkpoint with weights that bf16 holds, and transformers' eager float32 model of it, on the CPU."""
    model = make_checkpoint(architecture, folder, seed, **{**CAPTURED, **LAUNCHED}[architecture])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("architecture", [*CAPTURED, *LAUNCHED])
def test_tokens_in_float32_are_transformers(architecture: str, tmp_path: Path) -> None:
    """Of captured and of launched steps; rows come and go, share a prompt and are preempted."""
    reference = made(architecture, tmp_path)
    bench = bench_of(load(tmp_path, "float32"), max_rows=4, kv_pages=20, prefill_chunk_tokens=23)
    # In float32 transformers' own experts run, which ask the device for the tokens of each.
    assert bench.engine.executor.captures == (architecture in ("CohereForCausalLM", "Gemma2ForCausalLM"))
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate((50, 3, 31, 17, 8))}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 50, n=2 if name == "r0" else 1)
        bench.engine.tick()
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    for name, prompt in prompts.items():
        done = bench.completions[name, 0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + done.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(done.token_ids)[:, None]
        assert (logits.gather(1, chosen)[:, 0] > logits.max(-1).values - 1e-3).all()
        logprobs = logits.float().log_softmax(-1).gather(1, chosen)[:, 0]
        assert (torch.tensor(done.raw_logprobs) - logprobs).abs().max() < 3e-4


@pytest.mark.parametrize("architecture", CAPTURED)
def test_logprobs_in_bf16_are_no_further_from_float32_than_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = made(architecture, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    theirs = theirs.to("cuda").eval()
    bench = bench_of(load(tmp_path, "bfloat16"), max_rows=8, prefill_chunk_tokens=100)
    assert bench.engine.executor.captures
    prompts = {f"r{i}": prompt_of(20 + 31 * i, i) for i in range(8)}
    for i, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, 60 + 5 * i, sampling={"temperature": 1.0, "seed": i})
    bench.run()
    ours_off, theirs_off = [], []
    for name, prompt in prompts.items():
        done = bench.completions[name, 0]
        text, chosen = torch.tensor([prompt + done.token_ids]), torch.tensor(done.token_ids)[:, None]
        with torch.inference_mode():
            exact, rough = (
                model(text.to(model.device), use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
                for model in (reference, theirs)
            )
        exact, rough = (logits.log_softmax(-1).gather(1, chosen)[:, 0] for logits in (exact, rough))
        ours_off.append((torch.tensor(done.logprobs) - exact).abs())
        theirs_off.append((rough - exact).abs())
    ours, others = torch.cat(ours_off).median(), torch.cat(theirs_off).median()
    assert ours < 1.1 * others + 1e-3, (ours, others)


def test_a_swap_is_seen_by_captured_steps(tmp_path: Path) -> None:
    for seed in (0, 1):
        made("CohereForCausalLM", tmp_path / str(seed), seed)
    model, other = (load(tmp_path / str(seed), "float32") for seed in (0, 1))
    mailbox = Mailbox()
    bench = bench_of(model, receiver=mailbox, kv_on_swap="recompute")
    after, expected = beside_a_fresh_engine(
        bench, mailbox, Update(1, other, model), lambda: bench_of(load(tmp_path / "1", "float32")), prompt_of(13, 1)
    )
    assert after == expected


def test_a_steady_step_is_one_launch_that_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("CohereForCausalLM", tmp_path)
    bench = bench_of(load(tmp_path, "bfloat16"), max_rows=4)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(9, i), 300, sampling={"temperature": 1.0, "seed": i})
    assert_one_launch_a_step(bench)
    assert_steady(bench, monkeypatch)
