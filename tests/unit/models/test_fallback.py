"""Models through transformers' own code: which ones are refused, what is read off them, names, checks at start."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama4 import modeling_llama4 as llama4

from rollout.config import EngineSettings, ModelSettings
from rollout.engine.model_checks import check_model
from rollout.models import CheckpointError, Decoder, LoadedModel, load_model
from rollout.models.fallback.attention import PAGED, RUNNING, paged_attention
from rollout.models.fallback.cache import PieceCache
from rollout.models.fallback.experts import by_kernels, kernels_take
from rollout.models.fallback.host_reads import HostReads
from rollout.models.fallback.layer_windows import read_mask
from rollout.models.fallback.model import TransformersModel
from rollout.models.fallback.rows import FallbackRows
from rollout.models.fallback.start import capture_obstacle
from rollout.models.registry import UnsupportedVariantError
from rollout.process import host_memory
from rollout.weights.parameter_map import ParameterMap, UpdateNames, update_names
from tests.support.models.fallback import CONFIGS, make_checkpoint, make_model
from tests.support.models.paged import PROMPT, PagedRunner, check
from tests.support.settings import settings_of
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> LoadedModel:
    chosen = settings_of(ModelSettings, path=str(folder), **{"model_impl": "transformers", **settings})
    return load_model(chosen, CPU)


def write_config(folder: Path, architecture: str, **values: Any) -> Path:
    """A folder with nothing but the config of a tiny model."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    base = {
        **tokens,
        "vocab_size": 89,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = getattr(transformers, architecture).config_class(**{**base, "intermediate_size": 40, **values})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
    return folder


# --- which implementation runs a model --------------------------------------------------------------------------------


def test_auto_takes_native_families_natively_and_others_through_transformers(tmp_path: Path, caplog: Any) -> None:
    make_checkpoint("LlamaForCausalLM", tmp_path / "llama")
    make_checkpoint("CohereForCausalLM", tmp_path / "cohere")
    assert isinstance(load(tmp_path / "llama", model_impl="auto").model, Decoder)

    def logged() -> list[tuple[str, str]]:
        of_models = (record for record in caplog.records if record.name.startswith("rollout.models."))
        return [(record.name, record.levelname) for record in of_models]

    assert not logged()
    assert not isinstance(load(tmp_path / "cohere", model_impl="auto").model, Decoder)
    assert logged() == [("rollout.models.loader", "WARNING")]
    with pytest.raises(ValueError, match="CohereForCausalLM"):
        load(tmp_path / "cohere", model_impl="native")


VARIANTS: dict[str, dict[str, Any]] = {
    "rope_type": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "hidden_act": {"hidden_act": "relu"},
}


