"""A tiny model with a tokenizer, what it makes of a completion, and attention for TRL's trainer on a CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.shapes import model_config
from trainer_bridge.client.results import Completion

CHECKPOINT = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints" / "ones"
VOCAB, EOS = 16, 1


def make_checkpoint(folder: Path, seed: int) -> Path:
    """A model with random weights, and the demo's tokenizer of digits, space, colon and line end."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    shape = {**model_config("toy"), "vocab_size": VOCAB, "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(**{**shape, "torch_dtype": "float32", "initializer_range": 0.2})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder / name)
    return folder


@torch.no_grad()
def logprobs_of(model: Any, prompt_ids: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    """Log-softmax of logits / temperature at the tokens of a completion, as transformers' model has it [tokens]."""
    ids = torch.tensor([[*prompt_ids, *completion.token_ids.tolist()]])
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


def plain_copy(model: Any, folder: Path) -> Any:
    """A model with the same weights and an attention that needs nothing of TRL's."""
    copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the segments of TRL's packed rows: a stand-in for the kernel that it has for GPUs only.

    A segment's queries are the last ones of its path, whose keys and values `tree_kv_index` lists.
    """
    groups, parts = query.shape[1] // key.shape[1], []
    for segment in range(len(tree_cu_seqlens_q) - 1):
        first, end = tree_cu_seqlens_q[segment : segment + 2].tolist()
        path = tree_kv_index[slice(*tree_cu_seqlens_k[segment : segment + 2].tolist())]
        k, v = (tensor[:, :, path].repeat_interleave(groups, 1) for tensor in (key, value))
        seen = torch.ones(end - first, len(path), dtype=torch.bool).tril(len(path) - (end - first))
        q = query[:, :, first:end]
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2), None
