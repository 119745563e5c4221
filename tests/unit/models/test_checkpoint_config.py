"""config.json as transformers' models read it: keys that win, absent ones, older forms; and which keys are known."""

import copy
import inspect
import itertools
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from rollout.config import ModelSettings
from rollout.models import CheckpointError, load_model
from rollout.models.checkpoint_config import read_config, read_generation_defaults
from rollout.models.families import FAMILIES, MULTIMODAL
from rollout.models.families.declare import Family
from rollout.models.registry import WITHOUT_EFFECT, UnsupportedVariantError, config_rules, known_keys
from tests.support.kernels.grids import nightly
from tests.support.models.both_ways import (
    CPU,
    NAMES,
    TOLERANCE,
    compare,
    edit,
    logits,
    make,
    older,
    transformers_logits,
)
from tests.support.models.families import make_checkpoint

SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    "yarn with mscale": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip
#: A family of each kind that takes a scaled rotary embedding: whole heads, parts of them, latents, inside another.
SCALED = (
    *("llama", "Glm4Moe", "DeepseekV3", "images: Magistral"),
    *nightly("qwen2", "qwen3", "qwen3_moe", "Mistral", "GptOss"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by name, made once."""
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = folder = tmp_path_factory.mktemp("made")
            make(name, folder)
            return folder

    return Made(made)


def changed(folder: Path, to: Path, change: Any) -> Path:
    """The same tensors with another config; `change` gets the map of the language model."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    edit(to, lambda content: change(content.get("text_config") or content))
    return to


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def _pairs() -> list[Any]:
    """Each two of name, inside and form meet; the rest of the product is nightly."""
    names = [name if isinstance(name, str) else name.values[0] for name in SCALED]
    always = [name for name in SCALED if isinstance(name, str)]
    product = itertools.product(names, enumerate([None, 64]), enumerate(["newer", "older"]))
    return [
        pytest.param(
            name,
            inside,
            form,
            marks=() if name in always and (always.index(name) + j + k) % 2 == 0 else pytest.mark.nightly,
        )
        for name, (j, inside), (k, form) in product
    ]


@pytest.mark.parametrize(("name", "inside", "form"), _pairs())
def test_an_original_context_beside_the_map_wins(
    name: str, inside: int | None, form: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    for kind, scaling in SCALINGS.items():

        def change(text: dict[str, Any], scaling: dict[str, Any] = scaling) -> None:
            kept = {key: value for key, value in text["rope_parameters"].items() if key == "partial_rotary_factor"}
            text["rope_parameters"] = scaling | kept
            if inside is not None:
                text["rope_parameters"]["original_max_position_embeddings"] = inside
            text["original_max_position_embeddings"] = 16
            if form == "older":
                older(text)

        folder = changed(folders[name], tmp_path / kind, change)
        assert compare(folder) == "equal"
        spec = load_model(ModelSettings(path=str(folder)), CPU).spec
        assert spec.max_positions == 512, "16 times 4 is less"
        edit(
            folder, lambda content: (content.get("text_config") or content).update(original_max_position_embeddings=256)
        )
        longer = load_model(ModelSettings(path=str(folder)), CPU).spec
        assert longer.ropes != spec.ropes
        assert longer.max_positions == (1024 if scaling["rope_type"] == "yarn" else 512)


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_scaling_without_a_value_is_refused_as_transformers_does(
    missing: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    scaling = {key: value for key, value in SCALINGS["llama3"].items() if key != missing}
    folder = changed(folders["llama"], tmp_path / "x", lambda text: text.update(rope_parameters=scaling))
    with pytest.raises(ValueError, match=missing):
        logits(folder)
    with pytest.raises(Exception, match=missing):
        transformers_logits(folder)


def test_frequencies_that_are_no_numbers_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e-45}
    folder = changed(folders["llama"], tmp_path / "x", lambda text: text.update(rope_parameters=scaling))
    with pytest.raises(ValueError, match="rope scaling 'linear'"):
        logits(folder)


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4MoeLite"])
@pytest.mark.parametrize("key", ["head_dim", "qk_head_dim"])
def test_sizes_that_follow_from_others_must_fit(name: str, key: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders[name], tmp_path / "x", lambda text: text.update({key: 16}))
    with pytest.raises(ValueError, match="head_dim"):
        logits(folder, model_impl="native")


# --- absent keys, other forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "hidden_act"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "Gemma3", "Mistral", "Qwen3_5"])
def test_an_absent_key_is_what_transformers_takes(
    name: str, key: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Where the default makes other shapes, the tensors do not fit."""
    folder = changed(folders[name], tmp_path / "x", lambda text: text.pop(key, None))
    assert compare(folder) in ("equal", "refused")
    if key in ("rms_norm_eps", "hidden_act"):
        assert compare(folder) == "equal"


def test_the_older_keys_of_windows_mean_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    def qwen2(text: dict[str, Any]) -> None:
        del text["layer_types"]
        older(text)

    def gemma3(text: dict[str, Any]) -> None:
        del text["layer_types"]
        text["sliding_window_pattern"] = 2
        maps = text.pop("rope_parameters")
        text["rope_theta"] = maps["full_attention"].pop("rope_theta")
        text["rope_scaling"] = maps["full_attention"]
        text["rope_local_base_freq"] = maps["sliding_attention"]["rope_theta"]

    for name, change in {"qwen2": qwen2, "Gemma3": gemma3, "images: Gemma 3": gemma3}.items():
        folder = changed(folders[name], tmp_path / name.replace(" ", ""), change)
        assert compare(folder) == "equal"
        assert not read_config(folder).unknown


def test_windows_without_a_width_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Such as those of a config that turns them off, and still lists them."""
    for change in ({"sliding_window": None}, {"use_sliding_window": False}):
        folder = changed(folders["qwen2"], tmp_path / next(iter(change)), lambda text, c=change: text.update(c))
        with pytest.raises(ValueError, match="sliding_window"):
            logits(folder)


@pytest.mark.parametrize("kept", [True, False])
def test_a_flat_config_of_text_and_images_is_read_as_a_nested_one(
    kept: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Files of the hub have the keys of the language model beside `vision_config`; later ones have them twice."""
    folder = changed(folders["Qwen2.5-VL"], tmp_path / "x", older)

    def flatten(content: dict[str, Any]) -> None:
        text = content["text_config"] if kept else content.pop("text_config")
        content.update({key: value for key, value in text.items() if key != "model_type"})

    edit(folder, flatten)
    assert compare(folder) == "equal" and not read_config(folder).unknown
    edit(folder, lambda content: content.update(rms_norm_eps=0.5))  # the nested one wins
    assert compare(folder) == "equal"


def test_a_bound_of_logits_is_not_that_of_a_model_inside_another(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers' model of text and images has no such bound."""
    folder = changed(folders["images: Gemma 3"], tmp_path / "x", lambda text: text.update(final_logit_softcapping=2.0))
    assert compare(folder) == "equal"


# --- what no native model can be --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "Gemma3", "images: Magistral"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"is_causal": False}, "is_causal"),
        ({"is_causal": None}, "is_causal"),
        ({"num_attention_heads": 4.0}, "num_attention_heads"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
    ],
)
def test_such_a_config_is_refused_with_its_key(
    name: str, change: dict[str, Any], error: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders[name], tmp_path / "x", lambda text: text.update(change))
    with pytest.raises(CheckpointError, match=error):
        read_config(folder)


@pytest.mark.parametrize("name", ["llama", "Gemma3", "images: Magistral"])
def test_layers_of_different_configs_are_a_variant_that_is_not_native(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = {"per_layer_config": {"0": {"rms_norm_eps": 0.3}}}
    folder = changed(folders[name], tmp_path / "x", lambda text: text.update(other))
    with pytest.raises(UnsupportedVariantError, match="per_layer_config"):
        read_config(folder)


@pytest.mark.parametrize("name", ["Qwen3_5", "OlmoHybrid", "images: Qwen3.5"])
def test_linear_attention_has_one_activation(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders[name], tmp_path / "x", lambda text: text.update(hidden_act="gelu"))
    with pytest.raises(ValueError, match="hidden_act"):
        logits(folder, model_impl="native")


def test_a_factor_that_is_null_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["Afmoe"], tmp_path / "x", lambda text: text.update(route_scale=None))
    with pytest.raises(ValueError, match="route_scale"):
        logits(folder, model_impl="native")


# --- the known form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves_is_known(name: str, folders: dict[str, Path]) -> None:
    ours = {"num_experts", "moe_intermediate_size"}  # that tests give families without them
    assert not set(read_config(folders[name]).unknown) - ours


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_default_config_of_a_family_is_known(architecture: str, tmp_path: Path) -> None:
    family = FAMILIES[architecture]
    content = CONFIG_MAPPING[family.read_as or family.model_type]().to_dict()
    content |= {"architectures": [architecture], "model_type": family.model_type}
    content["rope_parameters"] = content.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(content, default=str))
    assert not read_config(tmp_path).unknown


_LLAMA = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu",
    "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "use_cache": True,
    "rope_theta": 5e5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
    "vocab_size": 91,
}  # fmt: skip
_PLAIN = {key: value for key, value in _LLAMA.items() if key != "attention_bias"}
_DEEPSEEK = _LLAMA | {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "moe_intermediate_size": 16, "moe_layer_freq": 1, "n_group": 2,
    "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "seq_aux": True, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 8,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn",
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
#: The keys that files of the hub have, by model.
HUB: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama-3.1": (
        "LlamaForCausalLM", "llama",
        _LLAMA | {
            "mlp_bias": False, "pretraining_tp": 1,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "Mistral-7B": ("MistralForCausalLM", "mistral", _PLAIN | {"sliding_window": None, "head_dim": 12}),
    "Qwen2.5": (
        "Qwen2ForCausalLM", "qwen2",
        _PLAIN | {"max_window_layers": 1, "sliding_window": 64, "use_sliding_window": False, "use_mrope": False},
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM", "qwen3_moe",
        _LLAMA | {
            "decoder_sparse_step": 1, "head_dim": 12, "max_window_layers": 2, "mlp_only_layers": [],
            "moe_intermediate_size": 16, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2,
            "output_router_logits": False, "rope_scaling": None, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM", "deepseek_v2",
        _DEEPSEEK | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "group_limited_greedy"},
    ),
    "gpt-oss": (
        "GptOssForCausalLM", "gpt_oss",
        _LLAMA | {
            "experts_per_token": 2, "head_dim": 12, "initial_context_length": 64, "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 8, "sliding_window": 128,
            "output_router_logits": False, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "attention_bias": True,
            "quantization_config": {"quant_method": "mxfp4"},
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 64,
                "rope_type": "yarn", "truncate": False,
            },
        },
    ),
    "GLM-4.5": (
        "Glm4MoeForCausalLM", "glm4_moe",
        _LLAMA | {
            "first_k_dense_replace": 1, "head_dim": 12, "moe_intermediate_size": 16, "n_group": 1,
            "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None,
            "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "pad_token_id": 3,
        },
    ),
    "Gemma 2": (
        "Gemma2ForCausalLM", "gemma2",
        _LLAMA | {
            "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
            "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "sliding_window": 64,
        },
    ),
    "Gemma 3": (
        "Gemma3ForConditionalGeneration", "gemma3",
        {
            "boi_token_index": 80, "eoi_token_index": 81, "eos_token_id": [1, 6], "image_token_index": 82,
            "initializer_range": 0.02, "mm_tokens_per_image": 4, "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0",
            "text_config": {
                "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
                "final_logit_softcapping": None, "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 48, "intermediate_size": 64, "max_position_embeddings": 512,
                "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 91,
                "num_key_value_heads": 2, "query_pre_attn_scalar": 12, "rms_norm_eps": 1e-6, "sliding_window": 64,
                "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "rope_theta": 1e6, "sliding_window_pattern": 6, "use_cache": True,
            },
            "vision_config": {"hidden_size": 16, "model_type": "siglip_vision_model", "vision_use_head": False},
        },
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
        _PLAIN | {
            "image_token_id": 80, "max_window_layers": 70, "sliding_window": 64, "use_sliding_window": False,
            "video_token_id": 81, "vision_end_token_id": 82, "vision_start_token_id": 83, "vision_token_id": 84,
            "rope_scaling": {"mrope_section": [2, 2, 2], "type": "mrope"},
            "vision_config": {"depth": 2, "in_chans": 3, "out_hidden_size": 48, "spatial_patch_size": 14},
        },
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration", "qwen3_vl",
        {
            "image_token_id": 80, "video_token_id": 81, "vision_end_token_id": 82, "vision_start_token_id": 83,
            "tie_word_embeddings": True, "transformers_version": "4.57.0",
            "text_config": {
                **{key: value for key, value in _LLAMA.items() if key != "torch_dtype"}, "dtype": "bfloat16",
                "head_dim": 12, "model_type": "qwen3_vl_text",
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 2, 2], "rope_type": "default"},
            },
            "vision_config": {"depth": 2, "model_type": "qwen3_vl", "out_hidden_size": 48},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_files_of_the_hub_are_known(name: str, tmp_path: Path) -> None:
    architecture, model_type, keys = HUB[name]
    content = {"architectures": [architecture], "model_type": model_type} | copy.deepcopy(keys)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert not read_config(tmp_path).unknown
    text = content.get("text_config") or content
    text["new_key"] = 1
    for key in ("rope_scaling", "rope_parameters"):
        if text.get(key):
            text[key]["new_factor"] = 1
    (tmp_path / "config.json").write_text(json.dumps(content))
    inside = {f"{key}.new_factor" for key in ("rope_scaling", "rope_parameters") if text.get(key)}
    assert set(read_config(tmp_path).unknown) == {"new_key"} | inside


#: Of the keys without an effect, those that modelling code reads: for training, for what a forward returns, to round.
_READ_IN_VAIN = {
    *("attention_dropout", "resid_pdrop", "residual_dropout", "router_jitter_noise", "initializer_range"),
    *("output_router_logits", "router_aux_loss_coef", "pad_token_id", "_attn_implementation", "num_labels"),
    *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "use_cache", "enable_moe_fp32_combine"),
    *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "num_logits_to_keep", "rescale_prenorm_residual"),
    *("time_step_max", "time_step_floor", "return_dict", "output_attentions", "output_hidden_states", "num_mtp_layers"),
    # Gemma 4's, of experts that must be off, and of attention that `is_causal` says.
    *("num_experts", "top_k_experts", "moe_intermediate_size", "use_bidirectional_attention"),
    "merged_hidden_size",  # of MiniMax-M3's vision
}


def _families() -> dict[str, Family]:
    inside = (family for whole in MULTIMODAL.values() for family in whole.language_models)
    every = (*FAMILIES.values(), *(family for family in inside if isinstance(family, Family)))
    return {family.read_as or family.model_type: family for family in every}


@pytest.mark.parametrize("model_type", _families())
def test_modelling_code_reads_no_key_that_is_said_to_have_no_effect(model_type: str) -> None:
    """Read off its source, for the release that is installed."""
    module = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
    source = inspect.getsource(sys.modules.get(module) or import_module(module))
    read = set(re.findall(r"config\.(\w+)", source)) | set(re.findall(r'config,\s*"(\w+)"', source))
    assert {"hidden_size", "vocab_size"} <= read, "the pattern finds keys"
    family = _families()[model_type]
    without_effect = WITHOUT_EFFECT | {*family.without_effect}
    assert not read & without_effect - config_rules(family).keys() - _READ_IN_VAIN
    assert read & known_keys(family)


# --- tokens that end a text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [9, 4]}, 2, (4, 9)),
        ({"eos_token_id": 7}, [2, 3], (7,)),
        ({"eos_token_id": []}, 2, ()),
        ({"eos_token_id": None}, [3, 2], (2, 3)),
        ({}, 5, (5,)),
        (None, [5, 5], (5,)),
        (None, None, ()),
    ],
)
def test_declared_eos_tokens(
    generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path)
    edit(tmp_path, lambda content: content.update(eos_token_id=config))
    if generation is None:
        (tmp_path / "generation_config.json").unlink()
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation_defaults(tmp_path, read_config(tmp_path)).eos_token_ids == expected


def test_the_eos_of_a_model_inside_another_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    for place, other in (("text_config", None), (None, "text_config")):
        folder = changed(folders["images: Magistral"], tmp_path / str(place), lambda text: None)
        (folder / "generation_config.json").unlink(missing_ok=True)

        def change(content: dict[str, Any], place: str | None = place, other: str | None = other) -> None:
            (content[place] if place else content)["eos_token_id"] = 17
            (content[other] if other else content).pop("eos_token_id", None)

        edit(folder, change)
        assert read_generation_defaults(folder, read_config(folder)).eos_token_ids == (17,)


def test_a_broken_generation_config_is_refused_with_its_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["llama"], tmp_path / "x", lambda text: None)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json cannot be read as JSON"):
        load_model(ModelSettings(path=str(folder)), CPU)


def test_the_comparison_notices_a_difference(folders: dict[str, Path]) -> None:
    assert compare(folders["llama"]) == "equal"
    real = transformers_logits(folders["llama"])
    assert compare(folders["llama"], lambda *_: real + 2 * TOLERANCE) == "differ"
