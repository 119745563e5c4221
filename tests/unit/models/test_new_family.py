"""A family is one declaration: families declared here, dense and with experts, run as transformers runs them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollout.checkpoint_folder import CheckpointError
from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.config_rules import layer_list
from rollout.models.config_spec import spec_from_config
from rollout.models.families import FAMILIES
from rollout.models.families.declare import (
    Family,
    Key,
    MoEFamily,
    by_layer,
    ropes_by_type,
    sparse_by_type,
    windows_by_type,
)
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.models.registry import config_rules
from rollout.models.spec import AttentionNames, DenseNames, LayerNames, ModelNames, MoENames
from tests.support.kernels.grids import nightly
from tests.support.models import sigmoid_router
from tests.support.models.families import make_checkpoint
from tests.support.models.paged import check
from tests.support.models.side_by_side import (
    COARSE,
    LONG,
    SEEDS,
    errors,
    expected,
    load,
    save_rounded,
    side_by_side,
    steps,
)
from tests.support.peft_adapters import make_adapter, merged

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 91, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


MELLUM = Family(
    model_type="mellum",
    qkv_bias=Key("attention_bias"),
    o_bias=Key("attention_bias"),
    qk_norm="head",
    windows=windows_by_type,
    ropes=ropes_by_type,
    moe=MoEFamily(
        experts=Key("num_experts"),
        intermediate=Key("moe_intermediate_size"),
        renormalize=Key("norm_topk_prob"),
        sparse=sparse_by_type,
    ),
)
#: A dense layer among sparse ones, a rotary embedding for each type of attention.
MELLUM_SIZES: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True,
    "mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
}  # fmt: skip

#: By made-up architectures, which no real family takes: (declaration, stem of transformers' classes, config).
DECLARED: dict[str, tuple[Family, str, dict[str, Any]]] = {
    "MadeUpMistralForCausalLM": (FAMILIES["MistralForCausalLM"], "Mistral", {"sliding_window": 6}),
    "MadeUpSeedOssForCausalLM": (
        FAMILIES["SeedOssForCausalLM"],
        "SeedOss",
        {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    ),
    "MadeUpMellumForCausalLM": (MELLUM, "Mellum", MELLUM_SIZES),
}
#: Qwen3 under other names.
RENAMED = Family(
    model_type="qwen3",
    qk_norm="head",
    names=ModelNames(embed="tok", layer="blocks.{}.", norm="final", lm_head="head"),
    layer_names=LayerNames(mixer_norm="norm1", feed_forward_norm="norm2"),
    attention_names=AttentionNames(qkv=("attn.wq", "attn.wk", "attn.wv"), o="attn.wo", qk_norm=("attn.nq", "attn.nk")),
    dense_names=DenseNames(gate_up=("ff.w1", "ff.w3"), down="ff.w2"),
)
#: Qwen3 with experts, under other names.
RENAMED_MOE = Family(
    model_type="qwen3_moe",
    qk_norm="head",
    moe=MoEFamily(
        experts=Key("num_experts"),
        intermediate=Key("moe_intermediate_size"),
        renormalize=True,
        names=MoENames(
            router=("ffn.router",),
            gate="ffn.expert_{}.w1",
            up="ffn.expert_{}.w3",
            down="ffn.expert_{}.w2",
            stacked_gate_up="ffn.w13",
            stacked_down="ffn.w2",
        ),
    ),
)
MOE_NAMES = {
    "mlp.gate.": "ffn.router.", "mlp.experts.gate_up_proj": "ffn.w13", "mlp.experts.down_proj": "ffn.w2",
    "mlp.experts.": "ffn.expert_", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "tok", "model.layers": "blocks", "model.norm": "final", "lm_head": "head",
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn": "attn", "mlp": "ff",
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "q_norm": "nq", "k_norm": "nk",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip


def renamed(name: str, names: dict[str, str] = NAMES) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def rename_tensors(file: Path, names: dict[str, str] = NAMES) -> None:
    save_file({renamed(name, names): tensor for name, tensor in load_file(file).items()}, file)


def skip_if_lacking(stem: str) -> None:
    if not hasattr(transformers, f"{stem}ForCausalLM"):
        pytest.skip(f"this release of transformers has no {stem}")


def rename_family(folder: Path, architecture: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("architecture", DECLARED)
def test_one_declaration_adds_a_family(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, stem, options = DECLARED[architecture]
    skip_if_lacking(stem)
    reference = make_checkpoint(stem, tmp_path, **(SIZES | options))
    rename_family(tmp_path, architecture)
    with pytest.raises(ValueError, match=architecture):
        load_model(ModelSettings(path=str(tmp_path)), CPU)
    monkeypatch.setitem(FAMILIES, architecture, family)
    check(load_model(ModelSettings(path=str(tmp_path)), CPU), reference)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("tied", [False, *nightly(True)])
def test_a_declaration_may_give_tensors_other_names(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names hold for checkpoints, for updates and for adapters."""
    monkeypatch.setitem(FAMILIES, "RenamedForCausalLM", RENAMED)
    reference = make_checkpoint("qwen3", tmp_path, **SIZES, use_sliding_window=False, tie_word_embeddings=tied)
    adapter = make_adapter(reference, tmp_path / "adapter", 0)
    rename_family(tmp_path, "RenamedForCausalLM")
    rename_tensors(tmp_path / "model.safetensors")
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    check(loaded, reference)
    assert set(loaded.trainer_views()) == {renamed(name) for name in reference.state_dict()}
    exact = merged(reference, adapter)
    rename_tensors(adapter / "adapter_model.safetensors")
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    check(loaded, exact, slots)


