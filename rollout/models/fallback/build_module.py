"""Makes a module of transformers without weights from a config, or refuses the model.

The class comes from transformers' own table of causal LMs. Code of a checkpoint is never run.
"""

import copy
import re
from contextlib import nullcontext
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.initialization import no_init_weights

from rollout.models.fallback.experts import EXPERTS
from rollout.models.longrope import first_border

#: The longest context of a model that names none.
_NO_LIMIT = 1 << 17
#: Limits of activations, a number for each layer, of published configs, which transformers' code does not read.
_UNREAD = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def module_class(config: Any, architecture: str) -> Any:
    """The class of a causal LM. Raises ValueError that says why it cannot be served."""

    def refusal(why: str) -> ValueError:
        return ValueError(f"architecture {architecture!r:.80} cannot be served through transformers' code: {why}")

    cls = _causal_lm(config)
    if cls is None and (own := _causal_lm(config.get_text_config())) is not None:
        raise refusal(
            f"it is more than a language model; save its language model alone, as {own.__name__}, with text_config as "
            "config"
        )
    if cls is None or cls.__name__ != architecture:
        known = "no causal LM" if cls is None else f"another causal LM, {cls.__name__},"
        raise refusal(f"transformers has {known} for model_type {config.model_type!r:.80}")
    if unread := [name for name in _UNREAD if any(getattr(config, name, None) or ())]:
        raise refusal(f"it leaves out {unread[0]}, so log-probs would be wrong")
    if getattr(config, "is_encoder_decoder", False):
        raise refusal("it has an encoder")
    if getattr(config, "quantization_config", None) is not None:
        raise refusal("its checkpoint is quantized; use a checkpoint with float32, bfloat16 or float16 weights")
    return cls


def _causal_lm(config: Any) -> Any | None:
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return next((cls for cls in (found if isinstance(found, tuple) else (found,)) if cls is not None), None)


def make_module(cls: Any, config: Any, dtype: torch.dtype, device: torch.device, random_seed: int | None = None) -> Any:
    """A module with eager attention and our experts. Its parameters are uninitialised without `random_seed`.

    With a seed they have transformers' own initial values.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(text, name, False):
            setattr(text, name, False)
    seeded = nullcontext() if random_seed is None else torch.random.fork_rng(_generators(device))
    with seeded, nullcontext() if random_seed is not None else no_init_weights(), torch.device(device):
        if random_seed is not None:
            torch.manual_seed(random_seed)
        module = cls._from_config(config, dtype=dtype, attn_implementation="eager")
    module.tie_weights()
    if cls._can_set_experts_implementation():
        module.set_experts_implementation(EXPERTS)
    _keep_in_float32(module, dtype)
    return module.requires_grad_(False).eval()


def max_positions(config: Any) -> int:
    """The longest context of a model; 128K tokens if its config names no length, such as configs of models with states
    only.
    """
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    most = next((value for value in named if type(value) is int and value >= 2), _NO_LIMIT)
    return min(most, first_border(text) or most)


def _keep_in_float32(module: Any, dtype: torch.dtype) -> None:
    """Modules that transformers keeps in float32 when the rest has 16 bits."""
    if dtype == torch.float32:
        return
    globs = [*module._keep_in_fp32_modules_strict, *(module._keep_in_fp32_modules if dtype == torch.float16 else ())]
    patterns = [re.compile(rf"(^|\.){re.escape(glob).replace(re.escape('*'), '[^.]*')}(\.|$)") for glob in globs]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def _generators(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
