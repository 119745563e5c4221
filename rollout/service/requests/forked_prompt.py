"""Prompts that are made of an earlier prompt and its completion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollout.engine.messages.prompts import Prompt, PromptItem, TokenIds
from trainer_bridge.wire.errors import BadRequest


def beginning(prompt: Prompt, drawn: np.ndarray, offset: int) -> Prompt:
    """The first `offset` tokens of a prompt and its completion, as a prompt. Raises `BadRequest` within an image."""
    if not prompt.media:
        kept = [prompt.token_ids[:offset], drawn[: max(offset - len(prompt), 0)]]
        return replace(Prompt.of_tokens(np.concatenate(kept)), salt=prompt.salt)
    items: list[PromptItem] = []
    start = 0
    for item in (*prompt.items, *((TokenIds(drawn),) if len(drawn) else ())):
        end = min(start + len(item.token_ids), offset)
        if start >= end:
            break
        if isinstance(item, TokenIds):
            items.append(TokenIds(item.token_ids[: end - start]))
        elif end - start == len(item.token_ids):
            items.append(item)
        else:
            last = start + len(item.token_ids)
            raise BadRequest(
                f"an image has the places {start} to {last - 1}: use at most {start}, or at least {last}",
                field="fork.offset",
            )
        start = end
    return Prompt(tuple(items), salt=prompt.salt)


def joined(prompt: Prompt, more: np.ndarray) -> Prompt:
    """A prompt and further tokens, int32, as one prompt."""
    if not len(more):
        return prompt
    if not prompt.media:
        return replace(Prompt.of_tokens(np.concatenate([prompt.token_ids, more])), salt=prompt.salt)
    return Prompt((*prompt.items, TokenIds(more)), salt=prompt.salt)
