"""Latency of sums over the GPUs of one host, inside a captured graph: ours, with residual and norm or without, NCCL's.

    python -m scripts.bench.all_reduce [--gpus 2] [--width 4096] [--calls 64] [--out FILE]

One process a GPU. A graph holds many calls; the median of its replays, divided by the calls, is the latency of one.
Before that each way is checked: the sum against float64, and that all ranks have the same bits. "words" and "rows" are
the two forms of buffers. "nccl, then norm" is what the fused kernel replaces. torch's one-shot kernel (`--torch`) reads
memory of its own, so a copy to it is a part of its time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_kernels.norm_rope.triton_elementwise import add_rms_norm
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.parallel.peer_buffers import PeerBuffers, connect_peers
from rollout_kernels.parallel.triton_all_reduce import all_reduce_norm, all_reduce_rows

from scripts.bench.cuda_timing import ranks_graph_us
from scripts.bench.output import print_table, write_results
from scripts.bench.ranks import run_ranks

#: bf16 rows of the width: 8 KB to 8 MB at 4,096.
ROWS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512, 1024)
#: More rows than ours is made for.
MOST_ROWS = 256
EPS = 1e-6
Work = Callable[[torch.Tensor], torch.Tensor]


class Bench:
    """One rank's measurements."""

    def __init__(self, group: TensorGroup, args: argparse.Namespace) -> None:
        self.group, self.args, self.device = group, args, group.device
        world = dist.group.WORLD
        assert world is not None
        self.world = world
        connect = partial(connect_peers, world, group.device, MOST_ROWS, args.width // 2)
        self.forms: dict[str, PeerBuffers] = {"words": connect(), "rows": connect(flagged=True)}
        generator = torch.Generator(self.device).manual_seed(1)
        self.weight = torch.rand(args.width, generator=generator, device=self.device).add_(0.5).bfloat16()

    def inputs(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Part of this rank, and a residual that is the same on all ranks."""
        shape, parts = (rows, self.args.width), []
        for rank in range(self.group.size + 1):
            generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
            parts.append(torch.randn(shape, generator=generator, device=self.device).bfloat16())
        return parts[self.group.rank], parts[-1]

    def ways(self, rows: int) -> dict[str, Work]:
        """From this rank's part to a sum, by name."""
        residual = self.inputs(rows, 7)[1]

        def with_norm(peers: PeerBuffers, x: torch.Tensor) -> torch.Tensor:
            return all_reduce_norm(residual, x[None], self.weight, EPS, peers)

        def alone(peers: PeerBuffers, x: torch.Tensor) -> torch.Tensor:
            return all_reduce_rows(x[None], peers)

        def nccl_and_norm(x: torch.Tensor) -> torch.Tensor:
            return add_rms_norm(residual, self.nccl(x)[None], self.weight, EPS)

        ways: dict[str, Work] = {"nccl": self.nccl, "nccl, then norm": nccl_and_norm}
        for form, peers in self.forms.items() if rows <= MOST_ROWS else ():
            ways |= {form: partial(alone, peers), f"{form}, norm": partial(with_norm, peers)}
        symmetric = self.symmetric(rows)
        return ways if symmetric is None else ways | {"torch one-shot": symmetric}

    def nccl(self, x: torch.Tensor) -> torch.Tensor:
        """The sum by NCCL, in place."""
        dist.all_reduce(x)
        return x

    def symmetric(self, rows: int) -> Work | None:
        """The one-shot kernel of torch over symmetric memory; it adds bf16 and has barriers."""
        import torch.distributed._symmetric_memory as symmetric_memory

        if not self.args.torch or rows * self.args.width * 2 > 1 << 20:
            return None
        memory = symmetric_memory.empty(rows, self.args.width, dtype=torch.bfloat16, device=self.device)
        symmetric_memory.rendezvous(memory, self.world)
        name = self.world.group_name
        memory.zero_()
        return lambda x: torch.ops.symm_mem.one_shot_all_reduce(memory.copy_(x), "sum", name)

    def check(self, rows: int) -> dict[str, float]:
        """Relative errors against float64, by name. Raises AssertionError if ranks have other bits."""
        part, residual = self.inputs(rows, rows)
        exact = self.group.all_gather(part).double().sum(0)
        errors = {"nccl": self._error(self.nccl(part.clone()), exact)}
        for form, peers in self.forms.items() if rows <= MOST_ROWS else ():
            errors[form] = self._error(all_reduce_rows(part[None], peers), exact)
            stream = residual.clone()
            normed = all_reduce_norm(stream, part[None], self.weight, EPS, peers)
            total = residual.double() + exact
            errors[f"{form}, residual"] = self._error(stream, total)
            scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
            errors[f"{form}, norm"] = self._error(normed, total * scale * self.weight.double())
        self.assert_all_came()
        return errors

    def assert_all_came(self) -> None:
        """Raises AssertionError if this rank waited in vain."""
        assert all(peers.fault.item() == 0 for peers in self.forms.values()), "a peer's part did not come"

    def _error(self, found: torch.Tensor, exact: torch.Tensor) -> float:
        ranks = self.group.all_gather(found)
        assert all(torch.equal(ranks[0], other) for other in ranks), "ranks have other bits"
        error = ((found.double() - exact).norm() / exact.norm()).item()
        assert error < 1e-2, f"relative error {error}"  # false for NaN, too
        return error

    def latency_us(self, work: Work, rows: int) -> float:
        """Median microseconds of a call in a graph of many."""
        start = self.inputs(rows, 3)[0]

        def chain() -> list[torch.Tensor]:
            x = start.clone()
            return [work(x) for _ in range(self.args.calls)]

        return ranks_graph_us(chain, self.args.calls, self.args.runs, self.device)


def measure(group: TensorGroup, args: argparse.Namespace) -> None:
    """One rank."""
    bench = Bench(group, args)
    found = []
    for rows in args.rows:
        row: dict[str, Any] = {"rows": rows, "KB": rows * args.width * 2 / 1024}
        checked = bench.check(rows)
        for name, work in bench.ways(rows).items():
            row[f"{name}, us"] = bench.latency_us(work, rows)
            bench.assert_all_came()
        found.append(row | {f"error: {name}": error for name, error in checked.items()})
        if group.rank == 0:
            print(json.dumps(found[-1]), flush=True)
    if group.rank == 0:
        shown = [f"{way}, us" for way in ("words", "words, norm", "rows", "rows, norm", "nccl", "nccl, then norm")]
        table = [{key: row.get(key, "") for key in ("rows", "KB", *shown, "torch one-shot, us")} for row in found]
        print_table(f"{args.gpus} GPUs, width {args.width}", table)
        if args.out is not None:
            write_results(args.out, found, gpus=args.gpus, width=args.width, calls=args.calls)


def main() -> None:
    """Measure on all GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--calls", type=int, default=64, help="calls of a graph")
    parser.add_argument("--runs", type=int, default=21, help="replays")
    parser.add_argument("--torch", action="store_true", help="measure torch's kernel, too")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    raise SystemExit(run_ranks(measure, args, args.gpus))


if __name__ == "__main__":
    main()
