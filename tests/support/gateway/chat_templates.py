"""Chat templates in the forms of model families, and a tokenizer for each.

Most are the templates that TRL has of published models. Of families that it lacks, a template of our own writes what
theirs write around questions, answers, calls and results.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TRL = Path(trl.__file__).parent / "chat_templates"
_OURS = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Family:
    """A family: the name of its template, and what is to be found for it."""

    template: str
    tools: str | None
    reasoning: str | None
    ends: tuple[str, str]  # the tokens with which the model ends an answer, and a call
    more: tuple[str, ...] = ()  # special tokens that the template does not write

    def source(self) -> str:
        """The template."""
        folder, _, name = self.template.rpartition("/")
        return ((_OURS if folder else _TRL) / name).read_text().strip()


_IM = ("<|im_end|>", "<|im_end|>")
_EOS = ("</s>", "</s>")
FAMILIES = {
    "qwen2.5": Family("qwen2_5.jinja", "hermes", None, _IM),
    "qwen3": Family("qwen3.jinja", "hermes", "think", _IM),
    "qwen3-instruct": Family("qwen3_instruct_2507.jinja", "hermes", None, _IM),
    "qwen3.5": Family("qwen3_5_think.jinja", "qwen3_coder", "think", _IM),
    "qwen3.5-nothink": Family("qwen3_5_nothink.jinja", "qwen3_coder", "think", _IM),
    "qwen3.8": Family("qwen3_8.jinja", "qwen3_coder", "think", _IM),
    "nemotron-3": Family("nemotron_3_nano.jinja", "qwen3_coder", "think", _IM),
    "llama-3.1": Family("llama3_1.jinja", "llama3", None, ("<|eot_id|>", "<|eot_id|>")),
    "llama-3.2": Family("llama3_2.jinja", "llama3", None, ("<|eot_id|>", "<|eot_id|>")),
    "glm-4.5": Family("glm4moe.jinja", "glm45", "think", ("<|user|>", "<|observation|>")),
    "deepseek-v3": Family("deepseekv3.jinja", "deepseek_v3", "think", ("<｜end▁of▁sentence｜>",) * 2),
    "deepseek-v3.1": Family("ours/deepseek_v31.jinja", "deepseek_v31", "think", ("<｜end▁of▁sentence｜>",) * 2),
    "deepseek-r1-distill": Family("deepseek_r1_distill.jinja", None, "think", ("<｜end▁of▁sentence｜>",) * 2),
    "gpt-oss": Family("gptoss.jinja", "gpt_oss", "gpt_oss", ("<|return|>", "<|call|>"), ("<|constrain|>",)),
    "gemma-3": Family("gemma3.jinja", None, None, ("<end_of_turn>",) * 2),
    "gemma-3-pythonic": Family("ours/gemma3_pythonic.jinja", "pythonic", None, ("<end_of_turn>",) * 2),
    "gemma-4": Family("gemma4_v5.jinja", "gemma4", "gemma4", ("<turn|>", "<|tool_response>")),
    "phi-3.5": Family("phi3_5.jinja", None, None, ("<|end|>",) * 2),
    "phi-4-mini": Family("ours/phi4_mini.jinja", "phi4_mini", None, ("<|end|>",) * 2),
    "kimi-k2": Family("ours/kimi_k2.jinja", "kimi_k2", "think", _IM, ("<|im_user|>", "<|im_system|>")),
    "minimax-m2": Family("ours/minimax_m2.jinja", "minimax_m2", "think", ("[e~[",) * 2),
    "mistral": Family("ours/mistral.jinja", "mistral", "mistral", _EOS),
    "mistral-7b": Family("ours/mistral_json.jinja", "mistral_json", None, _EOS),
    "cohere": Family("cohere2.jinja", None, None, ("<|END_OF_TURN_TOKEN|>",) * 2),
}

_SPECIAL = re.compile(
    r"<\|[\w|▁]+\|>|<\|/\w+\|>|<｜[^<>]+?｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|<\|\"\|>"
    r"|\[/?[A-Z_]{3,}\]|\]~b\]|\]~!b\[|\[e~\[|<\|endoftext\|>|\[gMASK\]|<sop>"
)
#: Marks that tokenizers have as tokens, but do not leave out of texts.
_PLAIN = tuple(
    f"<{end}{name}>"
    for name in ("think", "tool_call", "tool_response", "minimax:tool_call", "arg_key", "arg_value")
    for end in ("", "/")
)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the special tokens that the template of a family writes."""
    return tokenizer_with(name, "")


def tokenizer_with(name: str, source: str) -> PreTrainedTokenizerFast:
    """The same, with the special tokens that another source names, too."""
    family = FAMILIES[name]
    text = family.source() + source
    marks = {*_SPECIAL.findall(text), *family.ends, *family.more, "<s>", "</s>"}
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: place for place, each in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(marks))
    tokenizer.add_tokens([mark for mark in _PLAIN if mark in text])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = family.source()
    return fast


def families_with(part: str) -> Iterator[str]:
    """The names of families with `tools` or `reasoning`."""
    return (name for name, family in FAMILIES.items() if getattr(family, part) is not None)
