"""Adapters in slots, compared with models into which PEFT has merged them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.lora import triton_lora
from rollout_kernels.moe.dispatch import WarpPlan
from rollout_kernels.moe.triton_warp_experts import WarpConfig

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.fused import FusedDecoder
from rollout.models.fused_experts import ExpertPlans
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.models.spec import MoESpec
from tests.support.kernels.grids import nightly
from tests.support.models.adapted_rows import exact_logits, logits_of
from tests.support.models.expert_choices import NEARLY_EQUAL, ExpertChoices
from tests.support.models.families import FAMILIES, make_checkpoint
from tests.support.peft_adapters import ALL, ATTENTION, make_adapter, merged

CPU = torch.device("cpu")
EVEN: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2,
}  # fmt: skip
#: What float32 rounds in logits of up to 15, by the order in which a CPU adds: 2e-4 was seen. Adapters differ by 0.05.
ROUNDING = 1e-3
#: Without biases, which the fused path does not take.
PLAIN = {"llama": {"attention_bias": False, "mlp_bias": False}}
VARIANTS: list[dict[str, Any]] = [
    {"targets": ALL},
    {"targets": ("q_proj", "down_proj"), "r": 16, "lora_alpha": 3, "use_rslora": True},
    {"targets": ALL, "rank_pattern": {"layers.1.self_attn.v_proj": 7}, "alpha_pattern": {"gate.proj": 1.5}},
]


#: Of experts, by output with tall tiles: the interpreter's time is the number of programs.
TALL = WarpPlan(WarpConfig(rows=32), WarpConfig(rows=32))


#: Of the fused path: biases, and norms of queries and keys. The interpreter takes seconds for each.
QUICK = ("qwen2", "qwen3")
WAYS = [
    *((family, "generic") for family in FAMILIES),
    *((family, "fused") for family in QUICK),
    *nightly(*((family, "fused") for family in FAMILIES if family not in QUICK)),
    *nightly(*((family, "fused, added before") for family in FAMILIES)),
]


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_each_row_of_a_batch_equals_the_model_that_peft_merges(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = way != "generic"
    if way == "fused, added before":
        monkeypatch.setattr(triton_lora, "_MOST_READ_BYTES", 0)
    reference = make_checkpoint(family, tmp_path / "base", **EVEN, **PLAIN.get(family, {}))
    model = load_model(ModelSettings(path=str(tmp_path / "base"), dtype="float32"), CPU).model
    sparse = any(isinstance(layer.feed_forward, MoESpec) for layer in model.spec.layers)
    if fused and sparse:
        pytest.skip("experts of the fused path are in 16 bits")
    slots = AdapterSlots(model.spec, 3, 16, torch.float32, CPU)
    exact = [exact_logits(reference)]
    for i, variant in enumerate(VARIANTS):
        if sparse:
            variant = variant | {"targets": ATTENTION}
        folder = make_adapter(reference, tmp_path / str(i), i, **variant)
        slots.write(i + 1, load_peft_folder(folder, model.spec, 16, torch.float32))
        exact.append(exact_logits(merged(reference, folder)))
    assert min((a - b).abs().max() for a in exact for b in exact if a is not b) > 0.05, "they differ"
    adapter_of = [2, 0, 1, 3, 1]
    forward = FusedDecoder(model) if fused else model
    for slot, got in zip(adapter_of, logits_of(model, forward, slots, adapter_of), strict=True):
        assert (got - exact[slot]).abs().max() < ROUNDING


@pytest.mark.nightly
def test_in_16_bits_slots_are_as_accurate_as_merged_weights(tmp_path: Path) -> None:
    reference = make_checkpoint("qwen3", tmp_path / "base", **EVEN)
    folder = make_adapter(reference, tmp_path / "a", 0, ALL)
    exact = exact_logits(merged(reference, folder))
    merged(reference, folder).save_pretrained(tmp_path / "merged")

    def load(path: Path):
        return load_model(ModelSettings(path=str(path), dtype="bfloat16"), CPU).model

    model, merged_model = load(tmp_path / "base"), load(tmp_path / "merged")
    slots = AdapterSlots(model.spec, 1, 8, torch.bfloat16, CPU)
    slots.write(1, load_peft_folder(folder, model.spec, 8, torch.bfloat16))
    by_slot = logits_of(model, FusedDecoder(model), slots, [1])[0]
    by_merging = logits_of(merged_model, FusedDecoder(merged_model), slots, [0])[0]
    errors = [((got - exact).norm() / exact.norm()).item() for got in (by_slot, by_merging)]
    assert errors[0] < 1.5 * errors[1] + 1e-3


@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize("family", ["qwen3_moe", *nightly("olmoe")])
def test_attention_before_experts_is_corrected_too(family: str, tmp_path: Path) -> None:
    """In 16 bits, which the kernels of experts take alone: held against the generic path in 16 bits and in 32."""
    sizes = {"moe_intermediate_size": 32, "attention_bias": False, "mlp_only_layers": [1]}
    reference = make_checkpoint(family, tmp_path / "base", **(EVEN | (sizes if family == "qwen3_moe" else {})))
    model, wide = (
        load_model(ModelSettings(path=str(tmp_path / "base"), dtype=dtype), CPU).model
        for dtype in ("bfloat16", "float32")
    )
    slots, wide_slots = (AdapterSlots(model.spec, 2, 16, dtype, CPU) for dtype in (torch.bfloat16, torch.float32))
    merged_logits = [exact_logits(reference)]
    for i in range(2):
        folder = make_adapter(reference, tmp_path / str(i), i, ATTENTION)
        slots.write(i + 1, load_peft_folder(folder, model.spec, 16, torch.bfloat16))
        wide_slots.write(i + 1, load_peft_folder(folder, model.spec, 16, torch.float32))
        merged_logits.append(exact_logits(merged(reference, folder)))
    adapter_of, choices, plans = [2, 0, 1], ExpertChoices(), ExpertPlans(lambda *asked, **how: TALL)
    for slot, got in zip(adapter_of, logits_of(wide, wide, wide_slots, adapter_of), strict=True):
        assert (got - merged_logits[slot]).abs().max() < ROUNDING
    with choices.noted():
        fused = logits_of(model, FusedDecoder(model, plans=plans), slots, adapter_of)
    with choices.taken() as regrets:
        generic = logits_of(model, model, slots, adapter_of)
    with choices.taken() as wide_regrets:
        exact = logits_of(wide, wide, wide_slots, adapter_of)
    assert max(regrets + wide_regrets) < NEARLY_EQUAL
    for row, expected in enumerate(exact):
        off = [((got[row] - expected).norm() / expected.norm()).item() for got in (fused, generic)]
        assert off[0] < 1.5 * off[1] + 2e-3


def test_a_slot_keeps_nothing_of_the_adapter_before(tmp_path: Path) -> None:
    reference = make_checkpoint("qwen3", tmp_path / "base", **EVEN)
    model = load_model(ModelSettings(path=str(tmp_path / "base"), dtype="float32"), CPU).model
    slots = AdapterSlots(model.spec, 1, 16, torch.float32, CPU)
    large = make_adapter(reference, tmp_path / "large", 0, ALL, r=16)
    small = make_adapter(reference, tmp_path / "small", 1, ("k_proj",), r=2)
    for folder in (large, small):
        slots.write(1, load_peft_folder(folder, model.spec, 16, torch.float32))
    assert (logits_of(model, model, slots, [1])[0] - exact_logits(merged(reference, small))).abs().max() < 2e-4
