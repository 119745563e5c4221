"""Prompt log-probs, ranks and likeliest tokens beside those of transformers."""

from __future__ import annotations

import numpy as np
import torch


def log_softmax_after(hf_model, tokens: list[int]) -> torch.Tensor:
    """[tokens, V]: row i belongs to the token that follows token i."""
    with torch.inference_mode():
        return hf_model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_prompt(values: np.ndarray, prompt: list[int], hf_model) -> None:
    expected_NV = log_softmax_after(hf_model, prompt)[:-1]
    expected = expected_NV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert values.dtype == np.float32 and len(values) == len(prompt) and np.isnan(values[0])
    assert torch.allclose(torch.tensor(values[1:]), expected, atol=1e-4)


def check_prompt_tops(tops, prompt: list[int], k: int, hf_model) -> None:
    expected_NV = log_softmax_after(hf_model, prompt)[:-1]
    assert (tops.ranks.dtype, tops.ids.dtype, tops.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert tops.ranks.shape == (len(prompt),) and tops.ids.shape == tops.logprobs.shape == (len(prompt), k)
    assert tops.ranks[0] == 0 and (tops.ids[0] == -1).all() and np.isnan(tops.logprobs[0]).all()
    chosen_N1 = expected_NV.gather(1, torch.tensor(prompt[1:])[:, None])
    surely, perhaps = ((expected_NV > chosen_N1 + margin).sum(1) + 1 for margin in (1e-4, -1e-4))
    ranks = torch.tensor(tops.ranks[1:])
    assert (surely <= ranks).all() and (ranks <= perhaps).all(), "1 plus the number of likelier tokens"
    mine = torch.tensor(tops.logprobs[1:])
    assert torch.allclose(mine, expected_NV.topk(k).values, atol=1e-4), "the k largest, largest first"
    assert torch.allclose(mine, expected_NV.gather(1, torch.tensor(tops.ids[1:]).long()), atol=1e-4)
