"""Compiles the kernels of a model's steps for Hopper on any machine: needs Triton, but no GPU.

    PYTHONPATH=.:kernels python -m scripts.check.compile_kernels [--only moe] [--rows 1 32] [--capability 90]
        [--families gpt-oss-20b]

It calls the functions that launch kernels with tensors that have a shape and a dtype, but no memory, and compiles each
kernel instead of running it. It prints the registers and the stack (spilled bytes) of a thread, and the shared memory
of a program. It does not check results or speed. Another version of the compiler may give other figures.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from rollout_kernels import SamplingRows
from rollout_kernels.attention import triton_decode
from rollout_kernels.attention.gluon_prefill import HEAD_DIM, gathered_attention
from rollout_kernels.attention.segments import SEGMENT_WORDS
from rollout_kernels.attention.triton_decode_plan import plan_decode_work
from rollout_kernels.attention.triton_gather_kv import gather_kv
from rollout_kernels.attention.triton_gathered_items import prefill_items
from rollout_kernels.attention.triton_index_scores import index_scores
from rollout_kernels.attention.triton_latent_decode import decode_latents, plan_latent_work
from rollout_kernels.attention.triton_prefill import prefill_attention
from rollout_kernels.common import triton_math
from rollout_kernels.common.triton_math import Activation
from rollout_kernels.delta import DraftInputs, Rule, Spans, triton_conv, triton_drafts, triton_rule, triton_states
from rollout_kernels.linear import gluon_linear, triton_gemv, triton_linear
from rollout_kernels.linear.coded import CodedMatrix, scales_shape
from rollout_kernels.linear.table import linear_config
from rollout_kernels.lora import Correction, LoraBuffers, triton_lora
from rollout_kernels.moe import dispatch, formats, triton_quantize, triton_router
from rollout_kernels.moe.triton_norm_router import norm_route, router_scratch
from rollout_kernels.moe.triton_scored_router import ScoreRule, choose_scored
from rollout_kernels.norm_rope import triton_elementwise, triton_rotate
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.parallel.group import HISTOGRAM_WORDS
from rollout_kernels.parallel.peer_buffers import PeerBuffers, buffer_layout
from rollout_kernels.parallel.triton_all_reduce import all_reduce_norm, all_reduce_rows
from rollout_kernels.sampling import VocabShard, triton_truncate
from rollout_kernels.sampling.triton_allow import allow_only
from rollout_kernels.sampling.triton_draw import draw_and_advance
from rollout_kernels.step import triton_begin, triton_ngrams, triton_verify
from rollout_kernels.step.ngrams import MOST_EQUAL, REACH
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from rollout.process.compiling import watch_compilations
from trainer_bridge.transports.triton_fingerprint import add_words

PAGE = 16
MULTIPROCESSORS = 132


class Shape(NamedTuple):
    """Sizes of a model that kernels depend on."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    activation: Activation = "silu"


DENSE = Shape(4096, 32, 8, 128, 12288, 151936)  # Qwen3-8B
SPARSE = Shape(2048, 32, 4, 128, 768, 151936, 128, 8)  # Qwen3-30B-A3B
#: Sizes that other families bring, with `--families`.
OTHERS = {
    "qwen3.5-27b": Shape(5120, 24, 4, 256, 17408, 248320),
    "qwen3.5-35b-a3b": Shape(2048, 16, 2, 256, 512, 248320, 256, 8),
    "gpt-oss-20b": Shape(2880, 64, 8, 64, 2880, 201088, 32, 4),
    "glm-4.5-air": Shape(4096, 96, 8, 128, 1408, 151552, 128, 8),
    "moonlight-16b-a3b": Shape(2048, 16, 16, 192, 1408, 163840, 64, 6),
    "olmo-3-7b": Shape(4096, 32, 32, 128, 11008, 100278),
    "gemma-3-12b": Shape(3840, 16, 8, 256, 15360, 262208, activation="gelu_tanh"),
    "glm-4-9b": Shape(4096, 32, 2, 128, 13696, 151552),
}
HALF = Shape(2048, 16, 2, 128, 384, 75968, 128, 8)  # Qwen3-30B-A3B on each of two GPUs
USUAL = {"dense": DENSE, "moe": SPARSE, "half of moe": HALF}
Case = tuple[str, Callable[[], Any]]