@pytest.mark.parametrize("key", VARIANTS)
def test_auto_takes_a_variant_that_is_not_native_through_transformers(key: str, tmp_path: Path, caplog: Any) -> None:
    make_checkpoint("LlamaForCausalLM", tmp_path, **VARIANTS[key])
    with pytest.raises(UnsupportedVariantError, match=key):
        load(tmp_path, model_impl="native")
    loaded = load(tmp_path, model_impl="auto")
    assert not isinstance(loaded.model, Decoder)
    assert any(key in record.getMessage() for record in caplog.records), "the log has the reason"
    ours = PagedRunner(loaded.model, 1, len(PROMPT)).prefill({0: PROMPT})[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours, model(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=0)


def test_auto_gives_both_reasons_where_transformers_cannot_serve_a_variant_either(tmp_path: Path) -> None:
    make_checkpoint("LlamaForCausalLM", tmp_path, hidden_act="relu")
    with pytest.raises(ValueError, match=r"hidden_act.*weight_dtype"):
        load_model(settings_of(ModelSettings, path=str(tmp_path)), CPU, weights="fp8_block")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_native_family_has_the_same_logits_and_names_both_ways(architecture: str, tmp_path: Path) -> None:
    make_checkpoint(architecture, tmp_path)
    ours, theirs = load(tmp_path, model_impl="native"), load(tmp_path)
    logits = [PagedRunner(loaded.model, 1, len(PROMPT)).prefill({0: PROMPT})[0] for loaded in (ours, theirs)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    assert ours.spec.kv_shapes == theirs.spec.kv_shapes and ours.spec.max_positions == theirs.spec.max_positions
    of_files = ("block_sparse_moe", ".mlp.gate.", ".mlp.experts.")  # transformers' module has one name for each tensor
    more = {name for name in ours.trainer_views() if any(part in name for part in of_files)}
    assert set(ours.trainer_views()) <= set(theirs.trainer_views()) | more


def test_a_checkpoint_in_16_bits_is_served_with_the_parts_that_stay_in_float32(tmp_path: Path) -> None:
    for architecture in ("DeepseekV3ForCausalLM", "GptOssForCausalLM"):
        make_checkpoint(architecture, tmp_path / architecture)
        loaded = load(tmp_path / architecture, dtype="bfloat16")
        assert loaded.model.embed.dtype == torch.bfloat16
        biases = [view for name, view in loaded.model.hf_views().items() if name.endswith("e_score_correction_bias")]
        assert all(bias.dtype == torch.float32 for bias in biases) and bool(biases) == ("Deepseek" in architecture)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Gemma2ForCausalLM", num_key_value_heads=2)
    models = [load(folder, load_format="random", random_seed=seed).model.hf_views() for seed in (3, 3, 4)]
    same = [all(torch.equal(view, other[name]) for name, view in models[0].items()) for other in models[1:]]
    assert same == [True, False]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "values", "why"),
    [
        ("RwkvForCausalLM", {"attention_hidden_size": 32}, "not use a cache of transformers"),
        ("OpenAIGPTLMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "not use a cache of transformers"),
        ("BartForCausalLM", {"d_model": 32, "is_encoder_decoder": True}, "encoder"),
        ("ElectraForCausalLM", {"embedding_size": 32, "max_position_embeddings": 64}, "tokens attend to later ones"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "tokens attend to later ones"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    architecture: str, values: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, architecture, **values)
    with pytest.raises(ValueError, match=f"{architecture}.*{why}"):
        load(folder, load_format="random")


def test_a_class_of_text_and_images_is_refused_with_the_class_of_its_language_model(tmp_path: Path) -> None:
    text = {**CONFIGS["MiniMaxM3VLForCausalLM"]}
    folder = write_config(tmp_path, "MiniMaxM3SparseForConditionalGeneration", text_config=text)
    with pytest.raises(ValueError, match="language model alone, as MiniMaxM3VLForCausalLM"):
        load(folder, load_format="random", model_impl="auto")


def test_an_architecture_that_transformers_does_not_have_is_refused_and_its_code_never_runs(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "modeling_new.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 89}
    for model_type in ("brand_new", "cohere"):
        config = {"architectures": ["NewForCausalLM"], "model_type": model_type, "auto_map": auto_map, **sizes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="NewForCausalLM|config.json"):
            load(tmp_path, load_format="random", model_impl="auto")
    assert not proof.exists()


@pytest.mark.parametrize(
    "sizes", [{"num_hidden_layers": 10**9}, {"hidden_size": 1 << 40}, {"n_routed_experts": 10**8}, {"vocab_size": "9"}]
)
def test_absurd_sizes_are_refused_before_anything_is_made(sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_config(tmp_path, "CohereForCausalLM")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | sizes))
    with pytest.raises(CheckpointError, match=next(iter(sizes))):
        load(folder, load_format="random")


@pytest.mark.parametrize(
    "engine", [{"adapter_slots": 2}, {"routing": True}, {"deterministic": True}, {"weight_dtype": "fp8_row"}]
)
def test_a_setting_that_only_native_families_have_is_refused_by_name(engine: dict[str, Any], tmp_path: Path) -> None:
    model = load(write_config(tmp_path, "CohereForCausalLM"), load_format="random").model
    check_model(EngineSettings(), model)
    with pytest.raises(ValueError, match=next(iter(engine))):
        check_model(EngineSettings(**engine), model)


def test_codes_of_keys_are_refused_where_layers_read_keys_themselves(tmp_path: Path) -> None:
    model = load(write_config(tmp_path, "StableLmForCausalLM", num_key_value_heads=2), load_format="random").model
    check_model(EngineSettings(), model)
    with pytest.raises(ValueError, match="kv_dtype"):
        check_model(EngineSettings(kv_dtype="fp8_e4m3"), model)


def test_coded_experts_are_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "MixtralForCausalLM")
    settings = ModelSettings(path=str(folder), model_impl="transformers", load_format="random")
    with pytest.raises(ValueError, match="weight_dtype"):
        load_model(settings, CPU, weights="fp8_row")


def test_longrope_bounds_the_context_where_other_frequencies_would_begin(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    values = {
        "rope_parameters": rope,
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    loaded = load(write_config(tmp_path, "Phi3ForCausalLM", **values), load_format="random")
    assert loaded.spec.max_positions == 64


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 19, 4096, 131_072])
def test_a_window_of_any_length_is_read_off_its_mask(window: int) -> None:
    assert read_mask(sliding_window_causal_mask_function(window)).window == window
    assert read_mask(causal_mask_function).window is None


@pytest.mark.parametrize(
    "function",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(1 << 17, torch.zeros(1, dtype=torch.int64)),
        packed_sequence_mask_function(torch.zeros(1, 8, dtype=torch.int64)),
        lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0),
        lambda batch, head, query, key: (key <= query) & ((key < 4) | (key > query - 50)),
    ],
    ids=["both ways", "chunks", "long chunks", "reads a tensor", "every second", "first ones and a window"],
)
def test_a_mask_of_another_form_is_refused(function: Any) -> None:
    with pytest.raises(ValueError):
        read_mask(function)


