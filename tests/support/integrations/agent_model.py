"""A model that works with an agent's tools: it thinks, calls them, and ends once it has seen enough results.

Its weights are written, not trained: the next token depends on the token before alone. Thoughts and numbers are drawn,
so no two runs are equal. Each prompt ends with a token that says how many results the conversation has:

    <turn0> thoughts  "</think>\\n<tool_call>\\n ... echo " digits ' ..."}}\\n</tool_call>' <|im_end|>
    <turn1> ...
    <turn2> ...       the same call, or another one
    <turn3> thoughts  "</think>\\nI am done." <|im_end|>

The template leaves the thoughts of earlier turns out: only kept tokens can be right.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.integrations.tiny_checkpoints import SHAPE
from tests.support.tokenizer_folder import make_tokenizer_folder

_HERMES = (Path(__file__).parent / "hermes.jinja").read_text()
_OPENING = "{{ '<|im_start|>assistant\\n' }}"
_COUNTING = (
    "{%- set seen = namespace(results=0) %}"
    "{%- for message in messages %}{% if message.role == 'tool' %}{% set seen.results = seen.results + 1 %}{% endif %}"
    "{%- endfor %}{{ '<|im_start|>assistant\\n<think>\\n<turn' ~ [seen.results, TURNS] | min ~ '>' }}"
)
_THOUGHTS = 4
_WANTED = 40.0  # the logit of a token that may follow; that of all others is 0


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call of a tool, whose argument has some digits between the texts `before` and `after`."""

    tool: str
    argument: str
    before: str
    after: str = ""


def make_agent_model(folder: Path, calls: Sequence[AgentCall], context: int) -> Path:
    """A checkpoint that makes these calls, one after each result of a tool, and then ends its work."""
    folder.mkdir(parents=True)
    template = _HERMES.replace(_OPENING, _COUNTING.replace("TURNS", str(len(calls))))
    assert template != _HERMES
    follows = _chain(calls)
    markers = list(dict.fromkeys(token for each in follows.items() for token in (each[0], *each[1])))
    markers = ["<think>", "</think>", *(name for name in markers if name != "<|im_end|>")]
    make_tokenizer_folder(folder, template, [template], 600, markers)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|im_start|>")
    tokenizer.save_pretrained(folder)
    _save(folder, tokenizer, follows, context)
    return folder


def _chain(calls: Sequence[AgentCall]) -> dict[str, list[str]]:
    """The tokens that may follow each token, all equally likely."""
    follows: dict[str, list[str]] = {}
    for turn in range(len(calls) + 1):
        thoughts = [f" thought {turn}{letter}" for letter in "abcd"[:_THOUGHTS]]
        ends = "</think>\nI am done."
        if turn < len(calls):
            call = calls[turn]
            before, after = json.dumps(call.before)[:-1], json.dumps(call.after)[1:]
            ends = f'</think>\n<tool_call>\n{{"name": "{call.tool}", "arguments": {{"{call.argument}": {before}'
            digits, closing = [f"{turn}{digit}" for digit in range(10)], f"{after}}}}}\n</tool_call>"
            follows |= dict.fromkeys([ends], digits) | dict.fromkeys(digits, [*digits, closing])
            follows[closing] = ["<|im_end|>"]
        else:
            follows[ends] = ["<|im_end|>"]
        follows |= {f"<turn{turn}>": thoughts} | dict.fromkeys(thoughts, [*thoughts, ends])
    return follows


def _save(folder: Path, tokenizer: Any, follows: Mapping[str, Sequence[str]], context: int) -> None:
    hidden = 64 * -(-(len(follows) + 1) // 64)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": context,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SHAPE, **shape}), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings.zero_()
        embeddings[:, 0] = 1  # all other tokens
        head.zero_()
        head[tokenizer.eos_token_id, 0] = _WANTED / hidden**0.5
        for state, (token, successors) in enumerate(follows.items(), start=1):
            embeddings[tokenizer.convert_tokens_to_ids(token)] = torch.eye(hidden)[state]
            head[tokenizer.convert_tokens_to_ids(list(successors)), state] = _WANTED / hidden**0.5
    model.save_pretrained(folder)
