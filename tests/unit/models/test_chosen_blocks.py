"""Attention to chosen blocks by the kernels, and what of a config it refuses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rollout_kernels.attention import triton_index_scores
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_decode_plan import plan_decode_work

from rollout.config import EngineSettings, ModelSettings
from rollout.engine.model_checks import check_model
from rollout.engine.sizing import kv_dtype
from rollout.models import load_model
from rollout.models.chosen_blocks import BlockAttention
from rollout.models.config_spec import spec_from_config
from rollout.models.deterministic import CONFIG
from tests.support.models.paged import PagedRunner
from tests.support.models.variants import CONFIGS, SIZES, make_variant
from tests.support.settings import settings_of

CPU = torch.device("cpu")
NAME = "MiniMaxM3VL"
#: They have four blocks, of which a token attends to its own one and another one.
TOKENS = torch.randint(0, 91, (27,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model as it is served, and transformers' own."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("model")
    reference = make_variant(NAME, folder, num_hidden_layers=2, index_block_size=8, **{
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "dense"],
    })  # fmt: skip
    return load_model(ModelSettings(path=str(folder)), CPU), reference


def _difference(loaded: Any, reference: Any) -> float:
    """The largest difference of logits: two rows, of which one has a long prompt, then decode steps."""
    runner = PagedRunner(loaded.model, rows=2, max_tokens=len(TOKENS))
    steps = [runner.prefill({0: TOKENS[:7], 1: TOKENS[:2]}), runner.prefill({0: TOKENS[7:20]})]
    steps += [{row: x[None] for row, x in runner.decode({0: token, 1: token}).items()} for token in TOKENS[20:]]
    with torch.no_grad():
        exact = [reference(torch.tensor([ids])).logits[0] for ids in (TOKENS, TOKENS[:2] + TOKENS[20:])]
    found = [torch.cat([step[row] for step in steps if row in step]) for row in range(2)]
    return max((a - b).abs().max().item() for a, b in zip(found, exact, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_the_kernels_read_chosen_blocks(made: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def plan(
        pages: torch.Tensor, lens: torch.Tensor, cache: torch.Tensor, *, heads: int, window: None, **_: Any
    ) -> Any:
        return plan_decode_work(lens, 1, group=heads, window=window, config=CONFIG, max_context=16)

    def attend(q: torch.Tensor, *given: torch.Tensor, plan: Any, max_context: int, **how: Any) -> torch.Tensor:
        runs.append(max_context)
        return decode_attention(q, *given, work=plan, **how)

    monkeypatch.setattr("rollout.models.chosen_blocks.index_scores", triton_index_scores.index_scores)
    monkeypatch.setattr("rollout.models.chosen_blocks.plan_paged_decode", plan)
    monkeypatch.setattr("rollout.models.chosen_blocks.paged_decode_attention", attend)
    assert _difference(*made) < 1e-4
    assert set(runs) == {16}


def test_a_block_more_or_less_is_seen(made: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, reference = made
    block = next(module for module in loaded.model.modules() if isinstance(module, BlockAttention))
    for other in (1, 3):
        monkeypatch.setattr(block, "blocks", block.blocks._replace(top_k=other))
        assert _difference(loaded, reference) > 0.1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"index_n_heads": 4}, "index_n_heads"),
        ({"index_head_dim": 6}, "index_head_dim"),
        ({"index_local_blocks": 3}, "index_local_blocks"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(wrong: dict[str, Any], says: str) -> None:
    config = transformers.MiniMaxM3VLTextConfig(**{**SIZES, **CONFIGS[NAME]})
    for key, value in wrong.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=says):
        spec_from_config(config, f"{NAME}ForCausalLM")


def test_settings_that_it_does_not_have_are_refused(made: tuple[Any, Any]) -> None:
    settings, model = partial(settings_of, EngineSettings), made[0].model
    with pytest.raises(ValueError, match="index_block_size"):
        check_model(settings(page_size=16), model)
    check_model(settings(page_size=8), model)
    with pytest.raises(ValueError, match="chooses blocks"):
        kv_dtype(settings(kv_dtype="fp8_e4m3"), model)
