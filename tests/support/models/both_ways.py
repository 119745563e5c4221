"""A checkpoint folder loaded by the worker and by transformers, and random changes of its config.json."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from rollout.config import ModelSettings
from rollout.models import load_model
from tests.support.models import images
from tests.support.models.every_family import EVERY_FAMILY
from tests.support.models.hybrids import limit_activations
from tests.support.models.paged import PagedRunner

CPU = torch.device("cpu")
#: Longer than the windows of the tiny models.
IDS = [random.Random(i).randrange(60) for i in range(24)]
TOLERANCE = 1e-3
Outcome = Literal["equal", "differ", "refused", "transformers fails"]


#: Names of tiny models: of language models, and of models of text and images.
NAMES = (*(name for name in EVERY_FAMILY if name != "Kimi-K2"), *images.MODELS)


def make(name: str, folder: Path) -> None:
    """Save the tiny model of one of `NAMES`, as transformers' own class runs it."""
    if name in EVERY_FAMILY:
        EVERY_FAMILY[name](folder, 0)
    else:
        images.make_model(name, folder)
    if name == "GptOss":
        edit(folder, lambda content: content.update(swiglu_limit=7.0))  # which is a constant of transformers 5.17


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change config.json in place."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    """What the worker computes after each of `IDS`, in float32. Raises ValueError for a folder that it refuses."""
    loaded = load_model(ModelSettings(path=str(folder), **settings), CPU)
    ids = IDS[: loaded.spec.max_positions]
    return PagedRunner(loaded.model, rows=1, max_tokens=len(ids)).prefill({0: ids})[0]


class TransformersFailsError(Exception):
    """transformers' own code cannot load or run a folder."""


@contextmanager
def _run_by_transformers() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # it fails in many ways
        raise TransformersFailsError(str(error)) from error


def transformers_logits(folder: Path, count: int = len(IDS)) -> torch.Tensor:
    """The same by transformers' `from_pretrained`, after each of the first `count` tokens."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    for published, stem in (("MiMo", "Qwen2"), ("BailingMoeV3", "BailingHybrid")):
        architecture = architecture.replace(published, stem)  # transformers has no class of the first name
    cls = getattr(transformers, architecture)
    transformers.logging.disable_progress_bar()
    with _run_by_transformers():
        model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    limit_activations(model)
    if cls._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product refuses some widths
    with _run_by_transformers(), torch.no_grad():
        return model(torch.tensor([IDS[:count]])).logits[0].float()


def compare(folder: Path, reference: Callable[..., torch.Tensor] = transformers_logits) -> Outcome:
    """Load a folder both ways; `reference` gives transformers' logits. Only a ValueError counts as a refusal."""
    try:
        ours = logits(folder, model_impl="native")
    except ValueError:
        return "refused"
    try:
        theirs = reference(folder, len(ours))
    except TransformersFailsError:
        return "transformers fails"
    return "equal" if float((ours - theirs).abs().max()) < TOLERANCE else "differ"


def older(text: dict[str, Any]) -> None:
    """The keys of releases of transformers before 5, in place."""
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and rope and not any(isinstance(value, dict) for value in rope.values()):
        del text["rope_parameters"]
        rope = dict(rope)
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                text[name] = rope.pop(name)
        kind = rope.pop("rope_type", "default")
        if rope or kind != "default":
            text["rope_scaling"] = rope | {"type": kind}
    if "dtype" in text:
        text["torch_dtype"] = text.pop("dtype")