class OfflineDriver:
    """The part of a driver that the compiler needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


class _TwoRanks(TensorGroup):
    """Ranks without memory."""

    def __init__(self, histogram_peers: PeerBuffers | None = None) -> None:
        super().__init__(1, 2)
        self.histogram_peers = histogram_peers

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for both."""
        return x.new_empty(2, *x.shape)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def floats(*shape: int) -> torch.Tensor:
    """In float32."""
    return empty(*shape, dtype=torch.float32)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Integers."""
    return empty(*shape, dtype=dtype)


def coded(outputs: int, inputs: int, format: formats.Format, silu: bool) -> CodedMatrix:
    """Weights as codes; gate and up are two modules."""
    widths = (outputs // 2, outputs // 2) if silu else (outputs,)
    scales = empty(*scales_shape(widths, inputs, format), dtype=formats.scale_dtype(format))
    return CodedMatrix(empty(outputs, inputs, dtype=torch.uint8), scales, format, widths)


def products(shape: Shape, rows: int) -> Iterator[Case]:
    """The few-row products: as in the table, streamed, and by output."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    kinds: list[tuple[str, int, int, Any]] = [
        ("qkv", width, shape.hidden, "parts"),
        ("o", shape.hidden, shape.heads * shape.dim, "parts"),
        ("head", shape.vocab, shape.hidden, "whole"),
    ]
    if not shape.experts:
        kinds += [("gate_up", 2 * shape.inner, shape.hidden, "silu"), ("down", shape.hidden, shape.inner, "parts")]
    for name, outputs, inputs, kind in kinds:
        config = linear_config(outputs, inputs, kind, rows)
        x, w, silu = empty(rows, inputs), empty(outputs, inputs), kind == "silu"
        act = shape.activation if silu else None
        out = outputs // 2 if silu else outputs
        if config is not None:
            to = floats(config.split, rows, out)
            yield f"product {name}", lambda a=(x, w, to, out, config, act): triton_linear.multiply_into(*a)
        to = empty(rows, out) if silu else floats(2, rows, out)
        for block_n in (64, 192):
            sizes = (block_n, 64, 1 if kind != "parts" else 2, 4, 6, MULTIPROCESSORS, act)
            yield f"product {name}, streamed", lambda a=(x, w, to, out, *sizes): gluon_linear.stream(*a)
        for format in formats.FORMATS:
            config = (
                None
                if format == "plain" or kind == "whole"
                else linear_config(outputs, inputs, kind, rows, format=format)
            )
            if config is not None:
                to, codes = floats(config.split, rows, out), coded(outputs, inputs, format, silu)
                yield (
                    f"product {name}, {format}",
                    lambda a=(x, codes, to, out, config, act): triton_linear.multiply_into(*a),
                )
        if rows >= 32 and kind != "whole" and inputs % 256 == 0:
            codes = coded(outputs, inputs, "fp8_block", silu)
            for block_n, warps in ((64, 4), (128, 8), (192, 8)):
                config = triton_linear.LinearConfig(block_n, 128, 1 if silu else 2, warps, 4, 264, True, codes=True)
                to = empty(rows, out) if silu else floats(2, rows, out)
                yield (
                    f"product {name}, both codes",
                    lambda a=(x, codes, to, out, config, act): triton_linear.multiply_into(*a),
                )
        by_output = triton_gemv.GemvConfig(at_once=4 if silu else 8)
        if triton_gemv.takes(x, w, by_output):
            yield f"product {name}, by output", lambda a=(x, w, to, out, by_output, act): triton_gemv.gemv(*a)


