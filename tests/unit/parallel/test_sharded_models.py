"""Shards of every family that can be cut compute the logits of the whole model, and are filled from whole tensors."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_kernels.parallel import TensorGroup
from safetensors.torch import load_file, save_file

from rollout.config import ModelSettings
from rollout.models import Decoder, LoadedModel, load_model
from rollout.models.cut import CutView, kept_values, whole_shape
from rollout.models.loader import check_cut
from rollout.weights.kept_memory import InPlaceMemory
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from rollout.weights.staging import WeightStaging
from tests.support.kernels.grids import nightly
from tests.support.models.both_ways import edit
from tests.support.models.families import FAMILIES, make_checkpoint
from tests.support.models.hybrids import HYBRIDS, make_hybrid
from tests.support.models.images import make_model
from tests.support.models.latent import LATENT, make_latent
from tests.support.models.mxfp4 import make_mxfp4
from tests.support.models.paged import PROMPT, PagedRunner
from tests.support.models.variants import CONFIGS, SIZES
from tests.support.parallel.logits import join_logits
from tests.support.parallel.ranks import Ranks
from tests.support.settings import settings_of
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import pack

CPU = torch.device("cpu")
GREEDY = 24
#: What the sizes of the families need to be cut into two or four.
EVEN: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3_moe": {"num_attention_heads": 12, "num_key_value_heads": 2, "num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "Qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "Qwen3_5Moe": {"linear_num_key_heads": 4, "num_experts": 8, "shared_expert_intermediate_size": 20},
    "Qwen3Next": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 12, "num_experts": 8,
        "shared_expert_intermediate_size": 20,
    },
    "NemotronH": {"n_groups": 4}, "NemotronH latent": {"n_groups": 4},
    "GraniteMoeHybrid": {"num_local_experts": 8, "mamba_n_groups": 4},
    "DeepseekV3 moonlight": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "DeepseekV3": {"moe_intermediate_size": 20},
    "Glm4MoeLite": {"moe_intermediate_size": 20},
    "Mistral4": {"moe_intermediate_size": 20},
    "DeepseekV32": {"moe_intermediate_size": 20},
    "DeepseekV4": {"moe_intermediate_size": 20, "o_groups": 4},
    "GlmMoeDsa": {"moe_intermediate_size": 20},
}  # fmt: skip
EXPERT_COUNTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8}
#: As Llama 3.1 70B and Qwen3-235B-A22B over eight ranks: a KV head for each, and one for two ranks.
EIGHT: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 128,
        "vocab_size": 500,
    },
    "qwen3_moe": {
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 1024,
    },
}  # fmt: skip
#: Experts that are cut by width.
WIDE = {"qwen3_moe": {"moe_intermediate_size": 512}, "mixtral": {"intermediate_size": 512}}


class Case:
    """A checkpoint by its name: a family or a variant of one; "wide" ones have experts that are cut by width."""

    def __init__(self, name: str, folder: Path, seed: int = 0) -> None:
        family, _, wide = name.partition(" wide")
        config: dict[str, Any]
        if family in HYBRIDS or family in LATENT:
            make = make_hybrid if family in HYBRIDS else make_latent
            self.reference = make(family, folder, seed, **EVEN.get(family, {}))
            return
        if family in FAMILIES:
            config = EVEN.get(family, {}) | (WIDE[family] if name != family else {})
        else:
            own = CONFIGS[family]
            counts = {key: count for key, count in EXPERT_COUNTS.items() if key in own}
            config = SIZES | own | counts
            if name != family:
                key = "intermediate_size" if family == "GptOss" else "moe_intermediate_size"
                config |= {key: 512}
        self.reference = make_checkpoint(family.split()[0], folder, seed, **config)


NAMES = [*FAMILIES, *CONFIGS, *HYBRIDS, *LATENT, "qwen3_moe wide", "mixtral wide", "GptOss wide", "Glm4Moe wide"]
#: Those that differ in how they are cut run with two ranks every time; all of them, and four ranks, at night.
QUICK = {"llama", "qwen2", "qwen3_moe", "olmoe", "Phi3", "Glm4Moe", "GptOss", "Olmo3", "Gemma2", "Afmoe", "Qwen2Moe"}
QUICK |= {*HYBRIDS, "MiniMaxM3VL", "DeepseekV3", "DeepseekV4", "DeepseekV3 moonlight", "Glm4MoeLite", "Gemma4"}
CASES = [
    pytest.param(name, size, marks=[] if size == 2 and name.removesuffix(" wide") in QUICK else [pytest.mark.nightly])
    for name in NAMES
    for size in (2, 4)
]


def _load(folder: Path, group: TensorGroup | None = None, split: Any = "heads", **settings: Any) -> LoadedModel:
    return load_model(settings_of(ModelSettings, path=str(folder), **settings), CPU, group=group, split=split)


def _logits(model: Decoder, vocab: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt in two chunks and of given tokens, and the tokens of a greedy completion."""
    runner = PagedRunner(model, rows=2, max_tokens=len(PROMPT) + GREEDY)
    prompt = [token % vocab for token in PROMPT]
    found = [runner.prefill(dict.fromkeys(range(2), part))[1] for part in (prompt[:7], prompt[7:11])]
    found += [runner.decode(dict.fromkeys((1, 0), token), padding=1)[1][None] for token in prompt[11:]]
    tokens: list[int] = []
    last = found[-1][0]
    for _ in range(GREEDY):
        tokens.append(int(join_logits(model, last[None]).argmax()))
        last = runner.decode({1: tokens[-1]})[1]
    return join_logits(model, torch.cat(found)), tokens


