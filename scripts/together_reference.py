"""The reference page of which features work together, made by asking the rules by which a worker refuses to start.

`tests/engine/test_together.py` starts engines with these features and compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from pydantic import ValidationError
from rollout_kernels.parallel import TensorGroup
from transformers import CONFIG_MAPPING

from rollout.config import EngineSettings
from rollout.engine.features.routing.record import kept_routing
from rollout.engine.model_checks import check_fallback, check_model
from rollout.engine.sizing import DeviceTarget, kv_dtype
from rollout.models.coded import check_format
from rollout.models.config_spec import spec_from_config
from rollout.models.decoder import Decoder
from rollout.models.deterministic import check_deterministic
from rollout.models.families import FAMILIES, MULTIMODAL
from rollout.models.fused import obstacle
from rollout.models.shard import shard_spec
from rollout.models.spec import ModelSpec
from scripts.tables import table

_META = torch.device("meta")
_INTRODUCTION = """\
# Which features work together

For users who combine features: whether a worker with both starts, or the number of the reason why it refuses to.

Constraints, budgets of thoughts, sessions, forks, scores and weights updates work with all. With
states, constraints [need a mask for every token](../design/constraints.md#constraints-after-a-marker), and `lease_s`
needs a session. Which ran on a GPU: [install](../install.md#what-it-does-not-do-yet), [models](models.md).

On a Hopper GPU:
"""


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature, and how it is switched on."""

    title: str
    settings: Mapping[str, Any]  # of `[engine]`
    images: bool = False


FEATURES = (
    Feature("several GPUs", {"tensor_parallel": 2}),
    Feature("`attention_split = rows`", {"tensor_parallel": 2, "attention_split": "rows"}),
    Feature("`attention_split = context`", {"tensor_parallel": 2, "attention_split": "context"}),
    Feature("images", {}, images=True),
    Feature("adapters", {"adapter_slots": 2}),
    Feature("recorded experts", {"routing": True}),
    Feature("drafts", {"speculation": "suffix"}),
    Feature("fp8 weights", {"weight_dtype": "fp8_block"}),
    Feature("fp8 KV", {"kv_dtype": "fp8_e4m3"}),
    Feature("`deterministic`", {"deterministic": True}),
    Feature("KV on the host", {"host_kv_gib": 1.0}),
    Feature("KV on disk", {"host_kv_gib": 1.0, "disk_kv_gib": 1.0, "disk_kv_folder": "/kv"}),
    Feature("`kv_on_swap = recompute`", {"kv_on_swap": "recompute"}),
    Feature("`max_kv_age`", {"max_kv_age": 2}),
    Feature("sleep", {"sleep": True}),
)


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of model, by an example; for the fallback, its way to compute attention."""

    title: str
    architecture: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    gathered: bool = False


KINDS = (
    Kind("dense", "Qwen3ForCausalLM"),
    Kind("experts", "Qwen3MoeForCausalLM"),
    Kind("gated DeltaNet", "Qwen3NextForCausalLM"),
    Kind("Mamba-2", "GraniteMoeHybridForCausalLM", {"layer_types": ["linear_attention"] * 31 + ["full_attention"]}),
    Kind("latent attention", "DeepseekV3ForCausalLM"),
    Kind("fallback"),
    Kind("fallback, gathered", gathered=True),
)


class Refusals:
    """The reasons against features of the kinds of models."""

    def __init__(self) -> None:
        self._specs = {kind: _spec(kind) for kind in KINDS if kind.architecture}
        self._models: dict[tuple[ModelSpec, str], Decoder] = {}

    def reason(self, kind: Kind, *features: Feature) -> str | None:
        """Why a worker with these features refuses a model of this kind; None if it starts."""
        settings = {name: value for feature in features for name, value in feature.settings.items()}
        try:
            engine = EngineSettings(**settings)
            if kind.architecture:
                self._check(engine, kind, any(feature.images for feature in features))
            elif any(feature.images for feature in features) or engine.tensor_parallel > 1:
                return "transformers' own code runs without images, on one GPU"
            else:
                check_fallback(engine, "the model", kind.gathered)
        except ValidationError as error:
            return _without_cure(error.errors()[0]["msg"].removeprefix("Value error, "))
        except ValueError as error:
            return _without_cure(str(error))
        return None

    def _check(self, engine: EngineSettings, kind: Kind, images: bool) -> None:
        format = "plain" if engine.weight_format == "auto" else engine.weight_format
        spec = shard_spec(self._specs[kind], 0, engine.tensor_parallel, engine.attention_split)
        check_format(spec, format)
        if (spec, format) not in self._models:
            group = TensorGroup(0, engine.tensor_parallel, _META)
            self._models[spec, format] = Decoder(spec, torch.bfloat16, _META, format, group)
        model = self._models[spec, format]
        check_model(engine.model_copy(update={"deterministic": False}), model)  # the device of an outline is no GPU
        kv_dtype(engine, model, DeviceTarget("cuda", (9, 0)))
        kept_routing(engine, model)
        if engine.deterministic:
            if (why := obstacle(model)) is not None:
                raise ValueError(f"deterministic needs the fused kernels, and {why}: leave it out")
            check_deterministic(spec)
        if images and not any(_alike(spec, whole) for whole in _seeing()):
            raise ValueError("no family with a vision tower has such layers: leave images out")


def _without_cure(message: str) -> str:
    """An error without what to change, and without the name of the model that was asked."""
    general = re.sub(r"(this )?\w+ForCausalLM( of this checkpoint)?", "the model", message)
    return re.sub(r"(: (set|use|leave|raise)|; or set) .*$", "", general)


def _spec(kind: Kind) -> ModelSpec:
    family = FAMILIES[kind.architecture]
    heads: dict[str, Any] = {} if family.latent else {"head_dim": 128}
    config = CONFIG_MAPPING[family.read_as or family.model_type](**heads, **kind.config)
    if getattr(config, "rope_parameters", None) is None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    return spec_from_config(config, kind.architecture)


def _seeing() -> list[ModelSpec]:
    """The language models of the families whose vision towers are served."""
    found = []
    for name, whole in MULTIMODAL.items():
        for entry in whole.language_models if whole.tower is not None else ():
            architecture, family = (entry, FAMILIES[entry]) if isinstance(entry, str) else (name, entry)
            heads: dict[str, Any] = {"head_dim": 128}
            config = CONFIG_MAPPING[family.read_as or family.model_type](**heads)
            found.append(spec_from_config(config, architecture))
    return found


def _alike(spec: ModelSpec, other: ModelSpec) -> bool:
    """Whether two models have the same kinds of blocks."""
    return _blocks(spec) <= _blocks(other)


def _blocks(spec: ModelSpec) -> set[type]:
    return {type(block) for layer in spec.layers for block in (layer.mixer, layer.feed_forward) if block is not None}


def together_page() -> str:
    """The text of the page."""
    refusals = Refusals()
    reasons: dict[str, int] = {}
    always: list[str] = []
    rows = []
    for feature in FEATURES:
        found = [refusals.reason(kind, feature) for kind in KINDS]
        if not any(found):
            always.append(feature.title)
            continue
        cells = ["yes" if why is None else str(reasons.setdefault(why, len(reasons) + 1)) for why in found]
        rows.append((feature.title, *cells))
    lines = [_INTRODUCTION, *table(("", *(kind.title for kind in KINDS)), rows)]
    lines += ["", f"All models: {', '.join(always)}.", ""]
    lines += [f"{number}. {why}" for why, number in reasons.items()]
    pairs: dict[str, None] = {}
    for one, other in combinations(FEATURES, 2):
        for kind in KINDS[:2]:
            alone = refusals.reason(kind, one), refusals.reason(kind, other)
            why = refusals.reason(kind, one, other)
            if alone == (None, None) and why is not None:
                pairs[why] = None
                break
    lines += ["", "Features that exclude each other:", "", *(f"- {why}" for why in pairs)]
    return "\n".join(lines) + "\n"
