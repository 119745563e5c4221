"""Models with latent attention: their steps, names and adapters are those of transformers and PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rollout_kernels.attention import triton_index_scores
from rollout_kernels.attention.triton_latent_decode import plan_latent_work

from rollout.config import ModelSettings
from rollout.models import CheckpointError, load_model
from rollout.models.config_spec import spec_from_config
from rollout.models.cut import kept_values
from rollout.models.fused import FusedDecoder
from rollout.models.lora_slots import AdapterSlots
from rollout.models.peft_tensors import load_peft_folder
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from tests.support.kernels.grids import nightly
from tests.support.models.latent import LATENT, config_of, make_latent
from tests.support.models.paged import PagedRunner, assert_logits_in_chunks_and_steps, check
from tests.support.peft_adapters import make_adapter, merged
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")
_HCA = {"heavily_compressed_attention": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model as it is served and transformers' own, by name, made when first asked for."""
    torch.set_num_threads(1)
    known: dict[str, tuple[Any, Any, Path]] = {}

    def make(name: str) -> tuple[Any, Any, Path]:
        if name not in known:
            folder = tmp_path_factory.mktemp("model")
            reference = make_latent(name, folder)
            known[name] = load_model(ModelSettings(path=str(folder)), CPU), reference, folder
        return known[name]

    return make


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 83, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    "name", ["DeepseekV3", "DeepseekV2", *nightly("DeepseekV3 moonlight", "DeepseekV2 groups", "Glm4MoeLite")]
)
def test_chunked_prefill_and_200_decode_steps_give_the_logits_of_transformers(made: Any, name: str) -> None:
    loaded, reference, _ = made(name)
    prompts = [150, 1, 9]
    ids = [tokens(length + 200, row) for row, length in enumerate(prompts)]
    # Spans that absorb, one that expands its context, and both in one step.
    chunks = ({0: (0, 2), 2: (0, 4)}, {0: (2, 40)}, {2: (4, 9), 1: (0, 1), 0: (40, 110)}, {0: (110, 150)})
    assert_logits_in_chunks_and_steps(loaded.model, reference, ids, prompts, chunks)


