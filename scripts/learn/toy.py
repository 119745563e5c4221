"""A tiny model with random weights for the task `counting`, with a tokenizer: it runs anywhere in seconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from scripts.bench.shapes import model_config
from scripts.learn.tasks import COLON, EOS, NUMBERS

_OWN = {"eos_token_id": EOS, "bos_token_id": None, "torch_dtype": "float32", "initializer_range": 0.05}


def make_model(folder: Path, seed: int) -> Path:
    """Save a model of two million parameters or fewer; the same one for the same seed."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**model_config("toy") | _OWN | {"vocab_size": NUMBERS + 2})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = {"<end>": EOS, ":": COLON, **{str(number): number + 2 for number in range(NUMBERS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    return folder
