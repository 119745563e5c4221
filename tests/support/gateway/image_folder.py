"""Adds to a tiny model of text and images: a tokenizer of words, a chat template, an image processor."""

import json
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models.images import IMAGE, VIDEO, VOCAB

EOT, START, END, TURN = 84, 85, 86, 87
_SPECIAL = {"<eot>": EOT, "<start>": START, "<end>": END, "<turn>": TURN, "<image>": IMAGE, "<video>": VIDEO}
_TEMPLATE = (
    "{%- for message in messages -%}<turn>{{ message.role }} "
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<start><image><end>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<eot>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<turn>assistant {%- endif -%}"
)


def add_processor(folder: Path, more: Sequence[str] = ()) -> None:
    """Add the files to a checkpoint of `make_model`; `more` are further special tokens, instead of the last words."""
    special = _SPECIAL | {name: EOT - 1 - i for i, name in enumerate(more)}
    words = {f"w{token}": token for token in range(VOCAB) if token not in special.values()}
    words |= {"user": words.pop("w10"), "assistant": words.pop("w11"), "[UNK]": words.pop("w0")}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _save(folder, tokenizer, list(special), unk_token="[UNK]", pad_token="[UNK]")


def add_processor_of_characters(folder: Path) -> None:
    """The same with a tokenizer that has a token for each character, so that the model can write numbers."""
    characters = string.digits + string.ascii_letters + " \n.,:;!?-+*/=()<>"
    special = {"<none>": 0, "<bos>": 1, "<eos>": 2} | _SPECIAL  # 1 and 2 as in the model's config
    names = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {names.pre_tokenize_str(each)[0][0]: 3 + i for i, each in enumerate(characters)}
    assert max(ids.values()) < EOT
    tokenizer = Tokenizer(models.BPE(ids | special, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = names, decoders.ByteLevel()
    _save(folder, tokenizer, list(special), pad_token="<none>")


def _save(folder: Path, tokenizer: Tokenizer, special: list[str], **tokens: str) -> None:
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eot>", **tokens)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 64, "longest_edge": 4096},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
