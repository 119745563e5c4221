"""The experts that tokens took, against those that transformers' router chooses."""

import numpy as np
import torch

from tests.support.engine.harness import Bench


def router_logits(hf_model, tokens: list[int]) -> torch.Tensor:
    """[positions, sparse layers, experts] of all tokens but the last, which no forward consumes."""
    with torch.inference_mode():
        out = hf_model(torch.tensor([tokens[:-1]]), output_router_logits=True)
    return torch.stack([layer.view(-1, layer.shape[-1]) for layer in out.router_logits], dim=1)


def assert_routed(hf_model, prompt: list[int], tokens: list[int], routing: np.ndarray, first: int) -> None:
    """Entry i is what transformers' router chooses for token `first` + i, likeliest first."""
    logits = router_logits(hf_model, prompt + tokens)[first:]
    top = logits.topk(routing.shape[2], dim=-1)
    assert routing.dtype == np.uint8 and routing.shape == tuple(top.indices.shape)
    told = torch.from_numpy(routing.astype(np.int64))
    # Rounding turns a near tie; another expert than that would have quite another logit.
    assert torch.allclose(logits.gather(-1, told), top.values, atol=1e-4, rtol=0)
    assert (told == top.indices).float().mean() > 0.995


def routing_of(bench: Bench, name: str, index: int = 0) -> np.ndarray:
    return np.concatenate(bench.completions[name, index].routing)