@pytest.mark.parametrize("name", LATENT)
def test_a_trainers_parameters_have_the_names_of_the_checkpoint(made: Any, name: str) -> None:
    loaded, reference, _ = made(name)
    views = loaded.trainer_views()
    assert all(torch.equal(kept_values(views[name]), tensor) for name, tensor in reference.state_dict().items())
    parameters = ParameterMap(views, UpdateNames(loaded.kept_if_absent(), loaded.spec.unused))
    rows = [(name, "float32", list(tensor.shape)) for name, tensor in reference.named_parameters()]
    fit = parameters.check(pack(1, rows, 1 << 20))
    assert len(fit.copied) == len(rows) and not fit.unused


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    "name", ["DeepseekV2", "DeepseekV32", "DeepseekV4", *nightly("DeepseekV3", "Glm4MoeLite", "GlmMoeDsa")]
)
def test_the_kernels_run_latent_attention_and_what_is_between(
    made: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, reference, _ = made(name)

    def plan(page_table: torch.Tensor, lens: torch.Tensor, cache: torch.Tensor, *, heads: int, max_context: int) -> Any:
        return plan_latent_work(lens, heads, cache.dtype, multiprocessors=2)

    for module in ("latent", "indexer"):
        monkeypatch.setattr(f"rollout.models.{module}.plan_latent_decode", plan)
    monkeypatch.setattr("rollout.models.indexer.index_scores", triton_index_scores.index_scores)
    assert not FusedDecoder(loaded.model).takes_wanted
    check(loaded, reference)


@pytest.mark.parametrize("name", ["DeepseekV3", "DeepseekV2", "DeepseekV4"])
def test_an_adapter_of_its_projections_is_what_peft_merges(made: Any, name: str, tmp_path: Path) -> None:
    loaded, reference, _ = made(name)
    queries = ("q_a_proj", "q_b_proj") if loaded.spec.layers[0].mixer.q_rank else ("q_proj",)
    others = ("kv_proj", "o_b_proj") if name == "DeepseekV4" else ("kv_a_proj_with_mqa", "o_proj")
    adapter = make_adapter(reference, tmp_path / "adapter", 0, (*queries, *others))
    slots = AdapterSlots(loaded.spec, 1, 16, torch.float32, CPU)
    slots.write(1, load_peft_folder(adapter, loaded.spec, 16, torch.float32))
    exact, prompt = merged(reference, adapter), tokens(20, 1)
    runner = PagedRunner(loaded.model, rows=1, max_tokens=20)
    runner.adapters, runner.adapter_of = slots, [1]
    logits = [runner.prefill({0: prompt[:18]})[0], *(runner.decode({0: token})[0][None] for token in prompt[18:])]
    with torch.no_grad():
        expected, plain = (hf_model(torch.tensor([prompt])).logits[0] for hf_model in (exact, reference))
    assert (torch.cat(logits) - expected).abs().max() < 1e-3  # merged weights round otherwise
    assert (expected - plain).abs().max() > 0.1


def test_an_adapter_of_the_absorbed_projection_is_refused(made: Any, tmp_path: Path) -> None:
    loaded, reference, _ = made("DeepseekV2")
    adapter = make_adapter(reference, tmp_path, 0, ("kv_b_proj",))
    with pytest.raises(CheckpointError, match="kv_b_proj"):
        load_peft_folder(adapter, loaded.spec, 16, torch.float32)


def test_random_weights_give_finite_logits(made: Any) -> None:
    folder = made("DeepseekV3")[2]
    model = load_model(ModelSettings(path=str(folder), load_format="random"), CPU).model
    logits = PagedRunner(model, rows=1, max_tokens=40).prefill({0: tokens(40, 1)})[0]
    assert 0.5 < logits.std() < 20


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2", {"mlp_bias": True}, "mlp_bias"),
        ("DeepseekV2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("DeepseekV2 groups", {"n_group": None}, "n_group"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("DeepseekV3", {"v_head_dim": None}, "v_head_dim"),
        ("DeepseekV3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("DeepseekV3", {"q_lora_rank": None}, "attention_bias"),
        ("DeepseekV32", {"index_head_dim": 6}, "index_head_dim"),
        ("DeepseekV32", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("DeepseekV4", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("DeepseekV4", {"compress_rates": {"compressed_sparse_attention": 8, **_HCA}}, "compress_rates"),
        ("DeepseekV4", {"o_groups": 3}, "o_groups"),
        ("DeepseekV4", {"index_head_dim": 6}, "index_head_dim"),
        ("DeepseekV4", {"sliding_window": 0}, "sliding_window"),
        ("GlmMoeDsa", {"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(name: str, wrong: dict[str, Any], says: str) -> None:
    stem = name.split()[0]
    config = getattr(transformers, f"{stem}Config")(**config_of(name))
    for key, value in wrong.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=says):
        spec_from_config(config, f"{stem}ForCausalLM")


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    """Its config.json has the architecture of DeepSeek-V3 and a model type that transformers does not have."""
    reference = make_latent(
        "DeepseekV3", tmp_path, n_routed_experts=384, n_group=1, topk_group=1, moe_intermediate_size=6
    )
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    loaded = load_model(ModelSettings(path=str(tmp_path)), CPU)
    assert loaded.spec.moe is not None and loaded.spec.moe.experts == 384
    check(loaded, reference, fused=False)
    assert set(dict(reference.named_parameters())) <= set(loaded.trainer_views())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k3"}))
    with pytest.raises(ValueError, match="'deepseek_v3' or 'kimi_k2'"):
        load_model(ModelSettings(path=str(tmp_path)), CPU)