def dense_step(shape: Shape, rows: int) -> Iterator[Case]:
    """The kernels between the products of a decode step, and those at its beginning and end."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    x, residual, norm = empty(rows, shape.hidden), empty(rows, shape.hidden), empty(shape.hidden)
    cos, slots, lens = floats(rows, 1, shape.dim), ints(rows, dtype=torch.int64), ints(rows, dtype=torch.int64)
    table, long = ints(rows, 1024), torch.int64
    state, row_ids = (ints(257, 8, dtype=long), floats(257, 8)), ints(rows, dtype=long)
    yield (
        "begin",
        lambda: triton_begin.begin_step(
            row_ids, ints(rows), state[0], ints(257, 1024), table, last=0, length=1, page_size=PAGE, columns=1024
        ),
    )
    drafts, verified, paths = ints(rows, 4, dtype=long), ints(rows, 4, dtype=long), ints(rows, 24, dtype=long)
    for adapters in (None, ints(257)):
        also = "" if adapters is None else ", adapters"
        own = (*state, ints(257, 1024), ints(257, dtype=long), adapters)
        for made in (ints(257, 0, dtype=long), ints(257, 3, dtype=long)):
            more = "" if not made.shape[1] else ", drafts of the device"
            yield (
                f"set drafts up{also}{more}",
                lambda a=(drafts, verified, paths, *own, made): triton_verify.set_up_drafts(*a, last=0, length=1),
            )
    accepting = (verified, row_ids, ints(rows), ints(257, dtype=long), state[0], ints(rows))
    yield "accept drafts", lambda: triton_verify.accept_drafts(*accepting, last=0, length=1)
    searched = row_ids, state[0], ints(257, 1024), ints(4096, PAGE), ints(257, 3, dtype=long)
    limits: dict[str, Any] = {"last": 0, "length": 1, "most_equal": MOST_EQUAL, "reach": REACH}
    yield "draft by n-grams", lambda: triton_ngrams.draft_by_ngrams(*searched, **limits)
    yield (
        "embed and rope",
        lambda: triton_elementwise.embed_rope(
            row_ids, slots, empty(shape.vocab, shape.hidden), floats(shape.dim), floats(shape.dim)
        ),
    )
    parts = floats(2, rows, shape.hidden)
    yield "norm", lambda: triton_elementwise.add_rms_norm(residual, parts, norm, 1e-6)
    for after in (None, norm):
        outer = (residual, parts, after, 1e-6, None, True, norm, 0.5, norm[:1])
        yield "norm of the output", lambda a=outer: triton_elementwise.add_rms_norm(*a)
    for ranks in (2, 8):
        for flagged, form in ((False, "words"), (True, "rows")):
            sizes, dtype = buffer_layout(ranks, rows, shape.hidden // 2, flagged)
            peers = PeerBuffers(0, ints(*sizes, dtype=dtype), ints(ranks, dtype=long), ints(rows), ints(1))
            normed = residual, floats(2, rows, shape.hidden), norm, 1e-6, peers
            yield f"norm over {ranks} ranks, {form}", lambda a=normed: all_reduce_norm(*a)
            yield f"sum over {ranks} ranks, {form}", lambda a=(residual[None], peers): all_reduce_rows(*a)
    tower = empty(rows, 3, 16, 72)[:, :2].flatten(1, 2), floats(rows, 72), floats(rows, 72)
    yield "rotate heads", lambda: triton_rotate.rotate_heads(*tower)
    gate_up = empty(rows, 2 * shape.inner)
    yield "gated", lambda: triton_elementwise.gated(gate_up, None, shape.activation)
    if shape.inner % formats.BLOCK == 0:
        yield "gated, to codes", lambda: triton_elementwise.gated_codes(gate_up, shape.activation)
    sixteen, e4m3 = torch.bfloat16, torch.uint8
    for name, dtypes in (
        ("", (sixteen, sixteen)),
        (", fp8 KV", (e4m3, e4m3)),
        (", fp8 keys and int8 values", (e4m3, torch.int8)),
    ):
        cache = tuple(empty(64, PAGE, shape.kv_heads, shape.dim, dtype=dtype) for dtype in dtypes)
        scales = floats(64, 2, shape.kv_heads, PAGE) if name else None
        to = (slots, cache[0], cache[1], shape.heads, scales, x.dtype)
        parts, heads = floats(1, rows, width), empty(2, shape.dim)
        yield (
            f"finish q/k/v{name}",
            lambda a=(parts, None, heads, 1e-6, cos, cos, *to): triton_elementwise.finish_qkv(*a),
        )
        gates = empty(rows, shape.heads, shape.dim)
        gated = (floats(1, rows, width + shape.heads * shape.dim), None, heads, 1e-6, cos, cos, *to, None, True, gates)
        yield f"finish q/k/v with gates{name}", lambda a=gated: triton_elementwise.finish_qkv(*a)
        biased = (parts, empty(width), None, 1e-6, cos, cos, *to, None, False, None)
        norms = (empty(shape.heads * shape.dim), empty(shape.kv_heads * shape.dim))
        for what, rest in (("all heads together", (norms, 8.0, False)), ("neighbours turn", (None, None, True))):
            yield f"finish q/k/v, {what}{name}", lambda a=(*biased, *rest): triton_elementwise.finish_qkv(*a)
        for kv, outputs in (("keys", width - shape.kv_heads * shape.dim), ("shared", shape.heads * shape.dim)):
            other = (floats(1, rows, outputs), empty(outputs), heads, *biased[3:])
            keywords = {"kv": kv, "value_norm": True}
            yield f"finish q/k/v, {kv}{name}", lambda a=other, b=keywords: triton_elementwise.finish_qkv(*a, **b)
        for window in (None, 1024):
            also = f"{name}{', window' if window else ''}"
            yield f"decode attention{also}", lambda a=(shape, rows, cache, scales, table, lens, window): _decode(*a)
            yield (
                f"group attention{also}",
                lambda a=(shape, rows, cache, scales, table, lens, window): _decode(*a, shared=True),
            )
            yield f"prefill attention{also}", lambda a=(shape, cache, scales, window): _prefill(*a)
            if scales is None:
                given = (shape, rows, cache, scales, table, lens, window)
                yield f"softcap and sinks, decode{also}", lambda a=given: _decode(*a, variant=True)
                yield (
                    f"softcap and sinks, prefill{also}",
                    lambda a=(shape, cache, None, window): _prefill(*a, variant=True),
                )
    columns = {"LAST": 0, "LENGTH": 1, "PROMPT": 2, "SEED": 3, "TEMPERATURE": 0, "NOISE": 1}
    for drawn in (None, floats(rows, shape.vocab)):
        logits, out = floats(rows, shape.vocab), ints(4, rows)
        yield "sampling, draw", lambda a=(logits, drawn, row_ids, *state, out, columns): draw_and_advance(*a)
    part = VocabShard(_TwoRanks(), shape.vocab // 2, shape.vocab // 2, shape.vocab)
    half = floats(rows, shape.vocab // 2)
    for drawn in (None, half):
        parted = half, drawn, row_ids, *state, ints(4, rows), columns, part
        yield "sampling, draw over a part", lambda a=parted: draw_and_advance(*a)
    temperatures, noises = state[1].T[:2]
    cut = SamplingRows(
        temperatures, noises, row_ids, row_ids, top_k_S=row_ids, top_p_S=floats(rows), min_p_S=floats(rows)
    )
    yield "sampling, truncation", lambda: triton_truncate.truncate(floats(rows, shape.vocab), cut)
    yield "sampling, truncation of a part", lambda: triton_truncate.truncate(half, cut, part)
    buffers = ints(2, 2, rows, HISTOGRAM_WORDS, dtype=long), ints(2, dtype=long), ints(rows), ints(1)
    connected = replace(part, group=_TwoRanks(PeerBuffers(1, *buffers)))
    yield "sampling, truncation over peers", lambda: triton_truncate.truncate(half, cut, connected)
    masks = ints(rows, -(-shape.vocab // 32))
    yield "sampling, allow", lambda: allow_only(floats(rows, shape.vocab), row_ids, masks)
    yield "fingerprint", lambda: add_words(ints(1 << 20), ints(1, dtype=torch.int64), 0x1E3779B97F4A7C15)


def _decode(
    shape: Shape, rows: int, cache, scales, table, lens, window, shared: bool = False, variant: bool = False
) -> None:
    coded = scales is not None
    group = shape.heads // shape.kv_heads
    config = triton_decode.default_decode_config(shape.dim, torch.bfloat16, rows, coded, shared, group)
    segments = ints(2 * rows, SEGMENT_WORDS) if shared else None
    how = {"group": group, "window": window, "config": config, "multiprocessors": MULTIPROCESSORS}
    work = plan_decode_work(lens, shape.kv_heads, segments_SW=segments, **how)
    q = empty(rows, shape.heads, shape.dim)
    how = {"scale": 0.1, "window": window, "scales_P2GS": scales, "work": work, **_variant(shape, variant)}
    triton_decode.decode_attention(q, cache[0], cache[1], table, lens, **how)


def _variant(shape: Shape, variant: bool) -> dict[str, Any]:
    """A softcap and sinks."""
    return {"softcap": 30.0, "sinks_H": empty(shape.heads)} if variant else {}


def _prefill(shape: Shape, cache, scales, window, variant: bool = False) -> None:
    q, lens = empty(2048, shape.heads, shape.dim), ints(4, dtype=torch.int64)
    how = {"max_query": 2048, "scale": 0.1, "window": window, "scales_P2GS": scales, **_variant(shape, variant)}
    prefill_attention(q, cache[0], cache[1], ints(4, 1024), ints(5), lens, **how)
    if capability_of_gluon() and shape.dim == HEAD_DIM:
        kv = gather_kv(
            cache[0], cache[1], ints(4, 1024), lens, rows=8192, most=2048, dtype=torch.bfloat16, scales_P2GS=scales
        )
        items = prefill_items(ints(5), lens, 64, window)
        gathered_attention(q, *kv, items, scale=0.1, window=window)


def capability_of_gluon() -> bool:
    """True if kernels for Hopper alone are compiled, too."""
    return triton.runtime.driver.active.get_current_target().arch // 10 == 9


def padded_experts(shape: Shape, tokens: int) -> None:
    """The launches of experts over padded groups."""
    routing = triton_router.Routing(ints(tokens, shape.top_k), floats(tokens, shape.top_k))
    gate_up = _weights(shape.experts, 2 * shape.inner, shape.hidden, "plain", 2)
    down = _weights(shape.experts, shape.hidden, shape.inner, "plain", 1)
    dispatch.run_experts(empty(tokens, shape.hidden), routing, gate_up, down, dispatch.PaddedPlan(MULTIPROCESSORS))


def adapters(shape: Shape, rows: int) -> Iterator[Case]:
    """The kernels of eight adapters of rank 16 and of rank 64, for each product of a decode step and a prompt chunk."""
    inner, width = shape.inner, (shape.heads + 2 * shape.kv_heads) * shape.dim
    q_width, kv_width = shape.heads * shape.dim, shape.kv_heads * shape.dim
    kinds = [
        ("qkv", shape.hidden, (q_width, q_width + kv_width, width)),
        ("gate_up", shape.hidden, (inner, 2 * inner)),
        ("down", inner, (shape.hidden,)),
    ]
    for rank in (16, 64):
        for name, inputs, ends in kinds:
            buffers = LoraBuffers(empty(8, len(ends) * rank, inputs), empty(8, ends[-1], rank), ends)
            for tokens, segmented in ((rows, False), (2048, True)):
                to = floats(tokens, ends[-1]) if not segmented else empty(tokens, ends[-1])
                given = (to, empty(tokens, inputs), buffers, ints(tokens), segmented)
                what = "prefill" if segmented else "decode"
                yield f"adapters, rank {rank}, {name}, {what}", lambda a=given: triton_lora.lora_add(*a)
            yield from added_later(shape, rows, rank, name, inputs, ends)
    config = linear_config(2 * inner, shape.hidden, "silu", rows)
    if config is not None:  # without SiLU, which comes after the corrections
        whole = (empty(rows, shape.hidden), empty(2 * inner, shape.hidden), empty(rows, 2 * inner), 2 * inner)
        yield "adapters, product gate_up", lambda a=(*whole, config, None, True): triton_linear.multiply_into(*a)


def added_later(shape: Shape, rows: int, rank: int, name: str, inputs: int, ends: tuple[int, ...]) -> Iterator[Case]:
    """A product of a decode step whose correction is added by the kernel that reads it."""
    buffers = LoraBuffers(empty(8, len(ends) * rank, inputs), empty(8, ends[-1], rank), ends)
    if not triton_lora.adds_later(rows, buffers, False):
        return
    label = f"adapters later, rank {rank}, {name}"
    yield label, lambda: triton_lora.shrink_beside(empty(rows, inputs), buffers, ints(rows))
    low = floats(triton_lora._parts(inputs, False), rows, len(ends) * rank)
    correction = Correction(low, buffers, ints(rows))
    residual, parts = empty(rows, shape.hidden), floats(2, rows, ends[-1])
    cache, cos = empty(64, PAGE, shape.kv_heads, shape.dim), floats(rows, 1, shape.dim)
    to = (cos, cos, ints(rows, dtype=torch.int64), cache, cache, shape.heads, None, None, correction)
    if name == "qkv":
        yield label, lambda: triton_elementwise.finish_qkv(parts, None, empty(2, shape.dim), 1e-6, *to)
    elif name == "gate_up":
        yield label, lambda: triton_elementwise.gated(empty(rows, ends[-1]), correction)
    else:
        yield label, lambda: triton_elementwise.add_rms_norm(residual, parts, empty(shape.hidden), 1e-6, correction)


def linear_attention(rows: int) -> Iterator[Case]:
    """Gated DeltaNet in the sizes of Qwen3.5-35B-A3B: a decode step, and a prefill of two rows."""
    heads, key_heads, dim, conv = 32, 16, 128, 4
    widths = (2 * key_heads * dim + heads * dim, heads * dim, heads, heads)
    weight, scalars = empty(widths[0], conv), floats(heads)
    conv_state, state = empty(9, widths[0], conv - 1), floats(9, heads, dim, dim)
    long = torch.int64
    steps = (
        ("decode", rows, Spans(ints(rows, dtype=long), ints(rows, dtype=long))),
        ("prefill", 2048, Spans(ints(2, dtype=long), ints(2048, dtype=long), (1500, 548), ints(3))),
        ("one by one", 2048, Spans(ints(2, dtype=long), ints(2048, dtype=long), (1500, 548), ints(3), True)),
    )
    for name, tokens, spans in steps:
        mixed, z, b, a = empty(tokens, sum(widths)).split(widths, dim=1)
        convolved, out = empty(tokens, widths[0]), empty(tokens, heads, dim)
        given = (convolved, b, a, scalars, scalars, state, spans)
        yield f"delta, {name}: conv", lambda g=(mixed, weight, conv_state, spans): triton_conv.short_conv(*g)
        yield f"delta, {name}: rule", lambda g=given: triton_rule.gated_delta(*g)
        normed = (out, z.unflatten(1, (heads, dim)), empty(dim), 1e-6)
        yield f"delta, {name}: norm", lambda g=normed: triton_rule.gated_norm(*g)
    spans = steps[0][2]._replace(behind_B=ints(rows))
    rules: tuple[tuple[Rule, int], ...] = (("channels", dim), ("plain", 1))
    parts = empty(8, widths[0]), empty(8, widths[0]), floats(8, 2 * heads)
    gated = (*given[:-1], spans, 1.0, DraftInputs(*parts, 9))
    yield "delta, drafts: rule", lambda: triton_rule.gated_delta(*gated)
    for rule, each in rules:
        has_beta = rule == "channels"
        ready = (*(floats(rows, heads, dim) for _ in range(3)), floats(rows, heads, each))
        ready = (*ready, floats(rows, heads)) if has_beta else ready
        parts = empty(2, 8, widths[0]), floats(2, 8, heads * 2 * dim), floats(2, 8, heads * (each + has_beta))
        kept = DraftInputs(*parts, 9, rule)
        plain, drafted = ((ready, state, steps[0][2], None), (ready, state, spans, kept.of_layer(0)))
        draft_conv = (empty(rows, widths[0]), weight, conv_state, spans, empty(widths[0]), kept.of_layer(0))
        caught = floats(2, 9, heads, dim, dim), empty(2, 9, widths[0], conv_state.shape[2]), kept
        rows_of = ints(4, 4, dtype=long), ints(rows, dtype=long), ints(rows)
        yield f"delta, {rule}: rule", lambda g=plain: triton_states.decode_states(*g)
        yield f"delta, {rule}: drafts", lambda g=drafted: triton_states.decode_states(*g)
        yield f"delta, {rule}: conv of drafts", lambda g=draft_conv: triton_conv.short_conv(*g)
        yield f"delta, {rule}: catch up", lambda g=(*caught, *rows_of): triton_drafts.catch_up(*g)


def latent_attention(rows: int) -> Iterator[Case]:
    """Decode attention in the sizes of Moonlight (and, for each block of heads, DeepSeek-V3) and of GLM-4.7-Flash.

    And the indexer of DeepSeek-V3.2, with attention over chosen tokens.
    """
    table, lens = ints(rows, 1024), ints(rows, dtype=torch.int64)
    for heads, page_size in ((16, PAGE), (20, PAGE), (128, 1)):

        def run(heads: int = heads, page_size: int = page_size) -> None:
            work = plan_latent_work(lens, heads, torch.bfloat16, multiprocessors=MULTIPROCESSORS)
            cache = empty(64, page_size, 1, 576)
            decode_latents(empty(rows, heads, 576), cache, table, lens, rank=512, scale=0.1, work=work)

        yield f"latent attention, {heads} heads", run
    indexed = (empty(rows, 65, 128)[:, :64], floats(rows, 64), empty(64, PAGE, 1, 128), table, lens)
    yield "latent attention, scores of an indexer", lambda: index_scores(*indexed)
    by_head = (empty(rows, 1, 128), floats(rows, 1), empty(64, PAGE, 1, 128), table, lens)
    yield "scores of an indexer with a choice for each KV head", lambda: index_scores(*by_head, relu=False)


def sparse_step(shape: Shape, rows: int) -> Iterator[Case]:
    """Router and experts in each format, by the plan for a number of rows and by both paths."""
    x, router = empty(rows, shape.hidden), empty(shape.experts, shape.hidden)
    if rows <= 8:
        parts, norm = floats(1, rows, shape.hidden), empty(shape.hidden)
        scratch = router_scratch(shape.experts, torch.device("meta"))
        yield "norm and router", lambda: norm_route(x, parts, norm, 1e-6, router, shape.top_k, True, scratch)
    yield "router", lambda: triton_router.moe_route(x, router, shape.top_k, True)
    logits = empty(1, rows, shape.experts)
    yield "choice", lambda: triton_router.moe_choose(logits, x.dtype, shape.top_k, True)
    rule, bias = ScoreRule("sigmoid", shape.top_k, True), floats(shape.experts)
    yield (
        "choice by scores",
        lambda: choose_scored(floats(1, rows, shape.experts), torch.float32, rule, score_bias_E=bias),
    )
    if capability_of_gluon():
        yield "experts, padded", lambda: padded_experts(shape, 2048)
    routing = triton_router.Routing(ints(rows, shape.top_k), floats(rows, shape.top_k))
    sizes = dispatch.MoEShape(shape.experts, shape.top_k, shape.hidden, shape.inner)
    for format in formats.FORMATS:
        gate_up = _weights(shape.experts, 2 * shape.inner, shape.hidden, format, 2)
        down = _weights(shape.experts, shape.hidden, shape.inner, format, 1)
        plans = [dispatch.moe_plan(sizes, format, x.dtype, rows), dispatch.default_entry(sizes, format).deterministic]
        for plan in plans:
            for parts_too in (True, False):
                given = (x, routing, gate_up, down, plan)
                yield f"experts, {format}, {plan.path}", lambda a=given, p=parts_too: dispatch.run_experts(*a, parts=p)
            if format != "fp8_block":
                glu = formats.ClampedGLU(empty(shape.experts, 2 * shape.inner), 1.7, 7.0)
                given = (x, routing, gate_up, down, plan)
                yield f"experts, {format}, clamped, {plan.path}", lambda a=given, g=glu: dispatch.run_experts(*a, glu=g)
            for activation in ("gelu_tanh", "relu2"):
                first = _weights(shape.experts, shape.inner, shape.hidden, format, 1)
                given = (x, routing, gate_up if activation == "gelu_tanh" else first, down, plan)
                yield (
                    f"experts, {format}, {activation}, {plan.path}",
                    lambda a=given, b=activation: dispatch.run_experts(*a, activation=b),
                )
        if format != "plain":
            plain = empty(shape.experts, shape.hidden, shape.inner)
            yield f"quantise, {format}", lambda a=(plain, down): triton_quantize.quantize_into(*a)


def _weights(experts: int, outputs: int, inputs: int, format: formats.Format, halves: int) -> formats.ExpertWeights:
    values = empty(experts, outputs, inputs, dtype=torch.bfloat16 if format == "plain" else torch.uint8)
    scales = formats.scale_shape(experts, outputs, inputs, format, halves)
    dtype = formats.scale_dtype(format)
    return formats.ExpertWeights(values, None if scales is None else empty(*scales, dtype=dtype), format, halves)


def compile_instead(capability: int, seen: Callable[[Any, float], None]) -> None:
    """From now on, compile kernels instead of launching them. `seen` collects each with its seconds."""
    triton.runtime.driver.set_active(OfflineDriver(capability))  # type: ignore[arg-type]
    watch_compilations()  # as a worker does; then Triton writes the constants of each kernel as JSON
    # Compile the wait for the previous kernel, too.
    follow_options = triton_math.follow_options
    for module in list(sys.modules.values()):
        if getattr(module, "follow_options", None) is follow_options:
            module.follow_options = lambda device: {"launch_pdl": True}  # type: ignore[attr-defined]

    # It refuses the device of tensors without memory.
    def takes(x: torch.Tensor, weights: Any, silu: bool) -> bool:
        coded_apart = isinstance(weights, CodedMatrix) and weights.format == "mxfp8"
        return capability // 10 == 9 and x.dtype.itemsize == 2 and not coded_apart

    gluon_linear.takes = takes  # type: ignore[assignment]

    def compiled(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            begun_s = time.perf_counter()
            seen(kernel.run(*args, grid=grid, warmup=True, **options), time.perf_counter() - begun_s)

        return run

    JITFunction.__getitem__ = compiled  # type: ignore[method-assign,assignment]


def resources(kernel: Any) -> str:
    """Registers, spilled bytes and shared memory, as the assembler reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    assert match is not None, told.stdout
    registers, stack = match.groups()
    return f"{registers:>3} registers {stack:>4} stack {kernel.metadata.shared:>7} shared"