def _run_shard(group: TensorGroup, folder: Path, split: Any = "heads") -> tuple[torch.Tensor, list[int], int]:
    loaded = _load(folder, group, split)
    logits, tokens = _logits(loaded.model, loaded.spec.vocab)
    return logits, tokens, sum(parameter.numel() for parameter in loaded.model.parameters())


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_and_greedy_tokens_are_those_of_one_rank(
    name: str, size: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    Case(name, tmp_path)
    _check_shards(tmp_path, start_ranks(size), 0.8 if size == 2 else 0.65)


@pytest.mark.nightly
@pytest.mark.parametrize("family", EIGHT)
def test_eight_ranks_compute_what_one_does(family: str, tmp_path: Path, start_ranks: Callable[[int], Ranks]) -> None:
    make_checkpoint(family, tmp_path, 0, **EIGHT[family])
    _check_shards(tmp_path, start_ranks(8), 0.5)


#: Models whose rows can be dealt: they differ in norms of heads, biases, sinks, windows, chunks, latents and indexers.
DEALT = ["qwen3_moe", "olmoe", "mixtral", "Glm4Moe", "GptOss", "Afmoe", "DeepseekV3", "DeepseekV3 moonlight"]
DEALT += ["Glm4MoeLite", "Qwen2Moe", "qwen3_moe wide", "MiniMaxM3VL"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if size == 2 else [pytest.mark.nightly])
        for name in [*DEALT, *(name for name in LATENT if name not in (*DEALT, "DeepseekV4"))]
        for size in (2, 4)
    ],
)
def test_rows_dealt_to_ranks_have_the_logits_of_one_rank(
    name: str, size: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """Two rows: with four ranks, two have none."""
    Case(name, tmp_path)
    _check_shards(tmp_path, start_ranks(size), 1.0, "rows")


#: Models whose contexts can be split: they differ in norms of heads, biases, softcaps, gates, states and latents.
SPLIT = ["llama", "qwen3_moe", "olmoe", "DeepseekV3", "DeepseekV3 moonlight", "Glm4MoeLite"]
SPLIT += [*HYBRIDS]


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(name, size, marks=[] if size == 2 else [pytest.mark.nightly]) for name in SPLIT for size in (2, 4)],
)
def test_contexts_split_over_ranks_have_the_logits_of_one_rank(
    name: str, size: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    Case(name, tmp_path)
    _check_shards(tmp_path, start_ranks(size), 0.85 if size == 2 else 0.75, "context")


@pytest.mark.parametrize("name", ["GptOss", "Afmoe", "DeepseekV32", "DeepseekV4", "MiniMaxM3VL"])
def test_contexts_of_other_models_are_not_split(name: str, tmp_path: Path) -> None:
    Case(name, tmp_path)
    with pytest.raises(ValueError, match="attention_split = context is not for .*: use heads"):
        check_cut(settings_of(ModelSettings, path=str(tmp_path)), tmp_path, 2, split="context")


@pytest.mark.parametrize("name", ["llama", sorted(HYBRIDS)[0], "DeepseekV4"])
def test_rows_of_other_models_are_not_dealt(name: str, tmp_path: Path) -> None:
    Case(name, tmp_path)
    with pytest.raises(ValueError, match="attention_split = rows is"):
        check_cut(settings_of(ModelSettings, path=str(tmp_path)), tmp_path, 2, split="rows")


def _check_shards(folder: Path, ranks: Ranks, share: float, split: Any = "heads") -> None:
    """Ranks compute the logits of one rank that has it all, and each has at most this share of the parameters."""
    whole = _load(folder)
    logits, tokens = _logits(whole.model, whole.spec.vocab)
    results = ranks.run(_run_shard, folder, split)
    for shard_logits, shard_tokens, _ in results:
        assert torch.equal(shard_logits, results[0][0]), "ranks have other bits"
        assert (shard_logits - logits).abs().max() < 1e-4
        assert shard_tokens == tokens
    assert len({*logits.argmax(-1).tolist(), *tokens}) > 1
    largest = max(values for *_, values in results)
    assert largest < sum(parameter.numel() for parameter in whole.model.parameters()) * share


@pytest.mark.parametrize("lacks", [None, "model.embed_tokens.weight"])
def test_ranks_agree_on_whether_the_output_layer_is_tied(
    lacks: str | None, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """The config says so; the files have another output layer, or that one alone."""
    make_checkpoint("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.5
    tensors.pop(lacks, None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert _load(tmp_path).spec.tied == (lacks is not None)
    _check_shards(tmp_path, start_ranks(2), 0.8)


def _checks(group: TensorGroup, folder: Path) -> int:
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("rollout.models.start_check"), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _load(folder, group)
    logger.removeHandler(handler)
    return len(records)


def test_one_rank_checks_the_logits_of_a_config_with_unknown_keys(
    tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    make_checkpoint("qwen3", tmp_path)
    edit(tmp_path, lambda content: content.update(new_key=1))
    assert start_ranks(2).run(_checks, tmp_path) == [1, 0]
    _check_shards(tmp_path, start_ranks(2), 0.8)


@pytest.mark.parametrize("width", [32, 256], ids=["whole experts", "parts of each"])
def test_ranks_decode_their_part_of_experts_in_mxfp4(
    width: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    reference = make_mxfp4(tmp_path, hidden_size=64, intermediate_size=width)
    prompt = torch.tensor([[token % reference.config.vocab_size for token in PROMPT]])
    with torch.no_grad():
        exact = reference(prompt).logits[0]
    for logits, *_ in start_ranks(2).run(_run_shard, tmp_path):
        assert (logits - exact).abs().max() < 1e-4


# --- parameters ------------------------------------------------------------------------------------------------------


def _parameters(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _tensors(whole: LoadedModel) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of the whole model has, in every layout of names."""
    return {name: kept_values(view).contiguous() for name, view in whole.trainer_views().items()}


def _update_shard(group: TensorGroup, folder: Path, other: Path, names: list[str], experts: str) -> bool:
    """Load one checkpoint, copy the whole tensors of another one into it: the same as loading the other one."""
    settings = ModelSettings(path=str(folder))
    ours = load_model(settings, CPU, weights=experts, group=group)
    fresh = load_model(ModelSettings(path=str(other)), CPU, weights=experts, group=group)
    views = ours.trainer_views()
    tensors = _tensors(load_model(ModelSettings(path=str(other)), CPU, weights="plain"))
    scales = frozenset(ours.scale_views())
    parameters = ParameterMap(views, UpdateNames(ours.kept_if_absent(), ours.spec.unused, scales=scales))
    for name in ours.kept_if_absent():
        views[name].copy_(tensors[name])
    rows = [(name, "float32", list(tensors[name].shape)) for name in names]
    for name in parameters.check(pack(1, rows, 1 << 20)).copied:
        assert whole_shape(views[name]) == tuple(tensors[name].shape)
        views[name].copy_(tensors[name])
    expected, got = _parameters(fresh.model), _parameters(ours.model)
    before = _parameters(load_model(settings, CPU, weights=experts, group=group).model)
    return all(torch.equal(got[name], expected[name]) for name in expected) and any(
        not torch.equal(got[name], before[name]) for name in expected
    )


def _names_of(loaded: LoadedModel, alternative: int) -> list[str]:
    regions = loaded.model.hf_regions()
    return [name for region in regions for name in region.alternatives[min(alternative, len(region.alternatives) - 1)]]


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("qwen2", "plain"), ("qwen3_moe", "plain"), ("Phi3", "plain"), ("GptOss wide", "plain"),
        ("Glm4Moe wide", "plain"), ("Coded", "fp8_block"), ("Coded", "mxfp8"), ("Qwen3_5", "plain"),
        ("OlmoHybrid", "plain"), ("DeepseekV3", "plain"), ("DeepseekV4", "plain"), ("MXFP4", "auto"),
        ("MXFP4 wide", "auto"),
        *nightly(*((name, "plain") for name in ("qwen3_moe wide", "GptOss", "Afmoe", "Qwen3Next"))),
    ],
)  # fmt: skip
def test_an_update_of_whole_tensors_fills_a_shard(
    name: str, experts: str, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """In each layout of names; those that an update may leave out are set beforehand."""
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        if name == "Coded":
            sizes = EVEN["qwen3_moe"] | WIDE["qwen3_moe"] | {"hidden_size": 128, "intermediate_size": 512}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # ranks cut along blocks
            make_checkpoint("qwen3_moe", folder, seed, **sizes)
        elif name.startswith("MXFP4"):
            make_mxfp4(folder, seed, hidden_size=64, intermediate_size=256 if name.endswith("wide") else 32)
        else:
            Case(name, folder, seed)
    for alternative in range(2):
        names = _names_of(_load(folders[0]), alternative)
        assert all(start_ranks(2).run(_update_shard, *folders, names, experts))


def _random_shard(group: TensorGroup, folder: Path, reference: Path, images: bool) -> bool:
    random = _load(folder, group, load_format="random", random_seed=3, images=images)
    loaded = _load(reference, group, images=images)
    expected = _parameters(loaded.model)
    return all(torch.equal(value, expected[name]) for name, value in _parameters(random.model).items())


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3_moe", "GptOss wide", "Afmoe", "Qwen3Next", "Glm4MoeLite", "Qwen3-VL", "Gemma4"]
)
def test_random_weights_of_shards_are_parts_of_those_of_one_rank(
    name: str, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """The whole random model, saved as a checkpoint, gives the shards that are made at random."""
    if images := name == "Qwen3-VL":
        make_model(name, tmp_path / "shapes")
    else:
        Case(name, tmp_path / "shapes")
    whole = _load(tmp_path / "shapes", load_format="random", random_seed=3, images=images)
    tensors = _tensors(whole)
    kept = {name: tensors[name] for name in _names_of(whole, 0)}
    (tmp_path / "saved").mkdir()
    save_file({name: tensor.clone() for name, tensor in kept.items()}, tmp_path / "saved" / "model.safetensors")
    config = (tmp_path / "shapes" / "config.json").read_text()
    (tmp_path / "saved" / "config.json").write_text(config)
    assert all(start_ranks(2).run(_random_shard, tmp_path / "shapes", tmp_path / "saved", images))


def _load_as_shard(group: TensorGroup, folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        _load(folder, group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3", {"num_attention_heads": 5, "num_key_value_heads": 5}, "5 attention heads are not a multiple of 2"),
        ("qwen3_moe", {}, "3 KV heads are neither a multiple of 2 nor a divisor of it"),
        ("mixtral", {}, "5 experts are not a multiple of 2, nor is their width 44 a multiple of 128 times 2"),
        ("qwen2", {"intermediate_size": 71}, "width 71 of its feed-forward blocks is not a multiple of 2"),
        ("qwen2", {"vocab_size": 4}, "vocabulary has 4 tokens"),
        ("Starcoder2", SIZES, "transformers' own code"),
        ("Qwen3_5", {"linear_num_key_heads": 3, "linear_num_value_heads": 3}, "3 key heads of linear attention"),
        ("DeepseekV3 moonlight", {}, "5 heads of latent attention are not a multiple of 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    make = make_hybrid if family in HYBRIDS else make_latent if family in LATENT else make_checkpoint
    make(family, tmp_path, **changes)
    for message in start_ranks(2).run(_load_as_shard, tmp_path):
        assert reason in message and "2 shards" in message


def test_weights_with_a_scale_for_a_row_are_not_cut(tmp_path: Path) -> None:
    """A rank's part of a row would have a scale of its own, and so other values than one rank has."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    make_checkpoint("mixtral", tmp_path, **EVEN["mixtral"] | sizes | {"head_dim": 64})
    settings = ModelSettings(path=str(tmp_path))
    for weights in ("plain", "mxfp8", "fp8_block"):
        check_cut(settings, tmp_path, 2, weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8_row has a scale for a row .* use fp8_block or mxfp8"):
        check_cut(settings, tmp_path, 2, "fp8_row")


def test_a_shard_takes_whole_tensors_only(tmp_path: Path, start_ranks: Callable[[int], Ranks]) -> None:
    Case("qwen2", tmp_path)
    assert all(start_ranks(2).run(_copy_a_part, tmp_path))


def _copy_a_part(group: TensorGroup, folder: Path) -> bool:
    loaded = _load(folder, group)
    view = loaded.trainer_views()["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(view, CutView) and whole_shape(view) == (48, 72) and tuple(view.shape) == (48, 36)
    with pytest.raises(ValueError, match="not a whole tensor"):
        view.copy_(torch.zeros(48, 36))
    parameters = ParameterMap(loaded.trainer_views(), UpdateNames())
    rows = [(name, "float32", list(whole_shape(view))) for name, view in loaded.model.hf_views().items()]
    cut = [(name, dtype, [48, 36] if name.endswith("0.mlp.down_proj.weight") else shape) for name, dtype, shape in rows]
    with pytest.raises(WeightsRejected, match=r"down_proj.*expected \[48, 72\]"):
        parameters.check(pack(1, cut, 1 << 20))
    with pytest.raises(WeightsRejected, match="missing tensors: model.norm.weight"):
        parameters.check(pack(1, [row for row in rows if row[0] != "model.norm.weight"], 1 << 20))
    return True


def _update_in_place(group: TensorGroup, folder: Path, other: Path, twice: bool) -> bool:
    """The bytes of whole tensors arrive in pieces; with `twice` the tied output layer is sent, too."""
    ours, fresh, whole = _load(folder, group), _load(other, group), _tensors(_load(other))
    views = ours.trainer_views()
    names = _names_of(ours, 0) + (list(ours.spec.tied_names) if twice else [])
    manifest = pack(1, [(name, "float32", list(whole[name].shape)) for name in names], 1 << 20)
    stream = torch.zeros(max(entry.end for entry in manifest.tensors), dtype=torch.uint8)
    for entry in manifest.tensors:
        stream[entry.offset : entry.end] = whole[entry.name].contiguous().view(-1).view(torch.uint8)
    fit = ParameterMap(views, UpdateNames()).check(manifest)
    staging = WeightStaging(InPlaceMemory(views))
    staging.open(manifest, fit)
    for start in range(0, len(stream), 4096):
        staging.take(start, stream[start : start + 4096])
    staging.check()
    expected, got = _parameters(fresh.model), _parameters(ours.model)
    return len(fit.aliases) == twice and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("twice", [False, True])
def test_an_update_in_place_fills_a_shard(twice: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]) -> None:
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        Case("qwen2", folder, seed)
    assert all(start_ranks(2).run(_update_in_place, *folders, twice))
