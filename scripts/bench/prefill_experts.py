"""Measures what prefill consists of on a Hopper GPU: expert products, attention, dense products, and whole layers.

    PYTHONPATH=.:kernels python -m scripts.bench.prefill_experts [--parts experts attention dense between layers]
        [--quick]

Each part runs in a process of its own with a time limit, so a candidate that hangs or faults does not stop the others.
Every result is one line of JSON. A candidate that fails to compile or run gives a line with its error.

    experts    Qwen3-30B-A3B's layer of experts: today's plan, and the products over padded groups; each launch too
    attention  prefill attention: the paged kernel, and gather plus attention over gathered keys and values
    dense      the four products of Qwen3-8B's layer: cuBLAS (plus SiLU), and the experts' kernel with one expert
    between    what lies between the products: norms, q/k/v, and the choice of experts by the tile of a program
    layers     kernels of a whole step of two layers, microseconds a layer, from torch's profiler

`tflops` counts the products that have to be done: no padding, and for attention only the visible positions. `error` is
the relative error of a sample of tokens against float64.

Measured on an H200 (scripts/bench/results/prefill_parts_h200.jsonl), and in brackets what was predicted, us:

    experts, tokens        512        2,048      4,096      8,192          16,384
    floor (read, compute)  258        258        391        783            1,566
    today                  359 (300)  513 (548)  816 (950)  1,441 (1,850)  2,786 (3,650)
    padded, all launches   363 (360)  467 (480)  667 (690)  1,168 (1,190)  2,230 (2,250)
    its two products       324 (330)  391 (430)  571 (590)  976 (1,020)    1,842 (1,950)

    attention, 32/4 heads  1x4K 387 today (345), 241 gathered (260); 4x4K 1,518 (1,380), 883 (1,000);
                           2K over 16K 1,459 (1,473), 868 (1,090); the copy is part of it: 11, 27 and 25
    dense, 8B, 16,384      gate/up 4,432 with SiLU by cuBLAS (4,590), 4,607 ours (4,700); down 2,279 and 2,146,
                           q/k/v 1,210 and 1,117, o 722 and 716 (predicted: ours 3 to 8% slower)
    layers, 16,384         30B-A3B 5.8 ms a layer (6.0), experts 48% (62%), attention 29% (23%);
                           8B 11.2 ms (11.5), attention 17% (13%)

    Predicted next, with both kernels in the layers and blocks of attention from one list: odd lengths 263 -> 200;
    30B-A3B 4.4 ms a layer at 16,384 tokens (77K tokens/s of 48 layers), 8B 10.5 ms (43K of 36).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rollout_kernels.attention.gluon_prefill import gathered_attention
from rollout_kernels.attention.triton_gather_kv import gather_kv, gathered_rows
from rollout_kernels.attention.triton_gathered_items import block_count, prefill_items
from rollout_kernels.attention.triton_prefill import prefill_attention
from rollout_kernels.moe import gluon_experts, triton_router
from rollout_kernels.moe.dispatch import GroupedPlan, run_experts
from rollout_kernels.moe.triton_group_pairs import group_pairs
from rollout_kernels.moe.triton_grouped_experts import GroupedConfig, combine, grouped_down, grouped_gate_up
from rollout_kernels.moe.triton_padded_groups import gather_sum, pad_groups, spread_rows
from rollout_kernels.moe.triton_router import Routing, moe_choose
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm, finish_qkv, gated
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from scripts.bench.cuda_timing import graph_us, matrix_rate, read_bandwidth
from scripts.bench.moe_layers import SHAPES, Layer, Tokens, exact, make_layers, make_tokens
from scripts.bench.output import circumstances
from scripts.bench.shapes import model_config

TOKENS = (512, 2048, 4096, 8192, 16384)
PARTS = ("experts", "attention", "dense", "between", "layers")
_LIMIT_S = {"experts": 60, "attention": 60, "dense": 45, "between": 60, "layers": 60}
#: What a candidate may raise: compiling it, too much shared memory, the driver.
_FAILURES = (CompilationError, OutOfResources, RuntimeError, AssertionError, ValueError)
_SAMPLE = 64  # tokens whose error is computed
_PAGE = 16


def say(part: str, **facts: Any) -> None:
    """Print a line of JSON at once."""
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in facts.items()}
    print(json.dumps({"part": part, **rounded}), flush=True)


def attempt(part: str, facts: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Print what `measure` returns, or its error."""
    try:
        say(part, **facts, **measure())
    except _FAILURES as error:
        say(part, **facts, failed=f"{type(error).__name__}: {str(error)[:600]}")


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the exact result."""
    return ((got.double() - expected).norm() / expected.norm()).item()


# --- experts ---------------------------------------------------------------------------------------------------------


def padded_experts(
    layer: Layer, tokens: Tokens, stages: int, scaled: bool, times: dict[str, float] | None = None
) -> torch.Tensor:
    """The layer by products over padded groups. With `times`, also the microseconds of each launch."""
    routing, gate_up, down = tokens.routing, layer.gate_up.values_ENK, layer.down.values_ENK
    top_k, dtype = routing.experts_TK.shape[1], tokens.x_TH.dtype
    groups = pad_groups(routing.experts_TK, gate_up.shape[0])
    x_RH = spread_rows(tokens.x_TH, groups, top_k)
    h_RI = gluon_experts.padded_gate_up(x_RH, groups, gate_up, stages=stages)
    parts, scales = gluon_experts.padded_down(h_RI, groups, down, scaled=scaled, stages=stages)
    out = gather_sum(parts, scales, groups, routing.weights_TK, dtype)
    if times is not None:
        times["group"] = graph_us(lambda: pad_groups(routing.experts_TK, gate_up.shape[0]))
        times["spread"] = graph_us(lambda: spread_rows(tokens.x_TH, groups, top_k))
        times["gate_up"] = graph_us(lambda: gluon_experts.padded_gate_up(x_RH, groups, gate_up, stages=stages))
        times["down"] = graph_us(lambda: gluon_experts.padded_down(h_RI, groups, down, scaled=scaled, stages=stages))
        times["sum"] = graph_us(lambda: gather_sum(parts, scales, groups, routing.weights_TK, dtype))
    return out


def grouped_experts(layer: Layer, tokens: Tokens, plan: GroupedPlan, times: dict[str, float]) -> None:
    """The microseconds of each launch of today's path."""
    routing, top_k = tokens.routing, tokens.routing.experts_TK.shape[1]
    experts = layer.gate_up.values_ENK.shape[0]
    groups = group_pairs(routing.experts_TK, experts, plan.tile_rows)
    h = grouped_gate_up(tokens.x_TH, groups, layer.gate_up, top_k, plan.gate_up)
    parts = grouped_down(h, groups, routing.weights_TK, layer.down, plan.down)
    times["group"] = graph_us(lambda: group_pairs(routing.experts_TK, experts, plan.tile_rows))
    times["gate_up"] = graph_us(lambda: grouped_gate_up(tokens.x_TH, groups, layer.gate_up, top_k, plan.gate_up, h))
    times["down"] = graph_us(lambda: grouped_down(h, groups, routing.weights_TK, layer.down, plan.down, parts))
    times["sum"] = graph_us(lambda: combine(parts, tokens.x_TH.dtype))