def cases(numbers_of_rows: Iterable[int], families: Iterable[str]) -> Iterator[Case]:
    """All launches of steps of these families; without families the launches of Qwen3's two shapes."""
    shapes = {family: OTHERS[family] for family in families} or USUAL
    for rows in numbers_of_rows:
        for label, shape in shapes.items():
            of_shape = [*products(shape, rows), *dense_step(shape, rows)]
            if shape.experts:
                of_shape += sparse_step(shape, rows)
            elif shape is DENSE:
                of_shape += adapters(shape, rows)
            if shape is SPARSE:
                of_shape += [*linear_attention(rows), *latent_attention(rows)]
            yield from ((f"{label}, {rows} rows: {case}", run) for case, run in of_shape)


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="compile only cases whose name contains one of these")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--families", nargs="+", choices=OTHERS, help="in the place of Qwen3's two shapes")
    parser.add_argument("--capability", type=int, default=90, help="compute capability times ten, such as 90")
    args = parser.parse_args()
    known: set[str] = set()
    name = ""

    def seen(kernel: Any, seconds: float) -> None:
        if kernel.hash not in known:
            known.add(kernel.hash)
            print(f"{name:48} {kernel.metadata.name:24} {resources(kernel)}  {seconds:5.1f} s", flush=True)

    compile_instead(args.capability, seen)
    for name, run in cases(args.rows, args.families or ()):
        if any(only in name for only in args.only):
            run()
    capability = f"{args.capability // 10}.{args.capability % 10}"
    print(f"{len(known)} kernels compiled for compute capability {capability} by Triton {triton.__version__}")


if __name__ == "__main__":
    main()
