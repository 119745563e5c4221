"""Truncated draws over the GPUs of one host: histograms of parts of the vocabulary against joined logits.

    python -m scripts.bench.sharded_rules [--gpus 2] [--vocab 151936] [--rows 1 8 32 128] [--calls 16] [--out FILE]

One process a GPU. A call is everything from the logits of a rank's part to the tokens: temperature, truncation, draw.

    joined        the logits of all ranks are gathered, and every rank truncates and draws over all of them
    peers         each rank truncates and draws over its part; histograms cross over peers' memory
    gathered      the same, and NCCL gathers the histograms, as where GPUs cannot reach each other's memory

"us" is the median of replays of a graph of many calls, divided by the calls; "eager us" the same without a graph, which
is how steps with rules draw. Before that, each way's tokens are compared with those of "joined", and what truncation
leaves of the parts with what it leaves of the whole, bit for bit. `--runs 0` only compares, also with `--device cpu`
and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rollout_kernels import SamplingRows
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling import VocabShard
from rollout_kernels.sampling.triton_draw import draw_and_advance
from rollout_kernels.sampling.triton_truncate import truncate

from scripts.bench.cuda_timing import ranks_graph_us
from scripts.bench.output import print_table, write_results
from scripts.bench.ranks import run_ranks

OFF = 1 << 20
INFINITY = float("inf")
#: top-k, top-p and min-p of all rows.
RULES = {
    "min-p": (OFF, INFINITY, 0.05),
    "top-k": (20, INFINITY, 0.0),
    "top-p": (OFF, 0.95, 0.0),
    "all": (20, 0.95, 0.05),
}
COLUMNS = {"LAST": 0, "LENGTH": 1, "PROMPT": 2, "SEED": 3, "TEMPERATURE": 0, "NOISE": 1}
WIDTH = 4096  # of the sums that peers' memory is connected for; no matter here


class Bench:
    """One rank, for one number of rows."""

    def __init__(self, group: TensorGroup, args: argparse.Namespace, rows: int) -> None:
        self.device, self.rows, self.args = group.device, rows, args
        most = -(-args.vocab // (4 * group.size)) * 4
        self.shard = VocabShard(group, group.rank * most, most, args.vocab)
        generator = torch.Generator().manual_seed(rows)
        # Rounded to bf16, so that there are ties; most of the probability is in few tokens, as of a model.
        logits = (torch.randn(rows, args.vocab, generator=generator) * 2.5).bfloat16().float()
        self.whole = logits.to(self.device)
        self.part = self.whole[:, group.rank * most : (group.rank + 1) * most].contiguous()
        self.row_ids = torch.arange(1, rows + 1, device=self.device)
        self.ints = torch.zeros(rows + 1, 4, dtype=torch.int64, device=self.device)
        self.ints[:, 3] = torch.arange(rows + 1) * 7919
        self.floats = torch.ones(rows + 1, 2, device=self.device)
        self.floats[:, 0] = 0.8
        self.output = torch.zeros(4, rows, dtype=torch.int32, device=self.device)

    def settings(self, rule: str) -> SamplingRows:
        """The settings of the rows."""
        top_k, top_p, min_p = RULES[rule]
        floats = torch.tensor([[top_p, min_p]] * self.rows, device=self.device)
        return SamplingRows(
            temperature_S=self.floats[1:, 0],
            noise_S=self.floats[1:, 1],
            seed_S=self.ints[1:, 3],
            index_S=self.ints[1:, 1],
            top_k_S=torch.full((self.rows,), top_k, device=self.device),
            top_p_S=floats[:, 0],
            min_p_S=floats[:, 1],
        )

    def join(self) -> torch.Tensor:
        """The logits of all ranks on every rank."""
        padded = F.pad(self.part, (0, self.shard.most_tokens - self.part.shape[1]))
        whole = self.part.new_empty(self.rows, self.shard.vocab)
        for rank, part in enumerate(self.shard.group.all_gather(padded)):
            to = whole[:, rank * self.shard.most_tokens : (rank + 1) * self.shard.most_tokens]
            to.copy_(part[:, : to.shape[1]])
        return whole

    def cut(self, logits: torch.Tensor, rule: SamplingRows, shard: VocabShard | None) -> torch.Tensor:
        """What temperature and truncation leave."""
        drawn = logits / rule.temperature_S[:, None]
        truncate(drawn, rule, shard)
        return drawn

    def draw(self, logits: torch.Tensor, rule: SamplingRows, shard: VocabShard | None) -> None:
        """Truncate, and draw into the output."""
        drawn = self.cut(logits, rule, shard)
        draw_and_advance(logits, drawn, self.row_ids, self.ints, self.floats, self.output, COLUMNS, shard)

    def ways(self, rule: SamplingRows) -> dict[str, Callable[[], None]]:
        """From the logits of a part to tokens, by name."""
        group = copy.copy(self.shard.group)
        group.histogram_peers = None
        gathered = replace(self.shard, group=group)
        ways: dict[str, Callable[[], None]] = {
            "joined": lambda: self.draw(self.join(), rule, None),
            "gathered": lambda: self.draw(self.part, rule, gathered),
        }
        if self.shard.group.histogram_peers is not None:
            ways["peers"] = lambda: self.draw(self.part, rule, self.shard)
            whole, part = self.cut(self.whole, rule, None), self.cut(self.part, rule, self.shard)
            assert torch.equal(whole[:, self.shard.first_token :][:, : part.shape[1]], part), "other tokens stay"
        return ways

    def tokens(self, way: Callable[[], None]) -> list[int]:
        """The tokens of one draw, from the same state each time."""
        self.ints[:, 1] = 20
        way()
        return self.output[0].tolist()

    def graph_us(self, way: Callable[[], None]) -> float:
        """Median microseconds of a call in a graph of many."""

        def chain() -> None:
            for _ in range(self.args.calls):
                way()

        return ranks_graph_us(chain, self.args.calls, self.args.runs, self.device)

    def eager_us(self, way: Callable[[], None]) -> float:
        """Median microseconds of a call that the host launches."""
        times = []
        for _ in range(self.args.runs + 3):
            dist.barrier(device_ids=[self.device.index])
            torch.cuda.synchronize(self.device)
            began_s = time.perf_counter()
            for _ in range(self.args.calls):
                way()
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - began_s) * 1e6 / self.args.calls)
        return sorted(times[3:])[self.args.runs // 2]


def measure(group: TensorGroup, args: argparse.Namespace) -> None:
    """One rank."""
    group.prepare(WIDTH, torch.bfloat16)
    found = []
    for rows in args.rows:
        bench = Bench(group, args, rows)
        for rule in args.rules:
            ways = bench.ways(bench.settings(rule))
            expected = bench.tokens(ways["joined"])
            for name, way in ways.items():
                tokens = bench.tokens(way)
                assert tokens == expected, f"{name} draws other tokens: {tokens[:8]}, {expected[:8]}"
            row: dict[str, Any] = {"rows": rows, "rule": rule}
            if args.runs:
                for name, way in ways.items():
                    row |= {f"{name}, us": bench.graph_us(way), f"{name}, eager us": bench.eager_us(way)}
            if group.histogram_peers is not None:
                assert group.histogram_peers.fault.item() == 0, "a peer's words did not come"
            found.append(row)
            if group.rank == 0:
                print(json.dumps(row), flush=True)
    if group.rank == 0 and args.runs:
        print_table(f"{args.gpus} GPUs, vocabulary of {args.vocab}", found)
        if args.out is not None:
            write_results(args.out, found, gpus=args.gpus, vocab=args.vocab, calls=args.calls)


def main() -> None:
    """Measure on all GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--calls", type=int, default=16, help="calls of a graph")
    parser.add_argument("--runs", type=int, default=11, help="replays; 0 only compares")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    raise SystemExit(run_ranks(measure, args, args.gpus, args.device))


if __name__ == "__main__":
    main()