#: Keys that other families read, that shared code of transformers reads, or that nobody does; two values each.
_KEYS: dict[str, tuple[Any, Any]] = {
    "original_max_position_embeddings": (16, 64), "rope_theta": (300.0, 5e5), "partial_rotary_factor": (0.5, 1.0),
    "head_dim": (16, None), "num_key_value_heads": (None, 1), "max_position_embeddings": (64, 4096),
    "sliding_window": (5, None), "use_sliding_window": (True, False), "max_window_layers": (1, 0),
    "layer_types": (["sliding_attention"] * 3, None), "sliding_window_pattern": (2, 3),
    "attention_chunk_size": (4, None),
    "attention_bias": (True, False), "mlp_bias": (True, False), "qkv_bias": (True, False),
    "hidden_act": ("gelu", "swish"), "hidden_activation": ("gelu_pytorch_tanh", None),
    "rms_norm_eps": (0.1, 1e-5), "norm_eps": (0.1, None), "layer_norm_eps": (0.1, 1e-5),
    "tie_word_embeddings": (True, False), "is_causal": (False, True), "is_decoder": (False, True),
    "use_bidirectional_attention": (True, False), "per_layer_config": ({"0": {"rms_norm_eps": 0.3}}, {}),
    "attention_multiplier": (0.3, None), "logits_scaling": (3.0, 1.0), "embedding_multiplier": (2.0, 1.0),
    "residual_multiplier": (0.3, 1.0), "final_logit_softcapping": (2.0, None), "attn_logit_softcapping": (2.0, None),
    "query_pre_attn_scalar": (3, None), "num_local_experts": (4, None), "n_routed_experts": (4, None),
    "num_experts": (4, None), "num_experts_per_tok": (1, 2), "norm_topk_prob": (True, False),
    "scoring_func": ("softmax", "sigmoid"), "topk_method": ("greedy", "noaux_tc"), "routed_scaling_factor": (3.0, 1.0),
    "route_scale": (3.0, None), "pretraining_tp": (2, 1), "num_kv_shared_layers": (1, 0), "use_qk_norm": (True, False),
    "clip_qkv": (0.5, None), "swiglu_limit": (7.0, None), "no_rope_layers": ([0, 1, 0], None),
    "attn_output_gate": (False, True), "rope_interleave": (False, True), "mlp_only_layers": ([0], []),
    "decoder_sparse_step": (2, 1), "first_k_dense_replace": (0, 2), "moe_layer_freq": (2, 1),
    "torch_dtype": ("bfloat16", "float32"), "linear_allow_neg_eigval": (True, False), "foo": (1, None),
}  # fmt: skip
#: Values of a wrong type: a float for an integer, a string for a number, a number for a flag.
_WRONG: tuple[Any, ...] = (8.0, "16", 1, True, [], {}, -1)
_SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, "beta_fast": 16, "truncate": False},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"type": "yarn", "rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0], "long_factor": [1.0, 2.0, 3.0]},
)


def _language_model(content: dict[str, Any]) -> dict[str, Any]:
    return content.get("text_config") or content


def change_at_random(content: dict[str, Any], rng: random.Random) -> str:
    """Change one thing of a config, in place; returns what."""
    text = _language_model(content)
    maps = ("rope_parameters", "rope_scaling")
    map_key = next((key for key in maps if isinstance(text.get(key), dict)), "rope_parameters")
    rope = text[map_key] if isinstance(text.get(map_key), dict) else {}
    name = rng.choice([key for key in text if key not in ("model_type", "architectures")])
    match rng.choice(
        ["delete", "null", "wrong", "set", "set", "older", "rope", "scaling", "scaling", "move", "rename"]
    ):
        case "delete":
            del text[name]
            return f"delete {name}"
        case "null":
            text[name] = None
            return f"null {name}"
        case "wrong":
            text[name] = rng.choice(_WRONG)
            return f"{name} = {text[name]!r}"
        case "set":
            name = rng.choice(list(_KEYS))
            text[name] = rng.choice(_KEYS[name])
            return f"{name} = {text[name]!r}"
        case "older":
            older(text)
            return "older keys"
        case "rope" if rope:
            key = rng.choice(list(rope))
            action = rng.choice(["delete", "null"])
            if action == "delete":
                del rope[key]
            else:
                rope[key] = None
            return f"{action} {map_key}.{key}"
        case "move" if content is not text and rng.random() < 0.8:
            content[name] = text[name] if rng.random() < 0.5 else text.pop(name)
            return f"{name} beside text_config"
        case "rename":
            other = rng.choice([f"_{name}", f"{name}_", *_KEYS])
            text[other] = text.pop(name)
            return f"{name} as {other}"
        case _:
            kept = {key: rope[key] for key in ("partial_rotary_factor", "mrope_section", "rope_theta") if key in rope}
            text.pop(map_key, None)
            scaling = dict(rng.choice(_SCALINGS))
            text[rng.choice(["rope_parameters", "rope_scaling"])] = kept | scaling
            return f"{scaling}"