def bench_experts(quick: bool) -> None:
    """Today's path, and the padded one with stages and kinds of parts."""
    shape = SHAPES["qwen3-30b-a3b"]
    layer = make_layers(shape, "plain", 1)[0]
    say("experts", read_tbps=read_bandwidth() / 1e12, matrix_tflops=matrix_rate() / 1e12)
    today = GroupedPlan(GroupedConfig(128, 64, 8, 4), GroupedConfig(128, 64, 4, 3), 128)
    wide = GroupedPlan(GroupedConfig(128, 64, 8, 3), GroupedConfig(256, 64, 8, 3), 128)
    for count in (2048, 8192) if quick else TOKENS:
        tokens = make_tokens(shape, count, seed=count)
        few = torch.arange(0, count, max(1, count // _SAMPLE), device="cuda")
        routing = Routing(tokens.routing.experts_TK[few], tokens.routing.weights_TK[few])
        expected = exact(layer, Tokens(tokens.x_TH[few], routing, tokens.distinct))
        work = 2 * count * shape.top_k * 3 * shape.hidden * shape.inner

        def measured(
            run: Callable[[], torch.Tensor],
            launches: Callable[[dict[str, float]], object],
            few: torch.Tensor = few,
            expected: torch.Tensor = expected,
            work: int = work,
        ) -> dict[str, Any]:
            error = relative(run()[few], expected)
            us = graph_us(run)
            times: dict[str, float] = {}
            launches(times)
            products = work / (times["gate_up"] + times["down"]) / 1e6
            launched = {name: round(value, 1) for name, value in times.items()}
            return {"us": us, "tflops": work / us / 1e6, "products": products, "error": error, "launches": launched}

        candidates: list[tuple[str, Callable[[], torch.Tensor], Callable[[dict[str, float]], object]]] = []
        for name, plan in (("today", today), ("today, wide", wide)):
            candidates.append(
                (
                    name,
                    lambda plan=plan, t=tokens: run_experts(t.x_TH, t.routing, layer.gate_up, layer.down, plan),
                    lambda times, plan=plan, t=tokens: grouped_experts(layer, t, plan, times),
                )
            )
        for stages, scaled in ((4, True), (4, False), (3, True)):
            candidates.append(
                (
                    f"padded, {stages} stages, {'f16 and scales' if scaled else 'bf16'}",
                    lambda s=stages, c=scaled, t=tokens: padded_experts(layer, t, s, c),
                    lambda times, s=stages, c=scaled, t=tokens: padded_experts(layer, t, s, c, times),
                )
            )
        for name, run, launches in candidates:
            attempt("experts", {"candidate": name, "tokens": count}, lambda r=run, n=launches: measured(r, n))


# --- attention -------------------------------------------------------------------------------------------------------

# name: [(queries, context)], all chunks of one step.
_CHUNKS = {
    "1x4K": [(4096, 4096)],
    "4x4K": [(4096, 4096)] * 4,
    "2K over 16K": [(2048, 18432)],
    "20x700": [(700, 700)] * 20,
    "odd": [(777, 1500), (130, 130), (1, 2000), (2048, 3001)],
}


def exact_attention(q_HD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
    """One query over all positions, in float64."""
    q_GRD = q_HD.double().view(k_NGD.shape[1], -1, q_HD.shape[-1])
    weights = torch.softmax(torch.einsum("grd,ngd->grn", q_GRD, k_NGD.double()) * q_HD.shape[-1] ** -0.5, -1)
    return torch.einsum("grn,ngd->grd", weights, v_NGD.double()).flatten(0, 1)


def bench_attention(quick: bool) -> None:
    """Today's kernel, and gathered attention with two or three stages, with and without turns."""
    heads, dim = 32, 128
    for kv_heads, (name, chunks) in itertools.product((4, 8), _CHUNKS.items()):
        if name not in ("4x4K", "2K over 16K") and (quick or kv_heads == 8):
            continue
        contexts, queries = [context for _, context in chunks], [count for count, _ in chunks]
        width, most = -(-max(contexts) // _PAGE), max(queries)
        pages = len(chunks) * width + 1
        k, v = (torch.randn(pages, _PAGE, kv_heads, dim, device="cuda").bfloat16() for _ in "kv")
        table = (torch.randperm(pages - 1, device="cuda") + 1).int().view(len(chunks), width)
        lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
        starts = torch.tensor([0, *itertools.accumulate(queries)], device="cuda", dtype=torch.int32)
        q = torch.randn(sum(queries), heads, dim, device="cuda").bfloat16() * 2
        pairs = sum(context - count + i + 1 for count, context in chunks for i in range(count))
        work = 4 * dim * heads * pairs
        rows, blocks = gathered_rows(contexts), block_count(queries)

        def gather(k=k, v=v, table=table, lens=lens, rows=rows, contexts=contexts):
            return gather_kv(k, v, table, lens, rows=rows, most=max(contexts), dtype=torch.bfloat16)

        def error_of(out: torch.Tensor, q=q, k=k, v=v, table=table, chunks=chunks, starts=starts) -> float:
            worst = 0.0
            for row, (count, context) in list(enumerate(chunks))[:4]:
                for i in sorted({0, 1, 63, 64, 127, 128, count // 3, count - 1} & set(range(count))):
                    at = torch.arange(context - count + i + 1, device="cuda")
                    page = table[row][at // _PAGE].long()
                    expected = exact_attention(q[int(starts[row]) + i], k[page, at % _PAGE], v[page, at % _PAGE])
                    error = relative(out[int(starts[row]) + i], expected)
                    worst = max(worst, error if error == error else float("inf"))
            return worst

        facts = {"shape": name, "heads": f"{heads}/{kv_heads}"}

        def measured(run: Callable[[], torch.Tensor], error_of=error_of, work=work) -> dict[str, Any]:
            error = error_of(run())
            us = graph_us(run)
            return {"us": us, "tflops": work / us / 1e6, "error": error}

        attempt(
            "attention",
            {"candidate": "today", **facts},
            lambda q=q, k=k, v=v, table=table, starts=starts, lens=lens, most=most, measured=measured: measured(
                lambda: prefill_attention(q, k, v, table, starts, lens, max_query=most, scale=dim**-0.5, window=None)
            ),
        )
        attempt("attention", {"candidate": "gather", **facts}, lambda gather=gather: {"us": graph_us(gather)})
        for stages, turns in ((2, False), (2, True), (3, True)):

            def run(gather=gather, q=q, starts=starts, lens=lens, blocks=blocks, stages=stages, turns=turns):
                items = prefill_items(starts, lens, blocks, None)
                keys, values = gather()
                return gathered_attention(
                    q, keys, values, items, scale=dim**-0.5, window=None, stages=stages, turns=turns
                )

            label = f"gathered, {stages} stages, {'turns' if turns else 'no turns'}"
            attempt("attention", {"candidate": label, **facts}, lambda run=run, measured=measured: measured(run))


# --- dense products --------------------------------------------------------------------------------------------------


def bench_dense(quick: bool) -> None:
    """Products of Qwen3-8B: cuBLAS, and our kernel with blocks of columns."""
    for tokens in (8192,) if quick else (16384, 8192, 4096):
        tiles = gluon_experts.all_rows(tokens, torch.device("cuda"))
        for name, outputs, inputs in (
            ("gate_up", 24576, 4096), ("down", 4096, 12288), ("qkv", 6144, 4096), ("o", 4096, 4096)
        ):  # fmt: skip
            silu = name == "gate_up"
            x = torch.randn(tokens, inputs, device="cuda").bfloat16()
            w = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, inputs**-0.5)
            work = 2 * tokens * outputs * inputs
            few = torch.arange(0, tokens, tokens // _SAMPLE, device="cuda")
            expected = torch.cat([x[few].double() @ part.double().T for part in w.split(4096)], 1)
            if silu:
                gate, up = expected.chunk(2, dim=1)
                expected = F.silu(gate) * up

            def measured(run, few=few, expected=expected, work=work) -> dict[str, Any]:
                error = relative(run()[few], expected)
                us = graph_us(run)
                return {"us": us, "tflops": work / us / 1e6, "error": error}

            def by_cublas(x=x, w=w, silu=silu):
                return gated(F.linear(x, w)) if silu else F.linear(x, w)

            facts = {"product": name, "tokens": tokens}
            attempt("dense", {"candidate": "cuBLAS", **facts}, lambda run=by_cublas, m=measured: m(run))
            if name in ("down", "o"):
                residual = torch.zeros(tokens, outputs, device="cuda", dtype=torch.bfloat16)
                sums = {"candidate": "cuBLAS, added to the residual", **facts}
                attempt("dense", sums, lambda x=x, w=w, r=residual: {"us": graph_us(lambda: r.addmm_(x, w.T))})
            if silu:
                alone = {"candidate": "cuBLAS without SiLU", **facts}
                attempt("dense", alone, lambda x=x, w=w: {"us": graph_us(lambda: F.linear(x, w))})
            for at_once in (8, outputs // 256) if not silu else (8, 16, 32):

                def ours(x=x, w=w, silu=silu, at_once=at_once, tiles=tiles):
                    return gluon_experts.dense(x, tiles, w, silu=silu, at_once=at_once)

                label = f"ours, {at_once} columns"
                attempt("dense", {"candidate": label, **facts}, lambda run=ours, m=measured: m(run))


# --- between the products ---------------------------------------------------------------------------------------------


def bench_between(quick: bool) -> None:
    """Norms, the choice of experts and the end of q/k/v for many tokens, by warps and tiles; with the floor."""
    device, bandwidth = torch.device("cuda"), read_bandwidth()
    for tokens in (16384,) if quick else (16384, 4096):
        for hidden in (2048, 4096):
            residual = torch.randn(tokens, hidden, device=device).bfloat16()
            parts, weight = torch.randn_like(residual)[None], torch.ones(hidden, device=device).bfloat16()
            us = graph_us(lambda r=residual, p=parts, w=weight: add_rms_norm(r, p, w, 1e-6))
            floor_us = 4 * residual.nbytes / bandwidth * 1e6
            say("between", op="norm", tokens=tokens, hidden=hidden, us=us, floor_us=floor_us)
        for heads, kv_heads in ((32, 4), (32, 8)):
            parts = torch.randn(1, tokens, (heads + 2 * kv_heads) * 128, device=device).bfloat16()
            cos, sin = torch.randn(2, tokens, 1, 128, device=device)
            norms = torch.ones(2, 128, device=device).bfloat16()
            caches = torch.empty(2, tokens // _PAGE + 1, _PAGE, kv_heads, 128, device=device).bfloat16()
            slots = torch.arange(tokens, device=device)

            def run(p=parts, n=norms, c=cos, s=sin, at=slots, kv=caches, h=heads) -> torch.Tensor:
                return finish_qkv(p, None, n, 1e-6, c, s, at, kv[0], kv[1], h)

            floor_us = 2 * parts.nbytes / bandwidth * 1e6
            say("between", op="qkv", tokens=tokens, kv_heads=kv_heads, us=graph_us(run), floor_us=floor_us)
        for experts, top_k in ((128, 8), (256, 8)):
            logits = torch.randn(1, tokens, experts, device=device).bfloat16()
            for tile in (0, 1024, 2048, 4096, 8192):
                triton_router.MANY_TOKENS, triton_router._TILE = (1 if tile else 1 << 30), tile
                us = graph_us(lambda x=logits, k=top_k: moe_choose(x, torch.bfloat16, k, True))
                say("between", op="choose", tokens=tokens, experts=experts, tile=tile, us=us)


# --- whole layers ----------------------------------------------------------------------------------------------------


def bench_layers(quick: bool) -> None:
    """Kernels of a prefill step of prompts of 4,096 tokens, microseconds a layer."""
    for shape, prompts in (("qwen3-30b-a3b", (4,)), ("qwen3-8b", (4,))) if quick else (
        ("qwen3-30b-a3b", (1, 4)), ("qwen3-8b", (1, 4))
    ):  # fmt: skip
        for count in prompts:
            attempt("layers", {"shape": shape, "tokens": 4096 * count}, lambda s=shape, c=count: profile_layers(s, c))
            torch.cuda.empty_cache()


def profile_layers(shape: str, prompts: int, layers: int = 3, length: int = 4096) -> dict[str, Any]:
    """Run a model of a few layers of a shape on `prompts` prompts; prints a line for each kernel.

    The name identifies a kernel; the four products of cuBLAS may share names.
    """
    from rollout.config import ModelSettings
    from rollout.models.batch import AttentionBatch, KVCache, PromptChunk
    from rollout.models.fused import FusedDecoder
    from rollout.models.language_model import native
    from rollout.models.loader import load_model
    from scripts.bench.profiled_steps import profile_steps

    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        config = {**model_config(shape), "num_hidden_layers": layers, "max_window_layers": layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        model = load_model(ModelSettings(path=folder, load_format="random"), device).model
    decoder = FusedDecoder(native(model))
    columns, tokens = length // _PAGE, prompts * length
    kv = KVCache.allocate(model.spec, prompts * columns + 1, _PAGE, torch.bfloat16, device)
    table = torch.randperm(prompts * columns, device=device, dtype=torch.int32).view(prompts, columns) + 1
    positions = torch.arange(length, device=device).repeat(prompts)
    pages = table.repeat_interleave(length, 0).gather(1, (positions // _PAGE)[:, None])[:, 0].long()
    ids = torch.randint(model.spec.vocab, (tokens,), device=device)

    def step() -> None:
        batch = AttentionBatch(
            positions_T=positions,
            kv_slots_T=pages * _PAGE + positions % _PAGE,
            page_table_BP=table,
            context_lens_B=torch.full((prompts,), length, dtype=torch.int32, device=device),
            max_context=length,
            chunks=tuple(PromptChunk(i * length, length, length) for i in range(prompts)),
            query_starts_C1=torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device),
        )
        decoder(ids, batch, kv)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    wall_us = (time.perf_counter() - begun) / 3 / layers * 1e6

    def three_steps() -> None:
        for _ in range(3):
            step()

    events = profile_steps(three_steps)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        # Launches of one kernel with different grids are different products.
        grid = event.get("args", {}).get("grid", [])
        spent[f"{event['name'][:70]} {grid}"].append(event["dur"])
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        each = sum(times) / 3 / layers
        if each >= 1.0:
            say(
                "layers", shape=shape, tokens=tokens, kernel=name, us_a_layer=each, calls_a_step=len(times) / 3,
                us_a_call=sum(times) / len(times),
            )  # fmt: skip
    kernels_us = sum(map(sum, spent.values())) / 3 / layers
    whole = {"qwen3-30b-a3b": 48, "qwen3-8b": 36}[shape]
    return {
        "wall_us_a_layer": wall_us,
        "kernels_us_a_layer": kernels_us,
        "tokens_per_s_of_all_layers": tokens / (wall_us * whole) * 1e6,
    }


def main() -> None:
    """Run the parts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--here", action="store_true", help="run the parts in this process")
    args = parser.parse_args()
    run = {
        "experts": bench_experts,
        "attention": bench_attention,
        "dense": bench_dense,
        "between": bench_between,
        "layers": bench_layers,
    }
    if not args.here:
        say("run", **circumstances())
    for part in args.parts:
        if args.here:
            run[part](args.quick)
            continue
        begun = time.perf_counter()
        command = [sys.executable, "-m", "scripts.bench.prefill_experts", "--here", "--parts", part]
        command += ["--quick"] if args.quick else []
        try:
            code: int | str = subprocess.run(command, timeout=_LIMIT_S[part], env=os.environ).returncode
        except subprocess.TimeoutExpired:
            code = "stopped at its time limit"
        say(part, ended=code, seconds=round(time.perf_counter() - begun, 1))


if __name__ == "__main__":
    main()