# --- the check at start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["scale", "window", "position"])
def test_a_way_that_differs_from_eager_attention_is_not_taken(damage: str, tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_config(tmp_path, "Cohere2ForCausalLM", num_key_value_heads=2, sliding_window=6)

    def wrong(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **rest: Any) -> Any:
        if damage == "scale":
            scaling *= 1.5
        if damage == "position":
            query = query.roll(1, 2)
        if damage == "window":
            key = key * (1 + 4 * (torch.arange(key.shape[2]) % 2)[:, None])
        return paged_attention(module, query, key, value, mask, scaling=scaling, **rest)

    ways = [load(folder, load_format="random").spec.way.attention]
    monkeypatch.setitem(AttentionInterface._global_mapping, PAGED, wrong)
    ways.append(load(folder, load_format="random").spec.way.attention)
    assert ways == ["paged", "gathered"]


def test_a_way_that_differs_only_beyond_a_long_window_is_not_taken(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_config(tmp_path, "Cohere2ForCausalLM", num_key_value_heads=2, sliding_window=4096)

    def without_windows(module: Any, *tensors: Any, **rest: Any) -> Any:
        step = RUNNING.get()
        token = RUNNING.set(replace(step, layers={module: replace(step.layers[module], window=None)}))
        try:
            return paged_attention(module, *tensors, **rest)
        finally:
            RUNNING.reset(token)

    ways = [load(folder, load_format="random").spec.way.attention]
    monkeypatch.setitem(AttentionInterface._global_mapping, PAGED, without_windows)
    ways.append(load(folder, load_format="random").spec.way.attention)
    assert ways == ["paged", "gathered"]


def _cached_tokens_see_beyond_their_chunk(patch: Any) -> None:
    own = llama4.create_chunked_causal_mask

    def whole(**arguments: Any) -> Any:
        past = arguments.get("cache", arguments.get("past_key_values"))
        return (own if past is None else llama4.create_causal_mask)(**arguments)

    patch.setattr(llama4, "create_chunked_causal_mask", whole)


def _cached_keys_choose_other_positions(patch: Any) -> None:
    update = PieceCache.update_indexer
    patch.setattr(PieceCache, "update_indexer", lambda self, keys, layer: update(self, keys, layer).flip(-1))


_LLAMA4 = {"intermediate_size_mlp": 40, "num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0}
_MADE_BLIND = {
    "Llama4ForCausalLM": ({"attention_chunk_size": 8192}, _cached_tokens_see_beyond_their_chunk),
    "HYV4ForCausalLM": ({"index_topk": 2048}, _cached_keys_choose_other_positions),
}


@pytest.mark.parametrize("architecture", _MADE_BLIND)
def test_a_model_that_is_wrong_only_beyond_a_limit_is_refused(
    architecture: str, tmp_path: Path, monkeypatch: Any
) -> None:
    limit, damage = _MADE_BLIND[architecture]
    folder = write_config(tmp_path, architecture, **{**CONFIGS.get(architecture, _LLAMA4), **limit})
    load(folder, load_format="random")
    damage(monkeypatch)
    with pytest.raises(ValueError, match="limits that the tokens pass"):
        load(folder, load_format="random")


def test_a_model_without_room_for_a_small_one_is_served_and_the_log_says_what_was_not_compared(
    tmp_path: Path, caplog: Any
) -> None:
    make_checkpoint("Cohere2ForCausalLM", tmp_path)
    host_memory.promise(1 << 60)
    try:
        load(tmp_path)
    finally:
        host_memory.promise(-1 << 60)
    assert any("not compared" in record.getMessage() for record in caplog.records)


def test_a_model_without_a_right_way_is_refused_with_what_is_wrong_in_each(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_config(tmp_path, "Cohere2ForCausalLM", num_key_value_heads=2, sliding_window=6)
    monkeypatch.setattr(FallbackRows, "run", lambda self, ids, piece: torch.zeros(*ids.shape, 32))
    monkeypatch.setattr("rollout.models.fallback.model.probe_layers", lambda module, vocab: {})
    with pytest.raises(ValueError, match="paged, rows packed.*eager attention.*gathered, rows alone"):
        load(folder, load_format="random")


def test_a_head_may_pass_on_results_that_its_base_model_has_beside_hidden_states() -> None:
    """As models of images and sound do, under names that change between versions of transformers."""

    class Passing(transformers.LlamaForCausalLM):
        def forward(self, **inputs: Any) -> Any:
            states = self.model(**inputs)
            rest = (states.past_key_values, states.image_outputs, states.audio_hidden_states, states[1:])
            return CausalLMOutputWithPast(logits=self.lm_head(states.last_hidden_state), hidden_states=rest)

    module = make_model("LlamaForCausalLM")
    module.__class__ = Passing
    served = TransformersModel(module, 64)
    hidden_SH = torch.randn(5, module.config.hidden_size)
    torch.testing.assert_close(served.compute_logits(hidden_SH), module.lm_head(hidden_SH))


def test_a_step_is_captured_unless_it_reads_the_device_or_has_no_kernels(tmp_path: Path) -> None:
    def obstacle(architecture: str) -> str:
        folder = tmp_path / architecture
        make_checkpoint(architecture, folder)
        return capture_obstacle(load(folder).model)  # type: ignore[arg-type]

    assert obstacle("CohereForCausalLM") == ""
    assert obstacle("Gemma2ForCausalLM") == ""
    assert "dimension" in obstacle("DeepseekV3ForCausalLM")


@pytest.mark.parametrize(
    ("operation", "reads"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x[x > 0], True),
        (lambda x: bool((x > 0).all()), True),
        (lambda x: x.repeat_interleave(torch.tensor([2, 1, 3])), True),
        (lambda x: x.unique(), True),
        (lambda x: torch.where(x > 0, x, 0.0).softmax(-1), False),
        (lambda x: x[torch.tensor([0, 2])].topk(1), False),
        (lambda x: x.repeat_interleave(2), False),
    ],
)
def test_operations_that_wait_for_the_device_are_found(operation: Any, reads: bool) -> None:
    with torch.inference_mode(), HostReads() as found:
        operation(torch.randn(3))
    assert bool(found.found) == reads


def test_the_kernels_of_experts_compute_what_eager_experts_do(tmp_path: Path) -> None:
    make_checkpoint("MixtralForCausalLM", tmp_path)
    model = load(tmp_path, dtype="float16").model
    block = next(module for module in model.module.modules() if hasattr(module, "_apply_gate"))  # type: ignore[union-attr]
    assert kernels_take(block)
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(5, block.hidden_dim, generator=generator).half()
    experts_TK = torch.stack([torch.randperm(len(block.down_proj), generator=generator)[:2] for _ in range(5)])
    weights_TK = torch.rand(5, 2, generator=generator)
    ours = by_kernels(x_TH, weights_TK, experts_TK, block.gate_up_proj.data, block.down_proj.data)
    eager = type(block).forward.__wrapped__(block.float(), x_TH.float(), experts_TK, weights_TK)
    assert (ours.float() - eager).norm() < 5e-3 * eager.norm()
    assert block.gate_up_proj.dtype == torch.float32 and not kernels_take(block)


# --- names ------------------------------------------------------------------------------------------------------------


def manifest_of(tensors: dict[str, torch.Tensor]) -> Any:
    return pack(1, [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()], 1 << 20)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM"])
def test_an_update_may_have_the_names_of_checkpoints_or_of_transformers_modules(
    architecture: str, tmp_path: Path
) -> None:
    make_checkpoint(architecture, tmp_path / "old")
    trainer = make_checkpoint(architecture, tmp_path / "new", 1)
    served, fresh = load(tmp_path / "old"), load(tmp_path / "new")
    views = served.trainer_views()
    parameters = ParameterMap(views, UpdateNames(served.kept_if_absent()))
    stored = load_file(tmp_path / "new" / "model.safetensors")
    for tensors in (stored, trainer.state_dict(), dict(trainer.named_parameters())):
        fit = parameters.check(manifest_of(tensors))
        for view in served.model.hf_views().values():
            view.zero_()
        for name in fit.copied:
            views[name].copy_(tensors[name].detach())
        for name, view in fresh.model.hf_views().items():
            assert name in fit.kept or torch.equal(served.model.hf_views()[name], view)
    assert any("bias" in name for name in fit.kept) == (architecture == "DeepseekV3ForCausalLM")
    name = next(name for name in stored if "mlp" in name or "block_sparse_moe" in name)
    with pytest.raises(WeightsRejected, match="missing"):
        parameters.check(manifest_of({other: tensor for other, tensor in stored.items() if other != name}))


def test_tensors_that_a_class_declares_unused_are_skipped_and_others_refused(tmp_path: Path) -> None:
    reference = make_checkpoint("DeepseekV3ForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.61.eh_proj.weight": torch.zeros(4)}, file)  # of the next-token predictor
    check(load(tmp_path), reference)
    save_file(tensors | {"model.layers.7.eh_proj.weight": torch.zeros(4)}, file)
    with pytest.raises(CheckpointError, match=r"layers\.7"):
        load(tmp_path)


def test_an_update_may_have_the_tensors_that_a_class_declares_unused(tmp_path: Path) -> None:
    """Of predictors of further tokens, as trainers with modules of their own export them."""
    trainer = make_checkpoint("Ernie4_5_MoeForCausalLM", tmp_path)
    served = load(tmp_path)
    settings = ModelSettings(path=str(tmp_path), model_impl="transformers")
    parameters = ParameterMap(served.trainer_views(), update_names(settings, served))
    own = dict(trainer.named_parameters())
    extra = {"model.mtp_block.0.mlp.down_proj.weight": torch.zeros(4), "model.mtp_emb_norm.0.weight": torch.zeros(4)}
    fit = parameters.check(manifest_of(own | extra))
    assert set(fit.unused) == set(extra) and set(fit.copied) == set(own)
    with pytest.raises(WeightsRejected, match=r"unknown.*model\.head\.0"):
        parameters.check(manifest_of(own | {"model.head.0.weight": torch.zeros(4)}))


def test_every_made_checkpoint_depends_on_its_seed() -> None:
    make = partial(make_model, "CohereForCausalLM")
    first, again, other = (make(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])
    assert "CohereForCausalLM" in CONFIGS
