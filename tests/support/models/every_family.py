"""A tiny random checkpoint of every architecture that runs natively, by one name each."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.models import families, hybrids, latent, multimodal, variants

#: From a folder, a seed, and for most families other sizes, to transformers' model, whose checkpoint is in the folder
#: then.
Make = Callable[..., Any]


def make_mimo(folder: Path, seed: int, **sizes: Any) -> Any:
    """Qwen2 under another name: transformers has no MiMo."""
    model = families.make_checkpoint("Qwen2", folder, seed, **{**variants.SIZES, **sizes}, use_sliding_window=False)
    _rename(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    return model


def _make_kimi(folder: Path, seed: int) -> Any:
    """DeepSeek-V3 under another model type, with more experts than a byte can number."""
    sizes = {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 6}
    model = latent.make_latent("DeepseekV3", folder, seed, **sizes)
    _rename(folder, model_type="kimi_k2")
    return model


def _make_ling(folder: Path, seed: int, **sizes: Any) -> Any:
    """Ling 3 under the architecture that published files name."""
    model = hybrids.make_hybrid("BailingHybrid unbounded", folder, seed, **sizes)
    _rename(folder, architectures=["BailingMoeV3ForCausalLM"])
    return model


def _rename(folder: Path, **names: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | names))


#: Two configs of one architecture have its name and a word.
EVERY_FAMILY: dict[str, Make] = {
    **{name: partial(families.make_checkpoint, name) for name in families.FAMILIES},
    **{stem: partial(variants.make_variant, stem) for stem in variants.CONFIGS},
    **{stem: partial(hybrids.make_hybrid, stem) for stem in hybrids.HYBRIDS},
    **{name: partial(latent.make_latent, name) for name in latent.LATENT},
    **{f"images: {name}": partial(multimodal.make_multimodal, name) for name in multimodal.MODELS},
    "MiMo": make_mimo,
    "Kimi-K2": _make_kimi,
    "BailingHybrid unbounded": _make_ling,
}
