"""Tiny models with random weights and tokenizers, for trainers of other projects, and the log-probs of such a model.

Imports nothing of `scripts`: verl installs a package of that name.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.tokenizer_folder import make_tokenizer_folder

CHECKPOINT = Path(__file__).parents[3] / "rollout" / "demo" / "checkpoints" / "ones"
VOCAB, EOS = 16, 1
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "torch_dtype": "float32",
    "initializer_range": 0.2,
}


def make_checkpoint(folder: Path, seed: int) -> Path:
    """A model with the demo's tokenizer of digits, space, colon and line end."""
    folder.mkdir(parents=True)
    _save_model(folder, seed, vocab_size=VOCAB, eos_token_id=EOS, pad_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder / name)
    return folder


def make_chat_checkpoint(folder: Path, seed: int, template: str, markers: Sequence[str] = ()) -> Path:
    """A model with a chat template and a byte-level tokenizer, in which the template's words are single tokens.

    A model that spells such a word draws other tokens than the tokenizer makes of the text.
    """
    folder.mkdir(parents=True)
    make_tokenizer_folder(folder, template, [template, "tool_call name add arguments"] * 4, 600, markers)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|im_start|>")
    tokenizer.save_pretrained(folder)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    _save_model(folder, seed, vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=pad)
    return folder


@torch.no_grad()
def logprobs_of(model: Any, prompt_ids: list[int], completion_ids: list[int]) -> torch.Tensor:
    """Log-softmax of the logits at the tokens of a completion, as transformers' model has it [tokens]."""
    ids = torch.tensor([prompt_ids + completion_ids])
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


def _save_model(folder: Path, seed: int, **shape: Any) -> None:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SHAPE, **shape})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
