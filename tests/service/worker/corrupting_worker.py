"""`rollout serve` on a machine whose memory fails: once, one KV page that a row needs is overwritten.

    rollout demo --worker python tests/service/worker/corrupting_worker.py

Takes the arguments of `rollout serve`. At the first decode step in which a row has `AFTER_TOKENS` tokens behind it, the
page that holds the row's newest keys and values is overwritten, on the compute stream, right before that step.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rollout.cli.main import run
from rollout.engine.schedule.plan import Plan
from rollout.engine.step.runner import Runner
from rollout.engine.step.slot import Slot

AFTER_TOKENS = 250


def corrupt_one_page() -> None:
    """Have every `Runner` of this process overwrite one page, once."""
    launch = Runner.launch
    corrupted: list[int] = []

    def corrupting_launch(self: Runner, plan: Plan, slot: Slot) -> Any:
        if not corrupted and plan.kind == "decode":
            for seq in plan.seqs:
                if seq.kv_len >= AFTER_TOKENS and seq.kv_len % self.kv.page_size == self.kv.page_size - 1:
                    page = seq.pages[seq.kv_len // self.kv.page_size]
                    corrupted.append(page)
                    self.compute.run(functools.partial(overwrite, self, page))
                    break
        return launch(self, plan, slot)

    Runner.launch = corrupting_launch  # type: ignore[method-assign]


def overwrite(runner: Runner, page: int) -> None:
    """Fill one page of every layer with what no model would write."""
    print(f"overwriting page {page}", file=sys.stderr, flush=True)
    for cache in (*runner.kv.k, *runner.kv.v):
        cache[page] = 3.0


if __name__ == "__main__":
    corrupt_one_page()
    sys.argv.insert(1, "serve")
    run()
