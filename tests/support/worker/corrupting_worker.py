"""`rollout serve` on a machine whose memory fails: once, one KV page that a row needs is overwritten.

    rollout demo --worker python tests/support/worker/corrupting_worker.py

Takes the arguments of `rollout serve`. At the first decode step in which a row has `AFTER_TOKENS` tokens behind it, the
page that holds the row's newest keys and values is overwritten, on the compute stream, right before that step.
"""

import functools
import sys
from typing import Any

from rollout.cli.main import run
from rollout.engine.loop import Engine
from rollout.engine.schedule.plan import Plan
from rollout.models.batch import KVCache

AFTER_TOKENS = 250


def corrupt_one_page() -> None:
    """Have every engine of this process overwrite one page, once."""
    launch = Engine.launch
    corrupted: list[int] = []

    def corrupting_launch(self: Engine, plan: Plan, *rest: Any) -> Any:
        page_size = self.executor.step.kv.page_size
        if not corrupted and plan.kind == "decode":
            for seq in plan.sampled:
                if seq.kv.length >= AFTER_TOKENS and seq.kv.length % page_size == page_size - 1:
                    page = seq.kv.pages[seq.kv.length // page_size]
                    corrupted.append(page)
                    self.executor.compute.run(functools.partial(overwrite, self.executor.step.kv, page))
                    break
        return launch(self, plan, *rest)

    Engine.launch = corrupting_launch  # type: ignore[method-assign]


def overwrite(kv: KVCache, page: int) -> None:
    """Fill one page of every layer with what no model would write."""
    print(f"overwriting page {page}", file=sys.stderr, flush=True)
    for cache in (*kv.k, *kv.v):
        cache[page] = 3.0


if __name__ == "__main__":
    corrupt_one_page()
    sys.argv.insert(1, "serve")
    run()
