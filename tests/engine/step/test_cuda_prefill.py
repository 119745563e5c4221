"""Prefill on Hopper at the widths of real models: padded experts and gathered attention, beside steps without them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_kernels.attention import gathered
from rollout_kernels.moe import gluon_experts

from rollout.config import ModelSettings
from rollout.engine.device.streams import make_device
from rollout.models import Decoder, load_model
from rollout.models.fused import FusedDecoder
from tests.support.engine.cuda_harness import watch_compilation
from tests.support.engine.harness import Bench
from tests.support.models.paged import PagedRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:no measured plan"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the kernels are Hopper's"
    ),
]
VOCAB = 2048
#: Widths of Qwen3-8B.
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
#: The second layer of the dense model sees a window, and both of the sparse one.
WINDOW = {"use_sliding_window": True, "sliding_window": 700, "max_window_layers": 1}
#: Widths of Qwen3-30B-A3B.
SPARSE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
#: Steps of a case: for each row of a step, how many tokens it gets.
CASES = {
    "whole": [{0: 4096}],
    "uneven": [{0: 1500, 1: 130, 2: 900}, {2: 777, 0: 2048, 3: 200, 1: 1, 4: 1111}],
}


def without_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps run without the kernels for Hopper."""
    for module in (gathered, gluon_experts):
        monkeypatch.setattr(module, "is_hopper", lambda device: False)


def load(folder: Path, config: dict, dtype: str) -> Decoder:
    (folder / "config.json").write_text(json.dumps(config))
    settings = ModelSettings(path=str(folder), load_format="random", dtype=dtype)
    return load_model(settings, torch.device("cuda")).model


def logits_of(model: Decoder, forward, steps: list[dict[int, int]], kv_dtype: torch.dtype | None = None):
    """Logits of every token, by row and then by position."""
    runner = PagedRunner(model, rows=5, max_tokens=4100, page_size=16, forward=forward, kv_dtype=kv_dtype)
    dice = torch.Generator().manual_seed(5)
    found: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        ids = {row: torch.randint(VOCAB, (count,), generator=dice).tolist() for row, count in step.items()}
        for row, logits in runner.prefill(ids).items():
            found.setdefault(row, []).append(logits.float())
    return torch.cat([torch.cat(found[row]) for row in sorted(found)])


def errors_of(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The relative error of each token's logits."""
    return (got - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["kv16", "kv8"])
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_prefill_is_as_close_to_float32_as_without_these_kernels(
    config, case, windowed, kv_dtype, tmp_path, monkeypatch
):
    config = {**config, **WINDOW} if windowed else config
    model, wide = load(tmp_path, config, "bfloat16"), load(tmp_path, config, "float32")
    for mine, theirs in zip(wide.parameters(), model.parameters(), strict=True):
        mine.data.copy_(theirs)
    exact = logits_of(wide, wide, CASES[case])
    del wide
    ran = {"attention": 0, "experts": 0}
    attend, down = gathered.attend_gathered, gluon_experts.padded_down

    def attend_counted(*args, **how):
        ran["attention"] += 1
        return attend(*args, **how)

    def down_counted(*args, **how):
        ran["experts"] += 1
        return down(*args, **how)

    monkeypatch.setattr(gathered, "attend_gathered", attend_counted)
    monkeypatch.setattr(gluon_experts, "padded_down", down_counted)
    new = errors_of(logits_of(model, FusedDecoder(model), CASES[case], kv_dtype), exact)
    counted = dict(ran)
    without_hopper(monkeypatch)
    old = errors_of(logits_of(model, FusedDecoder(model), CASES[case], kv_dtype), exact)
    assert counted["attention"] >= 1 and (counted["experts"] >= 2) == (config["model_type"] == "qwen3_moe")
    assert ran == counted, "without them, nothing of them runs"
    assert new.isfinite().all()
    # A near tie between experts that rounding turns costs much more than rounding, so the median is compared closely.
    assert new.median() < 1.1 * old.median() + 1e-4, (new.median(), old.median())
    assert new.mean() < 1.2 * old.mean() + 1e-3, (new.mean(), old.mean())
    assert new.max() < 1.5 * old.max() + 1e-2, (new.max(), old.max())


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}


def small_bench(folder: Path, **settings) -> Bench:
    """Padded experts from 512 tokens on, and gathered attention from a few blocks on."""
    model = load(folder, {**SPARSE, **WINDOW, **SMALL}, "bfloat16")
    how = {"max_rows": 8, "kv_pages": 2048, "page_size": 16, "prefill_chunk_tokens": 3000}
    return Bench(model, make_device("cuda"), **{**how, **settings})


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_nothing_is_compiled_for_prompts_of_any_length(kv_dtype, tmp_path, monkeypatch):
    ran = []
    attend = gathered.attend_gathered
    monkeypatch.setattr(gathered, "attend_gathered", lambda *args, **how: (ran.append(1), attend(*args, **how))[1])
    bench = small_bench(tmp_path, kv_dtype=kv_dtype)
    compiled = watch_compilation(monkeypatch)
    del ran[:]
    dice = torch.Generator().manual_seed(2)

    def submit(name: str, length: int) -> None:
        bench.submit(name, torch.randint(VOCAB, (length,), generator=dice).tolist(), 4)

    for length in (100, 511, 512, 513, 1000, 1500, 2047, 2048, 2500, 3500, 7000):
        submit(f"r{length}", length)
        bench.run()
    for i, length in enumerate((700, 60, 2100, 1300, 33)):
        submit(f"s{i}", length)
    bench.run()
    assert compiled == [] and ran


def test_recorded_experts_are_those_of_steps_without_these_kernels(tmp_path, monkeypatch):
    """Of the first layer, whose router sees the same input by either path, up to rounding of attention."""
    routing = []
    for hopper in (True, False):
        if not hopper:
            without_hopper(monkeypatch)
        bench = small_bench(tmp_path, routing=True)
        ids = torch.randint(VOCAB, (2500,), generator=torch.Generator().manual_seed(3)).tolist()
        bench.complete("r", ids, 2, routing_from=0)
        routing.append(np.concatenate(bench.completions["r", 0].routing)[:2500, 0])
        bench.close()
    mine, theirs = routing
    assert mine.shape == theirs.shape == (2500, 4)
    assert (mine[:, :, None] == theirs[:, None, :]).any(-1).mean() > 0.95, "near ties turn by rounding, nothing else"
