"""Attention to chosen blocks by the kernels, and what of a config it refuses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_decode_plan import plan_decode_work

from rollout.config import EngineSettings, ModelSettings
from rollout.engine.model_checks import check_model
from rollout.engine.sizing import kv_dtype
from rollout.models import load_model
from rollout.models.chosen_blocks import pages_of_heads
from rollout.models.config_spec import spec_from_config
from rollout.models.deterministic import CONFIG
from tests.support.models.both_ways import edit
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


def test_a_block_more_or_less_is_seen(made: tuple[Any, Any], tmp_path: Path) -> None:
    assert _difference(*made) < 1e-4
    for count in (1, 3):
        made[1].save_pretrained(tmp_path)
        edit(tmp_path, lambda content, count=count: content.update(index_topk_blocks=count))
        assert _difference(load_model(ModelSettings(path=str(tmp_path)), CPU), made[1]) > 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_the_kernel_reads_pages_of_heads() -> None:
    """Each row has pages of one KV head, in any order, of which the last one is not full."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 7, 4, 3, 16)
    pages = torch.stack([torch.randperm(7)[:5] for _ in range(6)])
    lens, heads = torch.tensor([17, 1, 8, 20, 13, 5]), torch.arange(3).repeat(2)
    q = torch.randn(6, 2, 16)
    work = plan_decode_work(lens, 1, group=2, window=None, config=CONFIG, max_context=20)
    views = [pages_of_heads(cache) for cache in (k, v)]
    numbers = (pages * 12 + heads[:, None]).int()
    got = decode_attention(q, *views, numbers, lens, scale=0.3, window=None, work=work)
    for row, head in enumerate(heads):
        keys, values = (cache[pages[row], :, head].flatten(0, 1)[: lens[row]].double() for cache in (k, v))
        exact = torch.softmax(q[row].double() @ keys.T * 0.3, -1) @ values
        torch.testing.assert_close(got[row].double(), exact, rtol=1e-5, atol=1e-5)


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
