"""The teacher of TRL's GOLD and GKD trainers on a worker, in place of a model in the trainer's process.

    teacher = WorkerTeacher("Qwen/Qwen3-8B", worker.endpoints)
    GOLDTrainer(STUDENT, teacher, args, dataset)

These trainers call the teacher as a model, and read the logits of the whole vocabulary. A worker returns the log-probs
of up to 256 likeliest tokens of a position, and of the text's own token. They are exact. The rest of the probability is
spread evenly over all other tokens, so each row of the answer is a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from transformers import AutoConfig
from transformers.modeling_outputs import CausalLMOutput

from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.integrations.trl import check_ended

if TYPE_CHECKING:
    from trainer_bridge.wire.keys import ClientCurve

#: Most likeliest tokens of a position that a worker tells.
MOST_TOKENS = 256


class WorkerTeacher(torch.nn.Module):
    """A causal model without weights here: its logits are the log-probs of a worker. Close it after the training.

    `model` is the teacher's folder or name, for its config and tokenizer. `top` likeliest tokens of each position are
    exact. Each rank makes one. A text may have at most one token less than the worker's context.
    """

    def __init__(
        self, model: str, endpoints: str | Sequence[str], *, top: int = MOST_TOKENS, curve: ClientCurve | None = None
    ) -> None:
        super().__init__()
        self.config = AutoConfig.from_pretrained(model)
        vocab = self.config.get_text_config().vocab_size
        self._top, self._width = min(top, vocab), vocab
        self._client = RolloutClient(endpoints, resume=True, curve=curve)

    def resize_token_embeddings(self, tokens: int) -> None:
        """Have logits of this many tokens, as the student has. Tokens that the teacher lacks are least likely."""
        self._width = tokens

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutput:
        """Logits [texts, tokens, vocabulary] in float32; zeros where the mask is 0. Raises `RolloutError`."""
        held = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        held_BT = held.bool()
        texts = [ids[kept].tolist() for ids, kept in zip(input_ids, held_BT, strict=True)]
        # The scores of a token stand at the token before it, so one more token scores the last one's successor.
        prompts = [[*text, text[-1]] for text in texts if text]
        results = self._client.generate_many(prompts, max_tokens=0, prompt_top_logprobs=self._top)
        check_ended([item for result in results for item in result.completions])
        logits_BTV = torch.zeros((*input_ids.shape, self._width), device=input_ids.device)
        if results:
            rows = [self._distributions(prompt, result) for prompt, result in zip(prompts, results, strict=True)]
            logits_BTV[held_BT] = torch.cat(rows).to(input_ids.device)
        return CausalLMOutput(logits=logits_BTV)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _distributions(self, prompt: list[int], result: GenerateResult) -> torch.Tensor:
        """Log-probs after each token of a prompt but the last, [tokens, vocabulary]."""
        tops, own = result.prompt_tops, result.prompt_logprobs
        assert tops is not None and own is not None, "they were asked for"
        ids_NK = torch.cat([torch.tensor(prompt)[1:, None], torch.from_numpy(tops.ids[1:].copy()).long()], 1)
        known_NK = torch.cat([torch.from_numpy(own[1:, None].copy()), torch.from_numpy(tops.logprobs[1:].copy())], 1)
        width = max(self._width, self.config.get_text_config().vocab_size)
        rows_NV = torch.full((len(ids_NK), width), -torch.inf).scatter_(1, ids_NK, known_NK)
        unknown_NV = rows_NV.isneginf()
        rest_N1 = (1 - rows_NV.exp().sum(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
        rest_N1 = rest_N1.log() - unknown_NV.sum(1, keepdim=True).clamp(min=1).log()
        return torch.where(unknown_NV, rest_N1, rows_NV)[:, : self._width]
