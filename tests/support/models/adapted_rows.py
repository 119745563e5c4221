"""Steps of rows that use different adapters, and the logits that merged models have after the same tokens."""

from typing import Any

import torch

from rollout.models import Decoder
from rollout.models.lora_slots import AdapterSlots
from tests.support.models.paged import PagedRunner

PROMPT = [7, 30, 11, 52, 9, 4, 67, 18, 23]


def logits_of(model: Decoder, forward: Any, slots: AdapterSlots, adapter_of: list[int]) -> list[torch.Tensor]:
    """Logits of each row: a prompt in two chunks and two more tokens, all rows in the same steps."""
    runner = PagedRunner(model, rows=len(adapter_of), max_tokens=16, forward=forward)
    runner.adapters, runner.adapter_of = slots, adapter_of
    rows = range(len(adapter_of))
    first = runner.prefill({row: PROMPT[: 5 + row % 3] for row in rows})
    rest = runner.prefill({row: PROMPT[5 + row % 3 :] for row in rows})
    ends = [runner.decode({row: token for row in rows}, padding=2) for token in (3, 4)]
    return [torch.cat([first[row], rest[row], *(end[row][None] for end in ends)]) for row in rows]


def exact_logits(reference: Any) -> torch.Tensor:
    """The logits of a transformers model after the same tokens."""
    with torch.no_grad():
        return reference(torch.tensor([[*PROMPT, 3, 4]])).logits[0].float()
