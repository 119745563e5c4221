"""Measures the Triton attention kernels on a CUDA machine: microseconds per layer, the floor, and tuning sweeps.

    PYTHONPATH=.:kernels python -m scripts.bench.attention FILE [--sweep]
        [--kinds decode prefill] [--heads 32/8 32/4] [--shapes 1x256 32x4K 32x4Kx8 mix] [--page-size 16]
        [--window 4096] [--fp8] [--min-tiles 0 1 8]

Decode: one query per row over `rows x context` tokens of KV in shuffled pages, in bf16 or as e4m3 codes with scales. A
captured graph rotates over the caches of several layers, so that no KV is read from the L2 cache. The floor of a layer
is the bytes of the visible keys and values over the read bandwidth of the same run. `mix` is 32 rows of log-normal
lengths; in 32x4Kx8, groups of 8 rows share all but their last 40 positions. The plan, one for all layers of a step, is
timed separately. Prefill: chunks over a cached prefix, compared
with the matrix rate of a large product.

Every configuration is first checked against float64; decode also in a graph whose lengths change between replays.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rollout_kernels.attention.segments import make_segments
from rollout_kernels.attention.triton_decode import decode_attention, default_decode_config
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, plan_decode_work
from rollout_kernels.attention.triton_prefill import PrefillConfig, default_prefill_config, prefill_attention
from rollout_kernels.common.fp8 import quantize_heads, values_of
from triton.runtime.errors import OutOfResources

from scripts.bench.cuda_timing import graph_us, matrix_rate, read_bandwidth
from scripts.bench.output import write_results

DIM = 128
DECODE_SHAPES = ("1x1K", "1x4K", "1x16K", "1x32K", "8x4K", "32x1K", "32x4K", "32x16K", "128x1K", "128x4K", "mix")
# name: [(queries, context)], all chunks of one step.
PREFILL_SHAPES = {
    "1x4K": [(4096, 4096)],
    "6x700": [(700, 700)] * 6,
    "2K over 16K": [(2048, 18432)],
    "32x128": [(128, 128)] * 32,
    "32 over 4K": [(32, 4096)],
}
_ROTATED_BYTES = 240e6  # KV of all layers together, four times the L2 cache
_OWN = 40  # positions that a row of a group has alone


def lengths(shape: str) -> list[int]:
    """Contexts of a decode shape."""
    if shape == "mix":
        normal = torch.randn(32, generator=torch.Generator().manual_seed(0)).mul(0.8).add(math.log(3000)).exp()
        return [min(16384, int(n)) for n in normal]
    rows, context = shape.split("x")[:2]
    tokens = int(context.removesuffix("K")) * (1024 if context.endswith("K") else 1)
    return [tokens] * int(rows)


def common_positions(shape: str, page_size: int) -> list[int]:
    """For each row of a decode shape but the last, how many first positions it shares with the next one."""
    lens = lengths(shape)
    together = int(shape.split("x")[2]) if shape.count("x") == 2 else 1
    shared = (lens[0] - _OWN) // page_size * page_size
    return [shared if row % together else 0 for row in range(1, len(lens))]


class Problem:
    """Caches of several layers in shuffled pages, one page table, and lengths. `common` says what neighbours share."""

    def __init__(
        self,
        lens: list[int],
        heads: int,
        kv_heads: int,
        page_size: int,
        layers: int,
        fp8: bool = False,
        common: Sequence[int] = (),
    ) -> None:
        self.common = common
        width = -(-max(lens) // page_size)
        pages = len(lens) * width + 1
        shape = (pages, page_size, kv_heads, DIM)
        self.kv = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(layers)]
        self.scales: list[torch.Tensor | None] = [None] * layers
        for layer in range(layers) if fp8 else ():
            coded = [quantize_heads(cache.flatten(0, 1)) for cache in self.kv[layer]]
            self.kv[layer] = [codes.view(shape) for codes, _ in coded]
            scales = [scales.view(shape[:3]).transpose(1, 2) for _, scales in coded]
            self.scales[layer] = torch.stack(scales, dim=1).contiguous()
        self.table = (torch.randperm(pages - 1, device="cuda") + 1).int().view(len(lens), width)
        for row, positions in enumerate(common, start=1):
            self.table[row, : positions // page_size] = self.table[row - 1, : positions // page_size]
        self.lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
        self.heads, self.kv_heads = heads, kv_heads
        self.scale = DIM**-0.5

    def queries(self, count: int) -> torch.Tensor:
        """Random queries, wide enough for scores that differ."""
        return torch.randn(count, self.heads, DIM, device="cuda", dtype=torch.bfloat16) * 2

    def segments(self, config: DecodeConfig) -> torch.Tensor | None:
        """The positions that rows share, as the plan takes them."""
        at_once = config.rows_at_once(self.heads // self.kv_heads)
        segments_SW = make_segments(self.common, len(self.lens), at_once, _OWN)
        return None if segments_SW is None else torch.from_numpy(segments_SW).cuda()

    def exact(self, q_HD: torch.Tensor, row: int, position: int, window: int | None, layer: int = 0) -> torch.Tensor:
        """Float64 attention of the query at `position` of a row."""
        first = 0 if window is None else max(0, position - window + 1)
        at = torch.arange(first, position + 1, device="cuda")
        page_size = self.kv[0][0].shape[1]
        pages = self.table[row][at // page_size].long()
        k, v = (cache[pages, at % page_size] for cache in self.kv[layer])
        scales = self.scales[layer]
        if scales is None:
            k, v = k.double(), v.double()
        else:
            of_k, of_v = scales[pages, :, :, at % page_size].double().unbind(1)
            k, v = values_of(k).double() * of_k[..., None], values_of(v).double() * of_v[..., None]
        q_GRD = q_HD.double().view(self.kv_heads, -1, DIM)
        weights = torch.softmax(torch.einsum("grd,ngd->grn", q_GRD, k) * self.scale, -1)
        return torch.einsum("grn,ngd->grd", weights, v).flatten(0, 1)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the exact result; NaN counts as infinite."""
    error = ((got.double() - expected).norm() / expected.norm()).item()
    return math.inf if math.isnan(error) else error


