"""Gemma 4: layers that read the KV of others, inputs of layers, heads by layer, and what is not native."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import AttentionBatch, CheckpointError, Decoder, KVCache, LoadedModel, PromptChunk, load_model
from rollout.models.fused import obstacle
from rollout.models.spec import AttentionSpec
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from tests.support.models.both_ways import edit
from tests.support.models.paged import PROMPT, assert_logits_in_chunks_and_steps, check
from tests.support.models.variants import make_variant
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(folder), **settings), CPU)


@pytest.mark.parametrize("stem", ["Gemma4", "Gemma4 alike", "Gemma4 experts"])
def test_pieces_of_prompts_and_steps_give_the_logits_of_transformers(stem: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = make_variant(stem, tmp_path)
    model = load(tmp_path).model
    ids = [
        torch.randint(0, 91, (count + 40,), generator=torch.Generator().manual_seed(count)).tolist()
        for count in (50, 1, 9)
    ]
    # Pieces that are shorter and longer than windows.
    chunks = ({0: (0, 2), 2: (0, 4)}, {0: (2, 16)}, {2: (4, 9), 1: (0, 1), 0: (16, 39)}, {0: (39, 50)})
    assert_logits_in_chunks_and_steps(model, reference, ids, [50, 1, 9], chunks, steps=40)


def test_layers_without_keys_have_no_pages_of_their_own(tmp_path: Path) -> None:
    make_variant("Gemma4", tmp_path)
    spec = load(tmp_path).model.spec
    assert [spec.kv_index(layer) for layer in range(5)] == [0, 1, 2, 2, 1]
    assert [(shape.heads, shape.k_dim) for shape in spec.kv_shapes] == [(2, 16), (1, 24), (2, 16)]
    assert spec.kv_bytes_per_token(torch.float32) == 4 * 2 * (2 * 16 + 24 + 2 * 16)
    mixers = [layer.mixer for layer in spec.layers]
    assert [mixer.kv for mixer in mixers if isinstance(mixer, AttentionSpec)] == ["own", "keys", "own", *["shared"] * 2]


def test_a_layer_that_shares_reads_the_pages_of_the_last_layer_of_its_kind(tmp_path: Path) -> None:
    """Other values in these pages change the logits of the next step, and no later layer writes keys of its own."""
    make_variant("Gemma4", tmp_path)
    model = load(tmp_path).model
    kv = KVCache.allocate(model.spec, 1 + len(PROMPT), 1, torch.float32, CPU)

    def step(begin: int, end: int) -> torch.Tensor:
        batch = AttentionBatch(
            positions_T=torch.arange(begin, end, dtype=torch.int32),
            kv_slots_T=torch.arange(1 + begin, 1 + end, dtype=torch.int32),
            page_table_BP=torch.arange(1, 1 + len(PROMPT), dtype=torch.int32)[None],
            context_lens_B=torch.tensor([end], dtype=torch.int32),
            max_context=end,
            chunks=(PromptChunk(0, end - begin, end),),
            query_starts_C1=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        return model(torch.tensor(PROMPT[begin:end]), batch, kv)

    assert len(kv.k) == 3
    last = len(PROMPT) - 1
    step(0, last)
    before = step(last, last + 1)
    assert torch.equal(step(last, last + 1), before)
    for index in range(3):
        kept = kv.v[index].clone()
        kv.v[index][1 : 1 + last] += 1.0
        assert not torch.allclose(step(last, last + 1), before)
        kv.v[index].copy_(kept)


def test_a_checkpoint_may_have_keys_and_values_of_layers_that_share_others(tmp_path: Path) -> None:
    reference = make_variant("Gemma4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.3.self_attn.{name}.weight": torch.ones(2, 3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(tmp_path)
    check(loaded, reference, fused=False)
    save_file(tensors | {"model.layers.2.self_attn.extra": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="extra"):
        load(tmp_path)


def test_a_trainers_parameters_are_a_whole_update_that_keeps_the_factors(tmp_path: Path) -> None:
    reference = make_variant("Gemma4", tmp_path)
    loaded = load(tmp_path)
    parameters = ParameterMap(loaded.trainer_views(), UpdateNames(loaded.kept_if_absent(), loaded.spec.unused))
    rows = [(name, "float32", list(tensor.shape)) for name, tensor in reference.named_parameters()]
    fit = parameters.check(pack(1, rows, 1 << 20))
    assert len(fit.copied) == len(rows) and not fit.unused
    assert set(fit.kept) == {f"model.layers.{layer}.layer_scalar" for layer in range(5)}


def test_a_config_of_the_hub_names_the_heads_of_full_attention(tmp_path: Path) -> None:
    reference = make_variant("Gemma4", tmp_path)

    def older(content: dict[str, Any]) -> None:
        del content["per_layer_config"]
        content.update(global_head_dim=24, num_global_key_value_heads=1)

    edit(tmp_path, older)
    check(load(tmp_path), reference, fused=False)


def test_unknown_keys_are_compared_over_all_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_variant("Gemma4", tmp_path)
    edit(tmp_path, lambda content: content.update(new_key=1))
    assert isinstance(load(tmp_path).model, Decoder)
    assert any("equal transformers' logits" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"per_layer_config": {"1": {"hidden_size": 12}}}, "per_layer_config"),
        ({"vocab_size_per_layer_input": 7}, "7 tokens have inputs"),
        ({"use_bidirectional_attention": "all"}, "is_causal"),
    ],
)
def test_such_a_config_is_refused_with_its_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_variant("Gemma4", tmp_path)
    edit(tmp_path, lambda content: content.update(change))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, model_impl="native")


def test_factors_of_embeddings_are_rounded_as_transformers_rounds_them(tmp_path: Path) -> None:
    make_variant("Gemma4", tmp_path)
    model = load(tmp_path, dtype="bfloat16").model
    assert isinstance(model, Decoder) and obstacle(model) is None, "kernels run it"
    transformers.logging.disable_progress_bar()
    reference = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.token_inputs is not None
    assert model.token_inputs.embed_scale == reference.model.embed_tokens_per_layer.embed_scale.bfloat16().item()
    assert model.embed_scale == reference.model.embed_tokens.embed_scale.bfloat16().item()
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 48
