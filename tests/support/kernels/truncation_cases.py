"""Logits and limits of rows that are truncated."""

import torch
from rollout_kernels import SamplingRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, OFF = float("inf"), 1 << 20


def limits(top_k: list[int], top_p: list[float], min_p: list[float]) -> SamplingRows:
    """Settings of `len(top_k)` rows, as columns of a row state, so they are not contiguous."""
    count = len(top_k)
    floats = torch.tensor([top_p, min_p], device=DEVICE).T.contiguous()
    ints = torch.tensor([top_k, [7] * count], device=DEVICE).T.contiguous()
    return SamplingRows(
        temperature_S=torch.ones(count, device=DEVICE),
        noise_S=None,
        seed_S=ints[:, 1],
        index_S=ints[:, 1],
        top_k_S=ints[:, 0],
        top_p_S=floats[:, 0],
        min_p_S=floats[:, 1],
    )


def random_limits(count: int, vocab: int, seed: int) -> SamplingRows:
    """Every limit is off in some rows, and combined with each other limit in some rows."""
    generator = torch.Generator().manual_seed(seed)

    def some(values: list) -> list:
        return [values[i] for i in torch.randint(len(values), (count,), generator=generator).tolist()]

    top_k = some([1, 2, 5, 50, 300, vocab - 1, vocab, OFF, OFF])
    return limits(top_k, some([1e-7, 0.1, 0.5, 0.9, 0.95, 0.9999, 1.0, INF, INF]), some([0.0, 0.0, 0.05, 0.5, 1.0]))


def random_logits(count: int, vocab: int, seed: int) -> torch.Tensor:
    """Flat rows, rows with a model's spread, sharp rows; every second row is rounded to bfloat16 and has many ties."""
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))
    logits = logits * torch.tensor([0.01, 1.0, 3.0, 12.0]).repeat(-(-count // 4))[:count, None]
    logits[1::2] = logits[1::2].bfloat16().float()
    return logits.to(DEVICE)
