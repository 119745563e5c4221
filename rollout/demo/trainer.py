"""The demo's trainer: a process that requests completions, publishes new weights, and checks every token.

It knows only the endpoint of the worker. It writes a JSON report, and ends with status 1 if a check failed.

    several prompts, n completions each      16K tokens and more, streamed, sampled at temperature 1
    short probes while they run              end at a stop string, so that the pipeline has zombies to handle
    after `--publish-at` of all tokens       the weights of the checkpoint `--twos` become version 1
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file
from tokenizers import Tokenizer

from rollout.demo.counting import PROBE_TOKENS, CountingError, check_completion
from rollout.process.progress import stage
from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.results import Completion
from trainer_bridge.publish.publisher import WeightPublisher

STEP_OF_VERSION = {0: 1, 1: 2}
_STREAM_EVERY = 256
_PROBE_PROMPT, _PROBE_STOP, _PROBES = "8:", " 64", 12


@dataclass(frozen=True)
class CheckedCompletion:
    """One row of the demo's table."""

    prompt: str
    index: int
    tokens: int
    versions: list[tuple[int, int]]
    numbers: int
    last: int
    error: str | None = None


@dataclass
class DemoReport:
    """The results of a run."""

    completions: list[CheckedCompletion] = field(default_factory=list)
    probes: int = 0
    seconds: float = 0.0
    tokens: int = 0
    gpu_active_pct: float = 0.0
    swap_pause_s: float = 0.0
    publish_s: float = 0.0
    errors: list[str] = field(default_factory=list)


class Trainer:
    """One run of the demo, on the trainer's side."""

    def __init__(self, args: argparse.Namespace, progress: Callable[[int], None]) -> None:
        self.args = args
        self.report = DemoReport()
        self._progress = progress
        self._wanted = len(args.prompts) * args.n * args.tokens
        self._seen = 0
        self._publish_now = asyncio.Event()
        tokenizer = Tokenizer.from_file(str(Path(args.twos) / "tokenizer.json"))
        self._text = lambda token: tokenizer.decode([token], skip_special_tokens=False)

    async def run(self) -> DemoReport:
        """Request completions, publish weights, check tokens."""
        began_s = time.perf_counter()
        async with AsyncRolloutClient(self.args.endpoint, timeout_s=self.args.timeout_s) as client:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self._group(client, i)) for i in range(len(self.args.prompts))]
                tasks.create_task(self._publish())
                tasks.create_task(self._probe(client))
                tasks.create_task(self._watch_activity(client, groups))
        self.report.seconds = time.perf_counter() - began_s
        for prompt, group in zip(self.args.prompts, groups, strict=True):
            for completion in group.result():
                self._check(prompt, completion)
        return self.report

    async def _group(self, client: AsyncRolloutClient, index: int) -> list[Completion]:
        stream = await client.generate(
            self.args.prompts[index],
            n=self.args.n,
            max_tokens=self.args.tokens,
            sampling={"temperature": 1.0, "seed": 1000 + index},
            stream="tokens",
            stream_every=_STREAM_EVERY,
        )
        async for chunk in stream:
            self._count(len(chunk.token_ids))
        return (await stream.wait()).completions

    def _count(self, tokens: int) -> None:
        self._seen += tokens
        self._progress(self._seen)
        if self._seen >= self.args.publish_at * self._wanted:
            self._publish_now.set()

    async def _publish(self) -> None:
        await self._publish_now.wait()
        weights = load_file(Path(self.args.twos) / "model.safetensors")
        with WeightPublisher(self.args.endpoint) as publisher:
            began_s = time.perf_counter()
            handle = publisher.publish(weights, version=1)
            reports = await asyncio.to_thread(handle.applied, self.args.timeout_s)
            self.report.publish_s = time.perf_counter() - began_s
        self.report.swap_pause_s = max(report.pause_s for report in reports)

    async def _probe(self, client: AsyncRolloutClient) -> None:
        for seed in range(_PROBES):
            result = await client.generate(
                _PROBE_PROMPT,
                max_tokens=PROBE_TOKENS,
                sampling={"temperature": 1.0, "seed": seed},
                stop={"strings": [_PROBE_STOP]},
                return_text=True,
            )
            completion = result.completions[0]
            self._check(_PROBE_PROMPT, completion, keep=False)
            stopped = completion.stop == _PROBE_STOP and completion.text and _PROBE_STOP not in completion.text
            # If the weights change at an odd number, the probe counts past 64.
            if not stopped and len(completion.versions) == 1:
                self.report.errors.append(f"a probe ended with {completion.finish_reason} {completion.stop!r}")
            self.report.probes += 1

    async def _watch_activity(self, client: AsyncRolloutClient, groups: Sequence[asyncio.Task]) -> None:
        while not all(group.done() for group in groups):
            self.report.gpu_active_pct = (await client.status())["gpu_active_pct"]
            await asyncio.wait(groups, timeout=1.0, return_when=asyncio.ALL_COMPLETED)

    def _check(self, prompt: str, completion: Completion, keep: bool = True) -> None:
        versions, numbers, last, error = completion.versions, 0, 0, None
        try:
            found = check_completion(prompt, completion.token_ids.tolist(), versions, STEP_OF_VERSION, self._text)
            numbers, last = found.numbers, found.last
        except CountingError as mistake:
            error = str(mistake)
            self.report.errors.append(f"{prompt} completion {completion.index}: {error}")
        if not keep:
            return
        tokens = len(completion.token_ids)
        if tokens < self.args.tokens:
            self.report.errors.append(f"{prompt} completion {completion.index} has only {tokens} tokens")
        if [version for version, _ in versions] != list(STEP_OF_VERSION):
            self.report.errors.append(f"{prompt} completion {completion.index} does not have both versions: {versions}")
        self.report.tokens += tokens
        checked = CheckedCompletion(prompt, completion.index, tokens, versions, numbers, last, error)
        self.report.completions.append(checked)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; 0 if every token is right."""
    parser = argparse.ArgumentParser(prog="python -m rollout.demo.trainer", description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("--twos", required=True, help="checkpoint to publish")
    parser.add_argument("--report", required=True, help="file for the JSON report")
    parser.add_argument("--prompts", nargs="+", default=["17:", "980:", "2024:"])
    parser.add_argument("--n", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=16_400, help="tokens of each completion")
    parser.add_argument(
        "--publish-at", type=float, default=0.4, help="share of all tokens after which the weights change"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0)
    args = parser.parse_args(argv)
    wanted = len(args.prompts) * args.n * args.tokens
    with stage("generating") as advance:
        report = asyncio.run(Trainer(args, lambda seen: advance(seen, wanted)).run())
    Path(args.report).write_text(json.dumps(asdict(report), indent=1))
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