QWEN3_MOE_SIZES = SIZES | {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "attention_bias": False,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_experts_and_their_router_may_have_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts one by one, as in checkpoints, and all experts of a layer stacked, as trainers may send them."""
    monkeypatch.setitem(FAMILIES, "RenamedMoeForCausalLM", RENAMED_MOE)
    reference = make_checkpoint("qwen3_moe", tmp_path, **QWEN3_MOE_SIZES, norm_topk_prob=True, mlp_only_layers=[])
    rename_family(tmp_path, "RenamedMoeForCausalLM")
    rename_tensors(tmp_path / "model.safetensors", MOE_NAMES)
    assert any("ffn.expert_4.w3" in name for name in load_file(tmp_path / "model.safetensors"))
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    check(loaded, reference)
    views = loaded.trainer_views()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(views[renamed(name, MOE_NAMES)], tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_a_router_may_have_a_rule_and_a_bias_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sigmoid_router.declare(monkeypatch)
    reference = make_checkpoint("qwen3_moe", tmp_path, **QWEN3_MOE_SIZES, mlp_only_layers=[])
    sigmoid_router.give_biases(tmp_path, reference)
    check(load_model(ModelSettings(path=str(tmp_path)), CPU), reference)


def compare_kernels(save: Callable[[Path, int], Any], folder: Path, atol: float) -> None:
    """By the kernels in bf16 a model is as close to float32 as by its modules, and in float32 it is transformers'.

    `save` makes a checkpoint of a seed in a folder, and returns it as transformers' model.
    """
    runs = []
    for seed in SEEDS:
        reference = save(folder / str(seed), seed)
        wide = load(folder / str(seed), "float32")
        runs.append(side_by_side(load(folder / str(seed), "bfloat16"), wide, plans=COARSE))
        exact, _, ids = steps(wide, wide, LONG)
        assert (exact - expected(reference, ids)).abs().max() < atol
    by_kernels, by_modules = errors(runs)
    assert by_kernels < 1.25 * by_modules + 1e-4


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
def test_a_shared_expert_runs_after_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_topk_prob": False, "mlp_only_layers": [1],
    }  # fmt: skip

    def save(folder: Path, seed: int) -> Any:
        return save_rounded("Qwen2Moe", folder, seed, **(SIZES | sizes))

    compare_kernels(save, tmp_path, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
def test_the_kernels_run_the_experts_of_a_router_that_they_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sigmoid_router.declare(monkeypatch)

    def save(folder: Path, seed: int) -> Any:
        reference = save_rounded("qwen3_moe", folder, seed)
        sigmoid_router.give_biases(folder, reference)
        return reference

    compare_kernels(save, tmp_path, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.nightly
def test_the_kernels_run_experts_with_a_scale_beside_shared_ones(tmp_path: Path) -> None:
    """GLM-4.5: half of a head turns, and the first layer is dense."""
    sizes = {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "use_qk_norm": True, "head_dim": 16,
        "hidden_size": 64, "moe_intermediate_size": 32, "attention_bias": True,
    }  # fmt: skip
    compare_kernels(lambda folder, seed: save_rounded("Glm4Moe", folder, seed, **(SIZES | sizes)), tmp_path, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:no measured plan")
@pytest.mark.parametrize("shared", [1, *nightly(2)])
def test_the_kernels_run_experts_between_blocks_that_torch_runs(shared: int, tmp_path: Path) -> None:
    """AFMoE has norms after its blocks. One or two shared experts are stored with the others."""
    sizes = {
        "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": shared,
        "num_dense_layers": 1, "route_scale": 1.7, "mup_enabled": True, "head_dim": 16, "hidden_size": 64,
        "moe_intermediate_size": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    compare_kernels(lambda folder, seed: save_rounded("Afmoe", folder, seed, **(SIZES | sizes)), tmp_path, atol=1e-3)


# --- keys of config.json ----------------------------------------------------------------------------------------------


class Noting:
    """A config that notes which keys are read."""

    def __init__(self, config: Any) -> None:
        self._config, self.read = config, set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._config, name)


#: Checked by their own code, or only compared.
CHECKED_ELSEWHERE = {"rope_parameters", "hidden_act", "quantization_config", "model_type"}
#: Of transformers itself, which computes the frequencies of scaled rotary embeddings.
OF_TRANSFORMERS = {"standardize_rope_params", "per_layer_config", "qk_head_dim"}
STEMS = {name: name.partition("For")[0] for name in FAMILIES} | {name: d[1] for name, d in DECLARED.items()}


@pytest.mark.parametrize("architecture", STEMS)
def test_a_family_reads_no_key_without_a_rule(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if architecture in DECLARED:
        monkeypatch.setitem(FAMILIES, architecture, DECLARED[architecture][0])
    skip_if_lacking(STEMS[architecture])
    config = getattr(transformers, f"{STEMS[architecture]}ForCausalLM").config_class()
    if config.is_heterogeneous:  # as Gemma 4: its layers are read by their own configs
        config.allow_global_per_layer_attribute_access = True
    if getattr(config, "rope_parameters", None) is None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    if getattr(config, "head_dim", None) is None:  # some have it in checkpoints only
        config.head_dim = 128
    if getattr(config, "num_experts_per_tok", 1) is None:  # as DeepSeek-V2
        config.num_experts_per_tok = 2
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:  # as Granite 4
        config.layer_types = [*config.layer_types[:-1], "full_attention"]
    noting = Noting(config)
    spec_from_config(noting, architecture)
    assert noting.read - CHECKED_ELSEWHERE - OF_TRANSFORMERS <= set(config_rules(FAMILIES[architecture]))


def test_the_keys_of_a_new_family_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of constants, of experts, of functions, and of one layer type's rotary embedding."""
    skip_if_lacking("Mellum")
    monkeypatch.setitem(FAMILIES, "MadeUpMellumForCausalLM", MELLUM)
    make_checkpoint("Mellum", tmp_path, **(SIZES | MELLUM_SIZES))
    rename_family(tmp_path, "MadeUpMellumForCausalLM")
    good = json.loads((tmp_path / "config.json").read_text())
    rope = good["rope_parameters"] | {"full_attention": {"rope_type": "default", "rope_theta": "1e4"}}
    experts = "num_experts" if "num_experts" in good else "num_local_experts"
    for changes in (
        {"attention_bias": 1},
        {experts: 1 << 40},
        {"moe_intermediate_size": 1 << 40},
        {"norm_topk_prob": 1},
        {"mlp_layer_types": "sparse"},
        {"mlp_layer_types": [1, 2, 3]},
        {"rope_parameters": rope},
    ):
        (tmp_path / "config.json").write_text(json.dumps(good | changes))
        with pytest.raises(CheckpointError, match=next(iter(changes)).removeprefix("num_local_")):
            load_model(ModelSettings(path=str(tmp_path)), CPU)


def test_a_function_reads_only_the_keys_that_it_names() -> None:
    @by_layer(layer_types=layer_list(str))
    def other_key(config: Any) -> tuple[bool, ...]:
        return (config.sliding_window is None,) * config.num_hidden_layers

    with pytest.raises(AttributeError, match="sliding_window"):
        other_key(SimpleNamespace(num_hidden_layers=1, layer_types=["full_attention"], sliding_window=None))
