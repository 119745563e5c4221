"""The check of logits at the start: for configs with keys that are not read, and only for those."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM

from rollout.config import ModelSettings
from rollout.models import load_model, start_check
from rollout.models.families import FAMILIES
from rollout.models.families.declare import Family, by_layer, no_windows, same_rope
from tests.support.models.both_ways import CPU, NAMES, edit, logits, make, transformers_logits
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.fallback import make_checkpoint as make_fallback
from tests.support.models.families import make_checkpoint
from tests.support.models.latent import LATENT, make_latent
from tests.support.models.variants import make_variant

#: One of each kind of attention and feed-forward block, and inside a model of text and images.
SOME = ("qwen2", "Gemma3", "GptOss", "Glm4Moe", "Qwen3_5", "DeepseekV3", "MiMo", "images: Ministral 3", "Qwen2.5-VL")


def unknown(folder: Path, **keys: Any) -> None:
    """Add keys to the config of the language model."""
    edit(folder, lambda content: (content.get("text_config") or content).update(keys or {"new_key": 1}))


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == start_check.__name__]


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have the host say that it has so many bytes of free memory."""
    return lambda size: monkeypatch.setattr(start_check, "available_bytes", lambda: size)


def load(folder: Path, **settings: Any) -> Any:
    return load_model(ModelSettings(path=str(folder), **settings), CPU)


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES]
)
def test_keys_that_change_nothing_are_found_to_change_nothing(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make(name, tmp_path)
    unknown(tmp_path)
    load(tmp_path)
    assert [record.levelno for record in records(caplog)] == [logging.INFO]
    assert "new_key" in caplog.text and records(caplog)[0].difference < 1e-5
    caplog.clear()
    load(tmp_path, load_format="random")
    assert [record.levelno for record in records(caplog)] == [logging.INFO]


def test_in_the_known_form_nothing_is_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make("llama", tmp_path)
    load(tmp_path)
    assert not records(caplog)
    unknown(tmp_path)
    load(tmp_path)
    assert records(caplog)


# --- what is noticed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unread:
    """A family whose declaration lacks a key, and a config in which this key matters."""

    stem: str
    key: str
    change: dict[str, Any]  # of the declaration
    config: dict[str, Any] = field(default_factory=dict)


@by_layer()
def all_turn(config: Any) -> tuple[str, ...]:
    return ("",) * config.num_hidden_layers


_NO_WINDOWS = {"windows": no_windows}
UNREAD = {
    "a factor of the residual stream": Unread("Granite", "residual_multiplier", {"residual_scale": 1.0}),
    "a factor of the embedding": Unread("Granite", "embedding_multiplier", {"embed_scale": 1.0}),
    "a factor of scores": Unread("Granite", "attention_multiplier", {"attention_scale": None}),
    "a divisor of logits": Unread("Granite", "logits_scaling", {"logit_divisor": 1.0}),
    "a bound of scores": Unread("Gemma2", "attn_logit_softcapping", {"attention_softcap": None}),
    "a bound of logits": Unread("Gemma2", "final_logit_softcapping", {"logit_softcap": None}),
    "a scaled embedding": Unread("Afmoe", "mup_enabled", {"embed_scale": 1.0}),
    "how dimensions turn": Unread("DeepseekV3", "rope_interleave", {"interleaved_rope": False}),
    "layers without positions": Unread("SmolLM3", "no_rope_layers", {"ropes": same_rope}),
    "a window longer than the prompt": Unread("Mistral", "sliding_window", _NO_WINDOWS, {"sliding_window": 300}),
    "a window of the last of many layers": Unread(
        "Qwen2", "sliding_window", _NO_WINDOWS,
        {
            "num_hidden_layers": 6, "max_window_layers": 5, "use_sliding_window": True, "sliding_window": 300,
            "vocab_size": 91, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "the last of many layers without positions": Unread(
        "SmolLM3", "no_rope_layers", {"ropes": all_turn},
        {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 1, 1, 1, 0], "use_sliding_window": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_a_key_that_changes_the_model_is_noticed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = UNREAD[case]
    maker: Callable[..., Any] = make_latent if unread.stem in LATENT else make_variant
    maker = maker if unread.stem in EVERY_FAMILY else make_checkpoint
    maker(unread.stem, tmp_path, 0, **unread.config)
    load(tmp_path)
    architecture = f"{unread.stem}ForCausalLM"
    forgetful: Family = replace(FAMILIES[architecture], **unread.change)
    monkeypatch.setitem(FAMILIES, architecture, forgetful)
    with pytest.raises(ValueError, match=unread.key) as refusal:
        load(tmp_path, model_impl="native")
    assert str(tmp_path) in str(refusal.value) and "model_impl = transformers" in str(refusal.value)
    ours = logits(tmp_path)  # `auto` follows the advice
    assert (ours - transformers_logits(tmp_path)).abs().max() < 1e-3, "the advice holds"


def test_a_class_that_cannot_run_is_a_refusal(tmp_path: Path) -> None:
    def fail(module: Any, _: Any) -> None:
        if isinstance(module, LlamaForCausalLM):
            raise KeyError("no such thing")

    make("llama", tmp_path)
    unknown(tmp_path, strange_key=2)
    hook = register_module_forward_pre_hook(fail)
    try:
        with pytest.raises(ValueError, match=r"strange_key.* cannot be compared .*no such thing"):
            load(tmp_path)
    finally:
        hook.remove()


def test_keys_of_any_text_stay_on_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make("llama", tmp_path)
    unknown(tmp_path, **{"a\nWARNING b": 1, "x" * 5000: 1, **{f"key {i}": i for i in range(100)}})
    load(tmp_path)
    (record,) = records(caplog)
    assert "\n" not in record.getMessage() and len(record.getMessage()) < 2000


def test_logits_that_are_no_numbers_are_a_refusal(tmp_path: Path) -> None:
    make("llama", tmp_path)
    unknown(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="new_key"):
        load(tmp_path)


# --- what is not compared ---------------------------------------------------------------------------------------------


def test_without_room_the_log_says_that_nothing_was_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, available: Callable[[float], None]
) -> None:
    make("llama", tmp_path)
    unknown(tmp_path)
    available(1000.0)
    load(tmp_path)
    assert [record.levelno for record in records(caplog)] == [logging.WARNING] and "GiB" in caplog.text


def test_it_takes_the_room_of_one_layer_of_each_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, available: Callable[[float], None]
) -> None:
    """However deep the model is."""
    caplog.set_level(logging.INFO)
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
    make_checkpoint("Llama", tmp_path, num_key_value_heads=2, num_hidden_layers=20, **sizes)
    unknown(tmp_path)
    whole = 4 * sum(parameter.numel() for parameter in load(tmp_path).model.parameters())
    available(whole / 5)
    caplog.clear()
    load(tmp_path)
    assert [record.levelno for record in records(caplog)] == [logging.INFO]


def test_models_through_transformers_own_code_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have a check of their own, at every start."""
    caplog.set_level(logging.INFO)
    make_fallback("CohereForCausalLM", tmp_path)
    unknown(tmp_path)
    load(tmp_path)
    assert not records(caplog)


def test_a_checkpoint_in_16_bits_is_compared_in_32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So small differences show: rounding to 16 bits hides that of an eps."""
    caplog.set_level(logging.INFO)
    make("qwen3", tmp_path)
    unknown(tmp_path)
    load(tmp_path, dtype="bfloat16")
    assert records(caplog)[0].difference < 1e-5
    assert load(tmp_path, dtype="bfloat16").model.embed.dtype == torch.bfloat16
