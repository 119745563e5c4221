"""Attention over a paged KV cache.

paged                  the ops and their torch twins: writing keys and values, decode, prefill
triton_decode          decode on a GPU: one query a row; `triton_decode_fp8` is its part for caches of codes
triton_decode_plan     how the contexts of a decode step are split over the programs of its grid
segments               what rows of a decode step share, found from how many positions neighbours have in common
triton_decode_combine  what a program does with its results, and how the results of one row are combined
triton_prefill         prefill on a GPU: chunks of prompts
latent                 the ops of multi-head latent attention; `triton_latent_decode` is decode on a GPU
index_scores           which positions matter to a token, for sparse attention; `triton_index_scores` on a GPU
gathered               prefill on Hopper where blocks of queries see many keys: `triton_gather_kv` copies contexts from
                       pages, `triton_gathered_items` lists blocks, `gluon_prefill` attends
"""

from rollout_kernels.attention.paged import (
    DecodePlan,
    kernels_take,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode,
    plan_paged_decode,
    write_kv,
)

__all__ = [
    "DecodePlan",
    "kernels_take",
    "paged_decode_attention",
    "paged_prefill_attention",
    "plan_decode",
    "plan_paged_decode",
    "write_kv",
]
