"""A step's record of its experts: of the torch modules and, in Triton's interpreter, of the kernels of every path."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.engine.features.routing.record import StepExperts, record_words, routing_shape
from rollout.engine.messages.requests import RoutingShape
from rollout.models import Decoder, load_model
from rollout.models.batch import AttentionBatch, ExpertRecord
from rollout.models.fused import FusedDecoder
from rollout.models.fused_experts import ExpertPlans
from tests.support.kernels.grids import nightly
from tests.support.models import side_by_side
from tests.support.models.expert_choices import NEARLY_EQUAL, ExpertChoices
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import PagedRunner
from tests.support.models.side_by_side import coarse

CPU = torch.device("cpu")
#: A dense layer between sparse ones; weights that are not renormalised, and layers all sparse; shared experts that are
#: stored with the others, with a gate and with a router of scores.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "attention_bias": False},
    "olmoe": {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2},
    **dict(side_by_side.MODELS[name] for name in ("shared-gated", "shared")),
}


def made(family: str, folder: Path, dtype: str) -> Decoder:
    make_checkpoint(family, folder, **MODELS[family])
    return load_model(ModelSettings(path=str(folder), dtype=dtype), CPU).model


def record_for(model: Decoder, tokens: int, dtype: torch.dtype) -> ExpertRecord:
    moe = model.spec.moe
    assert moe is not None
    wide = torch.full((tokens, len(model.spec.sparse_layers), 2 * moe.router.top_k), 99, dtype=torch.int32).to(dtype)
    return ExpertRecord(wide[:, :, : moe.router.top_k], torch.arange(tokens))


def tokens(count: int, model: Decoder) -> list[int]:
    return [random.Random(i).randrange(model.spec.vocab) for i in range(count)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize(
    ("family", "most"),
    [
        *((family, (2, 8)[i % 2]) for i, family in enumerate(MODELS)),
        *nightly(*((family, (8, 2)[i % 2]) for i, family in enumerate(MODELS))),
    ],
)
def test_kernels_record_what_they_run_and_what_the_torch_modules_record(family: str, most: int, tmp_path: Path) -> None:
    model, choices = made(family, tmp_path, "bfloat16"), ExpertChoices()

    def recorded(forward: Any) -> torch.Tensor:
        runner = PagedRunner(model, rows=1, max_tokens=12, forward=forward)
        runner.experts = record_for(model, 7, torch.uint8)
        runner.prefill({0: tokens(5, model)})
        return runner.experts.experts_TLK.int()

    with choices.noted():
        kernels = recorded(FusedDecoder(model, plans=ExpertPlans(coarse, most)))
    with choices.taken() as regrets:
        modules = recorded(model)
    ran = torch.stack(choices.chosen, dim=1)[:, :, : model.spec.moe.router.top_k]  # type: ignore[union-attr]
    assert kernels[:5].tolist() == ran.tolist() == modules[:5].tolist()
    assert (kernels[5:] == 99).all() and (modules[5:] == 99).all(), "rows past the step's tokens stay as they are"
    assert max(regrets) < NEARLY_EQUAL, "the modules would have chosen the same, except near ties"
    assert (modules[:5] < model.spec.moe.experts).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_a_decode_step_records_its_rows_and_the_padding_after_them(dtype: torch.dtype, tmp_path: Path) -> None:
    model = made("qwen3_moe", tmp_path, "float32")
    ids = tokens(6, model)
    whole = PagedRunner(model, rows=1, max_tokens=8)
    whole.experts = record_for(model, 6, dtype)
    whole.prefill({0: ids})
    stepped = PagedRunner(model, rows=1, max_tokens=8)
    stepped.prefill({0: ids[:5]})
    stepped.experts = record_for(model, 4, dtype)
    stepped.decode({0: ids[5]}, padding=2)
    assert stepped.experts.experts_TLK[0].tolist() == whole.experts.experts_TLK[5].tolist()
    assert (stepped.experts.experts_TLK[3].int() == 99).all()


@pytest.mark.parametrize(("experts", "bytes_a_token"), [(256, 4 + 12), (257, 4 + 20)])
def test_a_record_packs_the_kv_slot_and_the_experts(experts: int, bytes_a_token: int) -> None:
    shape = RoutingShape(layers=3, top_k=3, experts=experts)
    words = torch.zeros(record_words(shape, 5), dtype=torch.int32)
    assert 4 * record_words(shape, 1) == bytes_a_token
    record = StepExperts(shape, words)
    chosen = torch.arange(18).view(2, 3, 3) + experts - 18
    record.experts.experts_TLK[:2] = chosen.to(record.experts.experts_TLK.dtype)
    ints = torch.zeros(2, dtype=torch.int32)
    record.end(AttentionBatch(ints, torch.tensor([70, 6]), ints[None], ints, 1))
    rows = words.view(5, -1).numpy()
    assert rows[:2, 0].tolist() == [70, 6] and not rows[2:].any()
    packed = rows[:2, 1:].copy().view(shape.dtype)[:, :9]
    assert packed.reshape(2, 3, 3).tolist() == chosen.tolist()
    other = StepExperts(shape, torch.zeros(record_words(shape, 2), dtype=torch.int32))
    other.copy_from(record, 2)
    assert other.experts.experts_TLK.tolist() == chosen.tolist()


def test_only_sparse_layers_are_recorded(tmp_path: Path) -> None:
    sparse = made("qwen3_moe", tmp_path / "sparse", "float32")
    assert routing_shape(sparse.spec) == RoutingShape(2, 3, 7)
    make_checkpoint("qwen3", tmp_path / "dense")
    dense = load_model(ModelSettings(path=str(tmp_path / "dense"), dtype="float32"), CPU).model
    assert routing_shape(dense.spec) is None
