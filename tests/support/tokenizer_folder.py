"""A real tokenizer with a chat template, made in a folder, nothing downloaded."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "stop here END and then go on", "naïve café déjà vu"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}tools:{{ tools | length }}{% endif %}{% if loud %}LOUD{% endif %}"
    "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer_folder(
    folder: Path,
    template: str | None = TEMPLATE,
    corpus: Sequence[str] = CORPUS,
    vocab: int = 300,
    markers: Sequence[str] = (),
) -> Path:
    """A byte-level BPE tokenizer: every text has ids, and characters beyond ASCII take several tokens.

    `markers` are further single tokens that a decoded text keeps, as Qwen3 has for calls and thoughts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
