"""A tiny model that thinks some tokens and then calls a tool, for the clients of chats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint
from trainer_bridge.client.blocking import RolloutClient

_HERMES = (Path(__file__).parent / "hermes.jinja").read_text()
_OPENING = "<|im_start|>assistant\\n"
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9][0-9]{0,3}, "b": [0-9]\}\}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SEED, MOST = 5, 300


@dataclass(frozen=True, slots=True)
class ThinkingModel:
    """Its folder, and the id of the token that ends its thoughts."""

    folder: Path
    ends_thoughts: int

    @classmethod
    def make(cls, folder: Path) -> ThinkingModel:
        """A model whose prompts open thoughts, and whose template leaves earlier thoughts out."""
        assert _HERMES.count(_OPENING) == 1
        template = _HERMES.replace(_OPENING, _OPENING + "<think>\\n")
        made = make_chat_checkpoint(folder, 3, template, ["<think>", "</think>"])
        return cls(made, AutoTokenizer.from_pretrained(made).convert_tokens_to_ids("</think>"))

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of HTTP with which it calls the tool `add` after some thoughts."""
        bias = {str(self.ends_thoughts): 6.0}
        return {"structured_outputs": {"regex": CALL}, "seed": SEED, "logit_bias": bias}

    def check(self, direct: RolloutClient, found: dict[str, Any]) -> list[list[int]]:
        """Compare a trajectory with what the worker itself draws for its prompts; the drawn tokens of all turns."""
        drawn = []
        for turn in found["turns"]:
            branch, start, end = found["branches"][turn["branch"]], turn["start"], turn["end"]
            (again,) = direct.generate(
                branch["token_ids"][:start],
                constraint={"regex": CALL, "after": "</think>"},
                logit_bias={str(self.ends_thoughts): 6.0},
                seed=SEED,
                temperature=1.0,
                max_tokens=MOST,
            ).completions
            assert branch["token_ids"][start:end] == again.token_ids.tolist()
            assert branch["mask"][start:end] == [1] * (end - start)
            truth = again.logprobs if again.drawn_logprobs is None else again.drawn_logprobs
            assert np.allclose(branch["logprobs"][start:end], truth, atol=1e-3)
            drawn.append(branch["token_ids"][start:end])
        return drawn
