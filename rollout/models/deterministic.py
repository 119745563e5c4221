"""A token's results are the same bit for bit, whatever its steps contain and however its KV was computed.

    products      one order of addition for any number of tokens: the deterministic column of `linear.table`
    experts       one plan for any number of tokens: the deterministic plan of `moe.dispatch`; the router and the
                  products of a shared expert are such products, too
    attention     a row's context is cut every `CHUNK` positions, whatever the other rows are. A prompt's tokens are
                  rows of a decode step's kernel, each with its own context. So a token that is
                  computed again after a preemption, in another chunk or beside a cached prefix, gets the same bits
    states        the recurrence of linear attention takes the tokens of a row one by one, in decode steps and in
                  prefills by one kernel. Chunks aligned to positions would not do: a drawn token that is computed
                  again is a prompt's token then, and a chunk has other roundings than steps
    the rest      works on one token at a time anyway

Prompts pay the price: they are multiplied 128 tokens at a time, each token of a chunk reads its context alone, and
tokens wait for the state after the one before.

Legend: T tokens, Q query heads, D head dimension.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rollout_kernels.attention.triton_decode import decode_attention
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, DecodeWork, plan_decode_work
from rollout_kernels.linear.table import Kind, linear_config

from rollout.models.batch import AttentionBatch, LayerKV
from rollout.models.spec import (
    AttentionSpec,
    CompressedSpec,
    DeltaNetSpec,
    DenseSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    Mamba2Spec,
    ModelSpec,
    MoESpec,
)

#: Positions of a context whose values are summed first, before the sums are added.
CHUNK = 1024
#: Tokens of a prompt that attend at once, which bounds the memory for the parts of their contexts.
PROMPT_TOKENS = 256
CONFIG = DecodeConfig(block_n=32, num_warps=2, programs_per_sm=4, chunk=CHUNK)

#: A product as the table of kernels knows it: outputs, inputs, and what is done with the result.
KernelProduct = tuple[int, int, Kind]


def kernel_product(linear: LinearSpec, kind: Kind) -> KernelProduct:
    """The key of a product in the table of kernels."""
    return linear.outputs, linear.inputs, kind


def layer_products(layer: LayerSpec) -> dict[str, KernelProduct]:
    found: dict[str, KernelProduct] = {}
    if isinstance(layer.mixer, AttentionSpec):
        found = {"qkv": kernel_product(layer.mixer.qkv, "parts"), "o": kernel_product(layer.mixer.o, "parts")}
    elif isinstance(layer.mixer, DeltaNetSpec):
        found = {"in": kernel_product(layer.mixer.inputs, "whole"), "o": kernel_product(layer.mixer.out, "parts")}
    if isinstance(layer.feed_forward, DenseSpec):
        found["gate_up"] = kernel_product(layer.feed_forward.gate_up, "silu")
        found["down"] = kernel_product(layer.feed_forward.down, "parts")
        return found
    block = layer.feed_forward
    if block is None:
        return found
    stacked_gate = block.shared_gate and block.shared_like_others > 0
    found["router"] = (block.experts + stacked_gate, block.hidden, "parts")
    if block.shared is not None:
        found |= shared_products(block.shared)
    return found


def shared_products(shared: DenseSpec) -> dict[str, KernelProduct]:
    """The products of a shared expert by name; its gate has one output."""
    return {
        "shared gate_up": kernel_product(shared.gate_up, "silu"),
        "shared down": kernel_product(shared.down, "whole"),
        "shared gate": (1, shared.hidden, "whole"),
    }


def head_product(spec: ModelSpec) -> KernelProduct:
    return len(spec.kept_vocab), spec.hidden, "whole"


def check_deterministic(spec: ModelSpec) -> None:
    """Raise ValueError with the reason if the kernels cannot make the steps of a model deterministic."""
    reason = "its layers have inputs of their own" if spec.token_inputs is not None else None
    for layer in dict.fromkeys(spec.layers):
        mixer, block = layer.mixer, layer.feed_forward
        dense = block.shared if isinstance(block, MoESpec) else block
        if mixer is None or block is None or isinstance(mixer, Mamba2Spec):
            reason = "it has Mamba-2, or layers of one block"
            break
        if dense is not None and dense.bias:
            reason = "its feed-forward products have biases"
        if isinstance(block, MoESpec) and (block.inner is not None or block.apart is not None):
            reason = "its experts work on a narrower state, or have norms of their own"
        if dense is not None and dense.activation not in ("silu", "gelu_tanh"):
            reason = "its feed-forward blocks have another activation than SiLU or GELU with tanh"
        if isinstance(mixer, LatentSpec | CompressedSpec):
            reason = "it has latent attention, or attention to entries of windows"
            break
        if isinstance(mixer, AttentionSpec):
            if layer.factor or mixer.value_norm or mixer.kv != "own" or mixer.chunk is not None:
                reason = "its layers have factors, or its attention has chunks, normalised values or shared KV"
            if mixer.o_bias:
                reason = "its output products have biases"
            if mixer.softcap is not None or mixer.sinks:
                reason = "its attention has a softcap or sinks"
            if mixer.qk_norm == "full" and mixer.shard.size > 1:
                reason = "its queries and keys are normalised all heads together, on several GPUs"
            if mixer.gate:
                reason = "its attention has gates in a product of their own"
        for name, product in (("head", head_product(spec)), *layer_products(layer).items()):
            if linear_config(*product, 1, deterministic=True) is None:
                reason = f"the {product[1]} inputs of its product {name!r} are no multiple of 32"
    if reason is not None:
        raise ValueError(f"deterministic is not possible for this {spec.architecture}: {reason}")


def attend(
    q_TQD: torch.Tensor, batch: AttentionBatch, cache: LayerKV, scale: float, window: int | None
) -> torch.Tensor:
    """Attention of a step's queries, decode or prefill, over a layer's cache that holds their keys; [T, Q, D]."""
    kv_heads = cache.k_PSGD.shape[2]
    out = []
    for tokens, table_TP, lens_T, most in batch.shared("deterministic rows", lambda: list(_rows(batch))):
        group = q_TQD.shape[1] // kv_heads
        plan = partial(_plan, lens_T, kv_heads, group, window, most, batch.segments_SW)
        work = batch.shared((window, kv_heads, tokens.start), plan)
        given = q_TQD[tokens], cache.k_PSGD, cache.v_PSGD, table_TP, lens_T
        how: dict[str, Any] = {"scale": scale, "window": window, "scales_P2GS": cache.scales_P2GS}
        out.append(decode_attention(*given, **how, work=work))
    return out[0] if len(out) == 1 else torch.cat(out)


def _rows(batch: AttentionBatch) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, int]]:
    """Tokens that attend at once: their slice, page tables and contexts, and a bound on the contexts.

    Tables and contexts of prompts are copies: Triton compiles a kernel anew for an address that is no multiple of 16.
    """
    if batch.chunks is None:
        yield slice(0, len(batch.context_lens_B)), batch.page_table_BP, batch.context_lens_B, batch.max_context
        return
    for index, chunk in enumerate(batch.chunks):
        table_P = batch.page_table_BP[index].clone()
        end = chunk.query_start + chunk.query_len
        for start in range(chunk.query_start, end, PROMPT_TOKENS):
            tokens = slice(start, min(start + PROMPT_TOKENS, end))
            table_TP = table_P.expand(tokens.stop - start, -1)
            yield tokens, table_TP, batch.positions_T[tokens] + 1, chunk.context_len


def _plan(
    lens_T: torch.Tensor,
    kv_heads: int,
    group: int,
    window: int | None,
    max_context: int,
    segments_SW: torch.Tensor | None,
) -> DecodeWork:
    return plan_decode_work(
        lens_T,
        kv_heads,
        group=group,
        window=window,
        config=CONFIG,
        max_context=max_context,
        segments_SW=segments_SW,
    )
