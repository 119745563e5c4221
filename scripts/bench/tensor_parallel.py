"""Decode steps of one model on several GPUs, ms by number of rows: whole engines on all ranks that run the same steps.

    PYTHONPATH=.:kernels python -m scripts.bench.tensor_parallel [--gpus 2] [--shape qwen3-8b] [--rows 1 8 32 128]
        [--prompt 128] [--new 256] [--out FILE] [--nccl]

Each rank has an engine of its own with the same requests. Its plans depend on these alone, so all ranks launch the same
steps in the same order, as followers of one engine would. `--gpus 1` is the same measurement of one GPU. `--nccl` takes
NCCL for all sums. All ranks must make the same tokens with the same log-probs, which is checked.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.parallel import TensorGroup

from scripts.bench.driver import random_prompt
from scripts.bench.output import DEFAULT_FOLDER, print_table, write_results
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import OursEngine
from scripts.bench.peers.workloads import Work
from scripts.bench.ranks import run_ranks

_PAGE = 16


class CheckedEngine(OursEngine):
    """An engine that keeps a digest of all tokens and log-probs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.digest = hashlib.sha256()
        super().__init__(*args, **kwargs)

    def _take(self, events: list[Any]) -> None:
        super()._take(events)
        for event in events:
            if hasattr(event, "logprobs"):
                self.digest.update(repr(event.key).encode() + event.token_ids.tobytes() + event.logprobs.tobytes())


def measure(group: TensorGroup, args: argparse.Namespace) -> None:
    """One rank."""
    if args.nccl:
        group.prepare = lambda width, dtype: None  # type: ignore[method-assign]
    device = "cpu" if args.device == "cpu" else f"cuda:{group.rank}"
    job = Job(shape=args.shape, rows=tuple(args.rows), prompt=args.prompt, new=args.new, device=device)
    pages = (max(args.rows) + 8) * -(-(args.prompt + args.new + 32) // _PAGE)
    # Free memory and measured costs may differ by rank, and no plan may depend on them.
    changes = {"kv_pages": pages, "page_size": _PAGE, "speculation": "off"}
    engine = CheckedEngine(job, 2, changes=changes, group=group)
    found = []
    for rows in args.rows:
        best: dict[str, Any] = {}
        for repeat in range(args.repeats):
            prompts = [random_prompt(engine.vocab, args.prompt, 1000 * repeat + i) for i in range(rows)]
            engine.generate(Work(prompts, [args.new] * rows))
            steps = engine.last_steps()
            if not best or steps.get("steady_ms", 0.0) < best["steady_ms"]:
                best = {"steady_ms": 0.0, **steps}
        found.append({"gpus": group.size, "rows": rows, **best})
        digest = torch.frombuffer(bytearray(engine.digest.digest()), dtype=torch.uint8).to(group.device)
        digests = group.all_gather(digest)
        assert all(torch.equal(digests[0], other) for other in digests), "ranks made other tokens"
        assert group.peers is None or group.peers.fault.item() == 0, "a peer's words did not come"
        if group.rank == 0:
            print({name: round(value, 3) if isinstance(value, float) else value for name, value in found[-1].items()})
    if group.rank == 0:
        print_table(f"decode steps of {args.shape}, ms", found)
        write_results(args.out, found, shape=args.shape, gpus=group.size, nccl=args.nccl, **engine.facts())
    engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nccl", action="store_true", help="no sums over peers' memory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "tensor_parallel.json")
    args = parser.parse_args(argv)
    return run_ranks(measure, args, args.gpus, args.device)


if __name__ == "__main__":
    raise SystemExit(main())
