"""Twins of attention with bounded scores, sinks, and values of another dimension, against attention written out."""

import pytest
import torch
from rollout_kernels import paged_decode_attention, paged_prefill_attention, write_kv

HEADS, KV_HEADS, K_DIM, PAGE, SCALE, WINDOW = 6, 2, 8, 4, 0.6, 5
LENGTHS = (23, 11)


def _expected(
    q_THD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last T positions of a context, in float64, one head of one query at a time."""
    out = torch.zeros(len(q_THD), HEADS, v_CGV.shape[2], dtype=torch.float64)
    for index in range(len(q_THD)):
        position = len(k_CGD) - len(q_THD) + index
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            keys, values = k_CGD[first : position + 1, group].double(), v_CGV[first : position + 1, group].double()
            scores = keys @ q_THD[index, head].double() * SCALE
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0.0 if sinks_H is None else sinks_H[head].double().exp())
            out[index, head] = weights @ values / total
    return out


@pytest.mark.parametrize("v_dim", [8, 5, 12])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (1.5, False), (None, True), (1.5, True)])
def test_decode_and_prefill_agree_with_attention_written_out(
    softcap: float | None, with_sinks: bool, window: int | None, v_dim: int
) -> None:
    generator = torch.Generator().manual_seed(v_dim)
    sinks_H = torch.randn(HEADS, generator=generator) if with_sinks else None
    width = -(-max(LENGTHS) // PAGE)
    table = torch.arange(len(LENGTHS) * width, 0, -1, dtype=torch.int32).view(-1, width)
    k_cache = torch.full((len(LENGTHS) * width + 1, PAGE, KV_HEADS, K_DIM), 30.0)
    v_cache = torch.full((len(LENGTHS) * width + 1, PAGE, KV_HEADS, v_dim), 30.0)
    contexts, queries = [], []
    for row, length in enumerate(LENGTHS):
        k = torch.randn(length, KV_HEADS, K_DIM, generator=generator)
        v = torch.randn(length, KV_HEADS, v_dim, generator=generator)
        positions = torch.arange(length)
        slots = table[row, positions // PAGE].long() * PAGE + positions % PAGE
        write_kv(k, v, k_cache, v_cache, slots)
        contexts.append((k, v))
        queries.append(torch.randn(min(length, 9), HEADS, K_DIM, generator=generator))
    options = {"scale": SCALE, "window": window, "softcap": softcap, "sinks_H": sinks_H}
    expected = [_expected(q, *context, window, softcap, sinks_H) for q, context in zip(queries, contexts, strict=True)]

    starts = [0, len(queries[0])]
    chunks = [(start, len(q), length) for start, q, length in zip(starts, queries, LENGTHS, strict=True)]
    prefilled = paged_prefill_attention(torch.cat(queries), k_cache, v_cache, table, chunks, **options)
    torch.testing.assert_close(prefilled.double(), torch.cat(expected), atol=1e-5, rtol=1e-4)

    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    last = torch.stack([q[-1] for q in queries])
    decoded = paged_decode_attention(last, k_cache, v_cache, table, lens, max_context=max(LENGTHS), **options)
    torch.testing.assert_close(decoded.double(), torch.stack([e[-1] for e in expected]), atol=1e-5, rtol=1e-4)
