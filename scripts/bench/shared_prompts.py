"""Counts the prompt tokens that a worker computes for prompts that have tokens in common, by order of arrival.

A worker process serves the counting checkpoint on this machine; clients talk to it through its socket. A row is one
pattern of arrival: tokens computed over distinct tokens (those of a trie of all prompts), and the pages in use when all
completions decode, beside those of one request with as many completions. Nothing is timed.
"""

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rollout.process.progress import stage
from scripts.bench.output import DEFAULT_FOLDER, print_table, write_results
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.launch import start_worker

REQUESTS, LENGTH, PAGE = 32, 600, 16
#: Completions are long enough that all of them decode at once.
TOKENS = 150
Prompts = list[list[int]]
Pattern = Callable[[AsyncRolloutClient, Prompts], Awaitable[None]]


def distinct_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens that must be computed if each is computed once after what is before it."""
    root: dict[int, Any] = {}
    count = 0
    for prompt in prompts:
        node = root
        for token in prompt:
            if token not in node:
                node[token], count = {}, count + 1
            node = node[token]
    return count


async def generate(client: AsyncRolloutClient, prompts: Prompts, **fields: Any) -> None:
    """All prompts, each as a request of its own."""
    options = {"max_tokens": TOKENS, "stop": {"ignore_eos": True}, **fields}
    await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))


async def at_once(client: AsyncRolloutClient, prompts: Prompts, **fields: Any) -> None:
    """Sent while the worker is paused: one tick admits them all."""
    await client.pause()
    running = asyncio.create_task(generate(client, prompts, **fields))
    while not running.done() and (await client.status())["queue"]["waiting"] < len(prompts) * fields.get("n", 1):
        await asyncio.sleep(0.01)
    await client.resume()
    await running


async def beside_rows(client: AsyncRolloutClient, prompts: Prompts) -> None:
    """The first eight prompts decode when the others come."""
    first = asyncio.create_task(generate(client, prompts[:8], max_tokens=2 * TOKENS))
    while not first.done() and (await client.status())["rows"]["running"] < 8:
        await asyncio.sleep(0.01)
    await asyncio.gather(first, generate(client, prompts[8:]))


async def staggered(client: AsyncRolloutClient, prompts: Prompts) -> None:
    """One every 3 ms."""
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(generate(client, [prompt])))
        await asyncio.sleep(0.003)
    await asyncio.gather(*tasks)


class Made:
    """Prompts of token ids that no other pattern has."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Tokens that the counting checkpoint knows."""
        return [self._rng.randrange(2, 14) for _ in range(count)]


def patterns() -> list[tuple[str, Prompts, Pattern]]:
    """Name, prompts, and how they arrive."""
    made = Made(7)
    equal = [made.tokens(LENGTH)] * REQUESTS
    before = made.tokens(480)
    ends = [before + made.tokens(120) for _ in range(REQUESTS)]
    system = made.tokens(256)
    shots = [system + made.tokens(128) for _ in range(4)]
    levels = [shots[i % 4] + made.tokens(64) for i in range(REQUESTS)]
    busy = [made.tokens(40) for _ in range(8)]
    return [
        ("equal, at once", equal, at_once),
        ("equal, one every 3 ms", [made.tokens(LENGTH)] * REQUESTS, staggered),
        ("equal, beside 8 rows that decode", busy + [made.tokens(LENGTH)] * 24, beside_rows),
        ("480 tokens in common, at once", ends, at_once),
        ("system prompt, four sets of examples, questions; at once", levels, at_once),
        ("long, one every 3 ms", [made.tokens(8000)] * 8, staggered),
    ]


async def measure(endpoint: str, interval_s: float) -> list[dict[str, Any]]:
    """A row for each pattern."""
    rows = []
    async with AsyncRolloutClient(endpoint, timeout_s=600.0) as client:

        async def computed() -> int:
            await asyncio.sleep(3 * interval_s)
            return int((await client.status())["metrics"]["prefill/tokens_computed"])

        async def pages(run: Callable[[], Awaitable[None]], rows: int) -> int:
            """Most pages in use while all rows decode."""
            task, most = asyncio.ensure_future(run()), 0
            while not task.done():
                status = await client.status()
                if status["rows"]["running"] == rows and not most:
                    most = status["pages"]["used"]
                await asyncio.sleep(0.03)
            await task
            return most

        for name, prompts, arrive in patterns():
            before = await computed()
            used = await pages(lambda p=prompts, a=arrive: a(client, p), len(prompts))
            total, distinct = await computed() - before, distinct_tokens(prompts)
            rows.append(
                {"arrival": name, "requests": len(prompts), "distinct": distinct, "computed": total,
                 "ratio": round(total / distinct, 4), "pages": used}
            )  # fmt: skip
        fresh = [Made(8).tokens(LENGTH)]
        before = await computed()
        used = await pages(lambda: at_once(client, fresh, n=REQUESTS), REQUESTS)
        total = await computed() - before
        rows.append(
            {"arrival": f"one request, n = {REQUESTS}", "requests": 1, "distinct": LENGTH, "computed": total,
             "ratio": round(total / LENGTH, 4), "pages": used}
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print and write the results."""
    from rollout.demo.run import CHECKPOINTS

    parser = argparse.ArgumentParser(prog="python -m scripts.bench.shared_prompts", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "shared_prompts.json")
    args = parser.parse_args(argv)
    interval_s = 0.2
    options: dict[str, Any] = {
        "max_rows": REQUESTS,
        "max_context_tokens": 9000,
        "interval_s": interval_s,
        "page_size": PAGE,
    }
    with stage("counting"), start_worker(CHECKPOINTS / "ones", wandb=False, **options) as worker:
        rows = asyncio.run(measure(worker.endpoint, interval_s))
    print_table("prompt tokens computed", rows)
    write_results(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
