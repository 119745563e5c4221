"""Multi-head latent attention over the paged cache: all query heads share one latent a token.

The cache holds for each token its latent c and the part r of its keys that turns with the position. A query head h has
its own products with the latent: its keys are (K_h c, r), its values V_h c.

```
 absorbed    a query (n, r') becomes (K_h^T n, r'), which meets (c, r) as it lies in the cache. The weighted sum of the
             latents, times V_h, is the output. Reads C (R + D) values for all heads, and computes 2 C (2 R + D) a head
             and query
 expanded    keys and values of all heads are made of the context first: 2 C R (N + V) a head, whatever the number of
             queries, and 2 C (N + D + V) a head and query
```

So few queries a row (decode steps, short spans of prompts) are absorbed, and spans of more than `MOST_ABSORBED` tokens
expand their context. The latter is made of torch's operations on every device.

Legend: T tokens, B rows, H query heads, C positions of a context, P pages (of the cache, or of a row of the page
table), S page size, R width of the latent, D dimensions that turn, L = R + D, N dimensions of a key that do not turn, V
dimension of a head's values, Q queries of a span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rollout_kernels.attention.paged import DecodePlan, paged_decode_attention, plan_decode

if TYPE_CHECKING:
    from rollout_kernels.attention.triton_decode_plan import DecodeWork

#: Spans of at most this many tokens are absorbed. With R = 512, D = 64 and N = V = 128 both ways compute equally much
#: at 170 tokens; but the kernel for absorbed queries reads a context once for each of them.
MOST_ABSORBED = 32
#: Absorbed queries of prompts that attend at once, which bounds the memory for the parts of their contexts.
ABSORBED_AT_ONCE = 256
#: Keys and values that are expanded at once, bytes; one head of one context at least.
_EXPANDED_BYTES = 256 << 20


def write_latent(latent_TL: torch.Tensor, cache_PS1L: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store what is kept of a step's tokens. Token t goes to page `slots_T[t] // S`, offset `slots_T[t] % S`.

    Args:
        latent_TL: latents, then what turns; the dtype of the cache.
        cache_PS1L: changed in place.
        slots_T: int64, distinct, except on the dump page, where the order of writes is undefined.
    """
    cache_PS1L.flatten(0, 2).index_copy_(0, slots_T, latent_TL)


def plan_latent_decode(
    page_table_BP: torch.Tensor, context_lens_B: torch.Tensor, cache_PS1L: torch.Tensor, *, heads: int, max_context: int
) -> DecodePlan | DecodeWork:
    """The plan that `latent_decode_attention` needs on this device; all layers share it."""
    if not cache_PS1L.is_cuda:
        return plan_decode(page_table_BP, context_lens_B, cache_PS1L.shape[1], None, max_context, cache_PS1L.dtype)
    from rollout_kernels.attention.triton_latent_decode import plan_latent_work

    # One kernel plans all short spans of prompts, whatever their tokens: nothing is compiled while serving.
    return plan_latent_work(context_lens_B, heads, cache_PS1L.dtype, plan_rows=ABSORBED_AT_ONCE)


def latent_decode_attention(
    q_BHL: torch.Tensor,
    cache_PS1L: torch.Tensor,
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    rank: int,
    scale: float,
    plan: DecodePlan | DecodeWork,
    log_sum_BH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one absorbed query a row over the row's context, which its position ends: sums of latents [B, H, R].

    Args:
        q_BHL: absorbed queries, then what turns; the dtype of the cache.
        cache_PS1L: latents, then what turns.
        page_table_BP: int32.
        context_lens_B: int32 or int64; a length may be 0 (the result is then finite and meaningless).
        rank: R.
        scale: factor of the scores.
        plan: the result of `plan_latent_decode` for the same rows.
        log_sum_BH: as in `paged_decode_attention`.
    """
    how: dict[str, Any]
    if not isinstance(plan, DecodePlan):
        from rollout_kernels.attention.triton_latent_decode import decode_latents

        how = {"rank": rank, "scale": scale, "work": plan, "log_sum_BH": log_sum_BH}
        return decode_latents(q_BHL, cache_PS1L, page_table_BP, context_lens_B, **how)
    given = q_BHL, cache_PS1L, cache_PS1L[..., :rank], page_table_BP, context_lens_B
    how = {"scale": scale, "window": None, "max_context": 0, "plan": plan, "log_sum_BH": log_sum_BH}
    return paged_decode_attention(*given, **how)


def expanded_attention(
    q_QHX: torch.Tensor,
    cache_PS1L: torch.Tensor,
    pages_P: torch.Tensor,
    context_len: int,
    kv_b_HYR: torch.Tensor,
    *,
    scale: float,
    bytes_at_once: int = _EXPANDED_BYTES,
) -> torch.Tensor:
    """Causal attention of the queries at the last positions of one row's context, by expanded keys; returns [Q, H, V].

    Args:
        q_QHX: queries, X = N + D: dimensions without rope, then with.
        cache_PS1L: latents, then what turns.
        pages_P: int32; the context's pages are read.
        context_len: C, these queries included.
        kv_b_HYR: products of each head with the latent, Y = N + V: of keys, then of values.
        scale: factor of the scores.
        bytes_at_once: bytes of keys and values that are expanded at once, at least one head's.
    """
    # Here and not above: it imports torch._dynamo, which takes a second and which nothing else here needs.
    from torch.nn.attention.bias import causal_lower_right

    rank, dim, heads = kv_b_HYR.shape[2], q_QHX.shape[2], q_QHX.shape[1]
    nope = dim - (cache_PS1L.shape[3] - rank)
    page_size = cache_PS1L.shape[1]
    pages_N = pages_P[: -(-context_len // page_size)]
    latent_CL = cache_PS1L.index_select(0, pages_N).flatten(0, 2)[:context_len]
    causal = causal_lower_right(len(q_QHX), context_len)
    out = []
    at_once = max(1, bytes_at_once // (context_len * 2 * dim * latent_CL.element_size()))
    for some in (slice(first, first + at_once) for first in range(0, heads, at_once)):
        kv_hCY = torch.matmul(latent_CL[:, :rank], kv_b_HYR[some].transpose(1, 2))
        turned_hCD = latent_CL[:, rank:].expand(len(kv_hCY), -1, -1)
        k_hCX, v_hCV = torch.cat((kv_hCY[..., :nope], turned_hCD), dim=-1), kv_hCY[..., nope:]
        # Values as wide as keys let torch take its faster kernel.
        v_hCX = F.pad(v_hCV, (0, max(dim - v_hCV.shape[2], 0)))
        q_hQX = q_QHX[:, some].transpose(0, 1)
        out_1hQX = F.scaled_dot_product_attention(q_hQX[None], k_hCX[None], v_hCX[None], causal, scale=scale)
        out.append(out_1hQX[0, ..., : v_hCV.shape[2]].transpose(0, 1))
    return torch.cat(out, dim=1)