def decode_candidates() -> Iterator[DecodeConfig]:
    """Configurations of the kernel. Shares and their minimal size are swept separately."""
    grid = [(32, w, s) for w, s in itertools.product((2, 4), (3, 4, 6))]
    grid += [(64, w, s) for w, s in itertools.product((2, 4, 8), (2, 3, 4))]
    grid += [(128, w, s) for w, s in itertools.product((4, 8), (2, 3))]
    grid += [(256, 8, s) for s in (1, 2)]
    for (block_n, warps, stages), fused in itertools.product(grid, (True, False)):
        yield DecodeConfig(block_n=block_n, num_warps=warps, num_stages=stages, fused=fused)
    yield DecodeConfig(max_registers=168)
    for stages, registers in itertools.product((2, 3), (96, 128, 168)):  # so that more programs fit
        yield DecodeConfig(block_n=32, num_warps=2, num_stages=stages, max_registers=registers)
    yield DecodeConfig(chunk=1024)


def check_decode(
    config: DecodeConfig, heads: int, kv_heads: int, page_size: int, window: int | None, fp8: bool = False
) -> float:
    """Largest error of a captured graph that is replayed with several length vectors."""
    problem = Problem([4500] * 6, heads, kv_heads, page_size, 1, fp8)
    q, lens, (k, v) = problem.queries(6), problem.lens, problem.kv[0]
    out = torch.empty_like(q)

    def step() -> None:
        work = plan_decode_work(lens, kv_heads, group=heads // kv_heads, window=window, config=config, max_context=4500)
        got = decode_attention(
            q, k, v, problem.table, lens, scale=problem.scale, window=window, scales_P2GS=problem.scales[0], work=work
        )
        out.copy_(got)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = 0.0
    for new in ([1, 1, 1, 1, 1, 1], [17, 1, 4500, 0, 63, 1000], [4097, 128, 129, 2, 3000, 15], [4500] * 6):
        lens.copy_(torch.tensor(new, device="cuda"))
        out.fill_(math.nan)
        graph.replay()
        assert bool((out[lens == 0] == 0).all())
        for row, length in enumerate(new):
            if length:
                worst = max(worst, relative(out[row], problem.exact(q[row], row, length - 1, window)))
    return worst


def time_decode(problem: Problem, config: DecodeConfig, window: int | None) -> tuple[float, float]:
    """Microseconds of a layer, and of the plan."""
    q, segments_SW = problem.queries(len(problem.lens)), problem.segments(config)

    def make_plan():
        most = int(problem.table.shape[1]) * problem.kv[0][0].shape[1]
        return plan_decode_work(
            problem.lens, problem.kv_heads, group=problem.heads // problem.kv_heads, window=window, config=config,
            max_context=most, segments_SW=segments_SW,
        )  # fmt: skip

    work = make_plan()

    def layers() -> None:
        for (k, v), scales in zip(problem.kv, problem.scales, strict=True):
            decode_attention(
                q, k, v, problem.table, problem.lens, scale=problem.scale, window=window, scales_P2GS=scales, work=work
            )

    return graph_us(layers) / len(problem.kv), graph_us(make_plan)


def fits(check: Callable[[], float]) -> float | None:
    """The check's error, or None if the configuration needs too much shared memory."""
    try:
        return check()
    except OutOfResources:
        return None


def usable(configs: list, compile_one: Callable, check: Callable) -> list:
    """The configurations that fit and are right. They are compiled in parallel first."""
    with ThreadPoolExecutor(12) as pool:
        fit = list(pool.map(lambda config: fits(lambda: compile_one(config)) is not None, configs))
    good = []
    for config, ok in zip(configs, fit, strict=True):
        error = check(config) if ok else math.inf
        if ok:
            assert error < 1e-2, (config, error)
            good.append((config, error))
    return good


def bench_decode(args: argparse.Namespace, bandwidth: float, heads: int, kv_heads: int) -> list[dict]:
    """Time all shapes for one number of heads."""
    group = heads // kv_heads
    bases = [
        default_decode_config(DIM, torch.bfloat16, rows, args.fp8, shared, group)
        for rows, shared in itertools.product((1, 32, 128), (False, True))
    ]
    chunked = dataclasses.replace(bases[-2], chunk=1024)
    configs = [*dict.fromkeys([*bases, *decode_candidates()])] if args.sweep else [*bases, chunked]
    tiny = Problem([700], heads, kv_heads, args.page_size, 1, args.fp8)

    def compile_one(config: DecodeConfig) -> float:
        how = {"group": group, "window": args.window, "config": config, "max_context": 700}
        work = plan_decode_work(tiny.lens, kv_heads, **how)
        k, v = tiny.kv[0]
        options = {"scale": tiny.scale, "window": args.window, "scales_P2GS": tiny.scales[0], "work": work}
        decode_attention(tiny.queries(1), k, v, tiny.table, tiny.lens, **options)
        return 0.0

    good = usable(
        configs, compile_one, lambda c: check_decode(c, heads, kv_heads, args.page_size, args.window, args.fp8)
    )
    rows = []
    for shape in args.shapes or DECODE_SHAPES:
        lens = lengths(shape)
        common = common_positions(shape, args.page_size)
        seen = sum(min(n, args.window or n) for n in lens) - sum(common)
        kv_bytes = seen * kv_heads * 2 * (DIM + 4 if args.fp8 else DIM * 2)
        layers = min(64, max(2, math.ceil(_ROTATED_BYTES / kv_bytes)))
        problem = Problem(lens, heads, kv_heads, args.page_size, layers, args.fp8, common)
        timed = []
        for config, error in good:
            several = ((1, 2, 3, 4, 6, 8), (0, 1, 2, 4)) if args.sweep else ((config.programs_per_sm,), args.min_tiles)
            for per_sm, min_tiles in itertools.product(*several):
                config = dataclasses.replace(config, programs_per_sm=per_sm, min_tiles=min_tiles)
                us, plan_us = time_decode(problem, config, args.window)
                timed.append({"us": us, "plan_us": plan_us, "error": error, **dataclasses.asdict(config)})
        timed.sort(key=lambda entry: entry["us"])
        floor_us = kv_bytes / bandwidth * 1e6
        best = timed[0]
        base = default_decode_config(DIM, torch.bfloat16, len(lens), args.fp8, any(common), group)
        default = min((t for t in timed if _same(t, base)), key=lambda t: t["us"], default=best)
        row = {"kind": "decode", "heads": f"{heads}/{kv_heads}", "shape": shape, "floor_us": floor_us}
        rows.append({**row, "default": default, "best": best})
        print(
            f"decode  {heads}/{kv_heads:<3} {shape:>7}  floor {floor_us:8.1f}  default {default['us']:8.1f} us "
            f"x{default['us'] / floor_us:.2f} {kv_bytes / default['us'] / 1e6:5.2f} TB/s  plan {best['plan_us']:.1f}  "
            f"best {best['us']:8.1f} us {_short(best)}",
            flush=True,
        )
        del problem
    return rows


def _same(entry: dict, config: DecodeConfig) -> bool:
    return all(entry[name] == value for name, value in dataclasses.asdict(config).items())


def _short(entry: dict) -> str:
    kind = "fused" if entry["fused"] else "two"
    return (
        f"n{entry['block_n']} w{entry['num_warps']} s{entry['num_stages']} p{entry['programs_per_sm']} {kind}"
        f" t{entry['min_tiles']}"
        f"{' chunk' if entry['chunk'] else ''}{' r' + str(entry['max_registers']) if entry['max_registers'] else ''}"
    )


def bench_prefill(args: argparse.Namespace, rate: float, heads: int, kv_heads: int) -> list[dict]:
    """Time the prefill shapes for one number of heads."""
    grid = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)]
    grid += [(64, 32, 4, 3), (64, 128, 4, 2), (32, 64, 4, 3)]
    rows = []
    for name, chunks in PREFILL_SHAPES.items():
        most = max(queries for queries, _ in chunks)
        base = default_prefill_config(DIM, torch.bfloat16, most)
        configs = [base, *(PrefillConfig(*c) for c in grid if args.sweep and c[0] <= most)]
        problem = Problem([context for _, context in chunks], heads, kv_heads, args.page_size, 1, args.fp8)
        q = problem.queries(sum(queries for queries, _ in chunks))
        starts = torch.tensor([0, *itertools.accumulate(n for n, _ in chunks)], device="cuda", dtype=torch.int32)
        k, v = problem.kv[0]

        def run(config: PrefillConfig, problem=problem, q=q, k=k, v=v, starts=starts, most=most) -> torch.Tensor:
            return prefill_attention(
                q, k, v, problem.table, starts, problem.lens,
                max_query=most, scale=problem.scale, window=args.window, scales_P2GS=problem.scales[0], config=config,
            )  # fmt: skip

        def check(config: PrefillConfig, run=run, problem=problem, q=q, starts=starts, chunks=chunks) -> float:
            out, worst = run(config), 0.0
            for row, (queries, context) in enumerate(chunks[:3]):
                for i in {0, 1, queries // 3, queries - 1}:
                    at = int(starts[row]) + i
                    expected = problem.exact(q[at], row, context - queries + i, args.window)
                    worst = max(worst, relative(out[at], expected))
            return worst

        timed = []
        for config, error in usable(list(dict.fromkeys(configs)), lambda c, run=run: run(c).numel(), check):
            us = graph_us(lambda config=config, run=run: run(config))
            timed.append({"us": us, "error": error, **dataclasses.asdict(config)})
        default, best = timed[0], min(timed, key=lambda entry: entry["us"])
        pairs = sum(
            min(context - queries + i + 1, args.window or context)
            for queries, context in chunks
            for i in range(queries)
        )
        floor_us = 4 * DIM * heads * pairs / rate * 1e6
        row = {"kind": "prefill", "heads": f"{heads}/{kv_heads}", "shape": name, "floor_us": floor_us}
        rows.append({**row, "default": default, "best": best})
        print(
            f"prefill {heads}/{kv_heads:<3} {name:>11}  floor {floor_us:7.1f}  default {default['us']:8.1f} us "
            f"x{default['us'] / floor_us:.2f}  best {best['us']:8.1f} us m{best['block_m']} n{best['block_n']} "
            f"w{best['num_warps']} s{best['num_stages']}",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="try all configurations, not only the defaults")
    parser.add_argument("--kinds", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/4"])
    parser.add_argument("--shapes", nargs="+", help="decode shapes: rows x tokens of context (K for 1,024), or mix")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--window", type=int)
    parser.add_argument(
        "--min-tiles", type=int, nargs="+", default=[0], help="smallest number of tiles of a part; 0: the plan's choice"
    )
    parser.add_argument("--fp8", action="store_true", help="KV as e4m3 codes with scales")
    args = parser.parse_args(argv)
    bandwidth, rate = read_bandwidth(), matrix_rate()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, matrix rate {rate / 1e12:.0f} TFLOP/s", flush=True)
    facts = {"read_tbps": bandwidth / 1e12, "matrix_tflops": rate / 1e12, "fp8": args.fp8}
    rows: list[dict] = []
    for pair in args.heads:
        heads, kv_heads = map(int, pair.split("/"))
        if "decode" in args.kinds:
            rows += bench_decode(args, bandwidth, heads, kv_heads)
        if "prefill" in args.kinds:
            rows += bench_prefill(args, rate, heads, kv_heads)
        write_results(args.out, rows, **facts)


if __name__ == "__main__":
    main()
