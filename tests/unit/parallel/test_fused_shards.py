"""Shards run by the fused kernels, in Triton's interpreter: sums over gloo, and over memory that processes share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.moe.triton_keep_experts import keep_experts
from rollout_kernels.moe.triton_router import Routing
from rollout_kernels.parallel import TensorGroup

from rollout.config import ModelSettings
from rollout.models import Decoder, load_model
from rollout.models.fused import FusedDecoder
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import HYBRIDS, make_hybrid
from tests.support.models.paged import PROMPT, PagedRunner
from tests.support.models.side_by_side import MODELS
from tests.support.models.variants import CONFIGS, SIZES
from tests.support.parallel.logits import join_logits
from tests.support.parallel.ranks import Ranks
from tests.support.parallel.shared_peers import share_buffers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
CPU = torch.device("cpu")
MORE = [
    ("Qwen3", False),
    ("Phi3", True),
    ("SmolLM3", False),
    ("Qwen3_5", True),
    ("Gemma3", True),
    ("Gemma4", True),
    ("Granite", False),
]
EXPERTS: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2,
}  # fmt: skip


_OF_MODELS = {"Llama4": "llama4", "NemotronH": "nemotron_h"}


def _steps(model: Decoder, forward: Any) -> torch.Tensor:
    """Logits of a prompt in two chunks, and of decode steps."""
    runner = PagedRunner(model, rows=2, max_tokens=len(PROMPT), forward=forward)
    found = [runner.prefill(dict.fromkeys(range(2), part))[1] for part in (PROMPT[:7], PROMPT[7:11])]
    found += [runner.decode(dict.fromkeys((1, 0), token))[1][None] for token in PROMPT[11:]]
    return join_logits(model, torch.cat(found))


def _load(folder: Path, dtype: str, group: TensorGroup | None = None, split: Any = "heads") -> Decoder:
    return load_model(ModelSettings(path=str(folder), dtype=dtype), CPU, group=group, split=split).model


def _check_wanted(model: Decoder) -> None:
    """The last layer of a prefill for wanted tokens alone."""
    all_, last = (PagedRunner(model, rows=3, max_tokens=len(PROMPT), forward=FusedDecoder(model)) for _ in range(2))
    pieces = {row: PROMPT[: 5 + row] for row in range(3)}
    exact, found = all_.prefill(pieces), last.prefill(pieces, last_of=[0, 2])
    for row in (0, 2):
        assert (found[row][0] - exact[row][-1]).abs().max() < 1e-4


def _by_kernels(group: TensorGroup, folder: Path, shared: Path | None, dtype: str, split: Any) -> torch.Tensor:
    model = _load(folder, dtype, group, split)
    if shared is not None:  # room for decode steps, in one form or the other; prefills are larger
        group.large_peers = share_buffers(group, shared, 4, model.spec.hidden, flagged=True)
        group.peers = share_buffers(group, shared, 1, model.spec.hidden, beside=group.large_peers)
    try:
        found = _steps(model, FusedDecoder(model))
        if split == "context" and FusedDecoder(model).takes_wanted:
            _check_wanted(model)
        assert group.peers is None or (group.peers.fault.item() == 0 and group.peers.exchanges_M[0].item() > 0)
        return found
    finally:
        group.peers = group.large_peers = None


@pytest.mark.parametrize(
    ("name", "over_memory", "split"),
    [
        ("Qwen3", True, "heads"),
        ("Olmo2", True, "heads"),
        ("Qwen3", True, "context"),
        *nightly(*((name, over, "heads") for name, over in MORE)),
        *nightly(("Olmo2", True, "context"), ("Qwen3_5", True, "context")),
    ],
)
def test_shards_by_the_kernels_give_the_logits_of_one_rank(
    name: str, over_memory: bool, split: str, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    if name in HYBRIDS:
        make_hybrid(name, tmp_path / "model")
    else:
        make_checkpoint(name, tmp_path / "model", **(SIZES | CONFIGS.get(name, {})))
    model = _load(tmp_path / "model", "float32")
    exact = _steps(model, model)
    shared = tmp_path / "shared" if over_memory else None
    (tmp_path / "shared").mkdir()
    results = start_ranks(2).run(_by_kernels, tmp_path / "model", shared, "float32", split)
    assert torch.equal(*results)
    assert (results[0] - exact).abs().max() < 1e-4


def _by_both(group: TensorGroup, folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = _load(folder, "bfloat16", group, split)
    return _steps(model, FusedDecoder(model)), _steps(model, model)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "width", "split"),
    [
        ("Qwen2Moe", 32, "heads"),
        ("Qwen3Moe", 32, "rows"),
        *nightly(
            ("GptOss", 64, "heads"), ("Qwen3Moe", 256, "heads"), ("Qwen2Moe", 256, "heads"), ("GptOss", 64, "rows")
        ),
        *nightly(("Llama4", 32, "heads"), ("NemotronH", 32, "heads"), ("Llama4", 32, "rows")),
    ],
)
def test_experts_of_shards_by_the_kernels_are_as_close_to_float32_as_by_torch(
    name: str, width: int, split: str, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """Whole experts by rank, and parts of each one; shared ones that are stored with them; rows dealt to ranks."""
    config = EXPERTS | {"moe_intermediate_size": width, "shared_expert_intermediate_size": 2 * width}
    if name == "GptOss":  # its biases of down projections are added by expert
        config = SIZES | CONFIGS[name] | {"num_local_experts": 4, "hidden_size": 64}
    elif name in _OF_MODELS:
        config = MODELS[_OF_MODELS[name]][1] | {"vocab_size": 91}
    reference = make_checkpoint(name, tmp_path, **config)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().float())
    reference.save_pretrained(tmp_path)
    wide = _load(tmp_path, "float32")
    exact = _steps(wide, wide)
    (kernels, torch_), (others, _) = start_ranks(2).run(_by_both, tmp_path, split)
    assert torch.equal(kernels, others)
    # A token near a tie takes other experts in bf16, whatever computes it: medians, not the largest errors.
    errors = [(found - exact).norm(dim=1) / exact.norm(dim=1) for found in (kernels, torch_)]
    assert errors[0].median() < 1.5 * errors[1].median() + 1e-3


def test_pairs_of_experts_that_other_ranks_keep_get_no_weight() -> None:
    experts = torch.tensor([[0, 5, 3], [7, 6, 1], [4, 5, 6]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.4, 0.4, 0.2]])
    low, high = (keep_experts(Routing(experts, weights), first, 4, 8) for first in (0, 4))
    assert low.experts_TK.tolist() == [[0, 3, 3], [1, 1, 1], [0, 0, 0]]
    assert low.weights_TK.tolist() == [[0.5, 0.0, weights[0, 2].item()], [0.0, 0.0, weights[1, 2].item()], [0.0] * 3]
    assert high.experts_TK.tolist() == [[1, 1, 1], [3, 2, 3], [0, 1, 2]]
    assert torch.equal(low.weights_TK + high.weights_TK, weights)


def test_shared_experts_are_on_every_rank_after_those_that_it_keeps() -> None:
    experts = torch.tensor([[0, 5, 8, 9], [7, 6, 8, 9]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.3, 1.0, 1.0], [0.6, 0.4, 1.0, 1.0]])
    low, high = (keep_experts(Routing(experts, weights), first, 4, 8) for first in (0, 4))
    assert low.experts_TK.tolist() == [[0, 5, 4, 5], [5, 5, 4, 5]]
    assert low.weights_TK.tolist() == [[0.5, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    assert high.experts_TK.tolist() == [[5, 1, 4, 5], [3, 2, 4, 5]]
    assert torch.equal(high.weights_TK[:, 2:], weights[:, 2:])
