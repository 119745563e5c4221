"""What `docs/reference/together.md` says of features and models is so: engines start, or refuse to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.config import ModelSettings
from rollout.models import load_model
from rollout.models.language_model import LanguageModel
from rollout.models.loader import check_cut
from scripts.together_reference import FEATURES, KINDS, Feature, Kind, Refusals
from tests.support.engine.harness import Bench
from tests.support.models import fallback, families, hybrids, latent

KIND = {kind.title: kind for kind in KINDS}
MAKERS: dict[str, Any] = {
    "dense": lambda folder: families.make_checkpoint("qwen3", folder),
    "experts": lambda folder: families.make_checkpoint("qwen3_moe", folder),
    "gated DeltaNet": lambda folder: hybrids.make_hybrid("Qwen3Next", folder),
    "Mamba-2": lambda folder: hybrids.make_hybrid("GraniteMoeHybrid", folder),
    "latent attention": lambda folder: latent.make_latent("DeepseekV3", folder),
    "fallback": lambda folder: fallback.make_checkpoint("Gemma2ForCausalLM", folder),
    "fallback, gathered": lambda folder: fallback.make_checkpoint("StableLmForCausalLM", folder),
}
#: These need several devices, a GPU, a tower, or other widths than tiny models have.
ELSEWHERE = {"several GPUs", "images", "`deterministic`", "fp8 weights"}
ELSEWHERE |= {"`attention_split = rows`", "`attention_split = context`"}
HERE = [feature for feature in FEATURES if feature.title not in ELSEWHERE]
#: Features that change tokens, or exclude another one that is here.
ALONE = {"fp8 KV", "`max_kv_age`"}


@pytest.fixture(scope="module")
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.title)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, LanguageModel, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    MAKERS[request.param.title](folder)
    impl = "native" if request.param.architecture else "transformers"
    settings = ModelSettings(path=str(folder), dtype="float32", model_impl=impl)
    return request.param, load_model(settings, torch.device("cpu")).model, folder


def settings_of(features: list[Feature], folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for feature in features:
        settings |= feature.settings
    if "disk_kv_folder" in settings:
        settings["disk_kv_folder"] = str(folder)
    return {name: 0.001 if name.endswith("_kv_gib") else value for name, value in settings.items()}


def tokens_with(model: LanguageModel, settings: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens of two completions of a prompt, and of a later request with the same prompt."""
    bench = Bench(model, **settings)
    prompt = torch.randint(0, model.spec.vocab, (23,), generator=torch.Generator().manual_seed(7)).tolist()
    for name, n in (("first", 2), ("again", 1)):
        bench.submit(name, prompt, 12, n=n)
        bench.run()
    found = [bench.tokens("first"), bench.tokens("first", 1), bench.tokens("again")]
    bench.close()
    return found


def test_every_feature_is_tried_here_or_named_as_tried_elsewhere() -> None:
    assert set(MAKERS) == set(KIND) and len(HERE) + len(ELSEWHERE) == len(FEATURES)


@pytest.mark.parametrize("feature", HERE, ids=lambda feature: feature.title)
def test_an_engine_starts_or_refuses_as_the_page_says(
    made: tuple[Kind, LanguageModel, Path], feature: Feature, refusals: Refusals, tmp_path: Path
) -> None:
    kind, model, _ = made
    settings = settings_of([feature], tmp_path)
    if refusals.reason(kind, feature) is None:
        assert all(len(tokens) == 12 for tokens in tokens_with(model, settings))
    else:
        with pytest.raises(ValueError):
            tokens_with(model, settings)


def test_all_features_of_a_model_together_change_no_token(
    made: tuple[Kind, LanguageModel, Path], refusals: Refusals, tmp_path: Path
) -> None:
    kind, model, _ = made
    able = [each for each in HERE if each.title not in ALONE and refusals.reason(kind, each) is None]
    assert len(able) >= 4 and refusals.reason(kind, *able) is None
    assert tokens_with(model, settings_of(able, tmp_path)) == tokens_with(model, {})


def test_a_fallback_refuses_images_and_several_gpus(made: tuple[Kind, LanguageModel, Path], refusals: Refusals) -> None:
    kind, _, folder = made
    several, images = (next(each for each in FEATURES if each.title == title) for title in ("several GPUs", "images"))
    refuses = not kind.architecture
    assert (refusals.reason(kind, several) is not None) == refuses
    settings = ModelSettings(path=str(folder), dtype="float32", model_impl="transformers" if refuses else "native")
    if refuses:
        assert refusals.reason(kind, images) is not None
        with pytest.raises(ValueError):
            load_model(settings.model_copy(update={"images": True}), torch.device("cpu"))
        with pytest.raises(ValueError):
            check_cut(settings, folder, 2)
