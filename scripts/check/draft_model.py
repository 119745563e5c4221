"""Trains draft models for the counting models and shows what updates do to them, at a real worker. CPU, two minutes.

    PYTHONPATH=.:kernels python -m scripts.check.draft_model

A worker starts with a random EAGLE-3 head. Then it gets over the weight bridge, with running versions: a head that was
trained for its model, another model without a head, and the head of that model. Every token of every completion is
checked, whatever the head says; how many drafts are accepted follows the head:

    weights                  head                   drafts are accepted
    ones                     random                 hardly
    ones                     of ones                nearly all
    twos                     of ones: stale         fewer
    twos                     of twos                nearly all again

Exit status 1 if a token is wrong, or if acceptance does not follow.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from rollout.demo.counting import CountingError, check_completion
from rollout.demo.run import CHECKPOINTS
from scripts import train_draft_head
from scripts.bench.output import print_table
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess, start_worker
from trainer_bridge.publish.publisher import WeightPublisher

#: Checkpoints of the demo, by the steps in which they count.
NAMES = {1: "ones", 2: "twos"}
PROMPTS = ("17:", "980:", "15 16 17:")
#: Settings of the worker, beside the folder of its draft model.
SETTINGS = {"max_rows": 8, "max_context_tokens": 4096, "interval_s": 0.1, "speculation": "heads"}
_PATIENCE_S = 60.0

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Phase:
    """A version of the weights, and what was counted under it."""

    weights: str
    head: str
    tokens: int
    drafted: int
    accepted_pct: float
    tokens_a_step: float  # 1 and the accepted drafts of a row


@dataclass(frozen=True, slots=True)
class Change:
    """An update: the model that counts in `step`, and the head of the model of this name; None: no head."""

    step: int
    head: str | None


CHANGES = (Change(1, "ones"), Change(2, None), Change(2, "twos"))


def train_head(folder: Path, name: str, updates: int, quiet: bool = False) -> Path:
    """The folder of a head for the model of this name; a random one after no `updates`."""
    step = {name: step for step, name in NAMES.items()}[name]
    target = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name).eval()
    train_draft_head.save(train_draft_head.train(target, step, updates, quiet=quiet), target, folder)
    return folder


class Observer:
    """Generates at a worker that writes its metrics to a file, and counts drafts."""

    def __init__(self, worker: WorkerProcess, metrics: Path, tokens: int) -> None:
        self._worker, self._metrics, self._tokens = worker, metrics, tokens
        tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "ones" / "tokenizer.json"))
        self._text = lambda token: tokenizer.decode([token], skip_special_tokens=False)

    def phase(self, weights: str, head: str, steps: dict[int, int]) -> Phase:
        """Completions of all prompts. Raises CountingError if a token belongs to another version."""
        before, total = self.record(), 0
        with RolloutClient(self._worker.endpoint, timeout_s=_PATIENCE_S) as client:
            for seed, prompt in enumerate(PROMPTS):
                sampling = {"temperature": 1.0, "seed": seed}
                result = client.generate(prompt, n=2, max_tokens=self._tokens, sampling=sampling)
                for completion in result.completions:
                    ids = completion.token_ids.tolist()
                    check_completion(prompt, ids, completion.versions, steps, self._text)
                    total += len(ids)
        after = self.record()
        drafted, accepted = (
            int(after[f"speculation/{name}"] - before[f"speculation/{name}"]) for name in ("drafted", "accepted")
        )
        steps_of_rows = max(total - accepted, 1)
        return Phase(weights, head, total, drafted, 100 * accepted / max(drafted, 1), total / steps_of_rows)

    def record(self) -> dict[str, float]:
        """The first record of the metrics that begins after this call."""
        end_s, known = time.monotonic() + _PATIENCE_S, len(self._lines())
        while len(lines := self._lines()) < known + 2:  # the next one may have begun before
            if time.monotonic() > end_s:
                raise TimeoutError(f"the worker writes no metrics to {self._metrics}")
            time.sleep(0.02)
        return json.loads(lines[-1])

    def _lines(self) -> list[str]:
        text = self._metrics.read_text() if self._metrics.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()


def observe(
    worker: WorkerProcess, metrics: Path, heads: dict[str, Path], tokens: int, changes: Sequence[Change] = CHANGES
) -> list[Phase]:
    """A phase before and after each change, at a worker that serves `ones` with a random head."""
    observer, steps, head = Observer(worker, metrics, tokens), {0: 1}, "random"
    phases = [observer.phase("ones", head, steps)]
    with WeightPublisher(worker.endpoint) as publisher:
        for version, change in enumerate(changes, 1):
            weights, head = load_file(CHECKPOINTS / NAMES[change.step] / "model.safetensors"), change.head or head
            if change.head is not None:
                weights |= draft_tensors(heads[change.head])
            publisher.publish(weights, version=version).applied(_PATIENCE_S)
            steps[version] = change.step
            phases.append(observer.phase(NAMES[change.step], head, steps))
    return phases


def draft_tensors(folder: Path) -> Tensors:
    """The tensors of a head as updates name them."""
    return {f"draft.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}


def follows(phases: Sequence[Phase], least_pct: float) -> bool:
    """Whether acceptance follows the heads: trained ones are right in `least_pct` of their drafts at least."""
    random, trained, stale, again = (phase.accepted_pct for phase in phases)
    return random < trained - 25 and stale < trained and stale < again and min(trained, again) >= least_pct


def main(argv: Sequence[str] | None = None) -> int:
    """Train, serve, update, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300, help="of each head's training")
    parser.add_argument("--tokens", type=int, default=1000, help="of a completion")
    parser.add_argument("--least", type=float, default=90.0, help="acceptance of a trained head at least, per cent")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        torch.set_num_threads(1)
        random, metrics = train_head(folder / "random", "ones", 0), folder / "metrics.jsonl"
        heads = {name: train_head(folder / name, name, args.updates) for name in NAMES.values()}
        flags: dict[str, Any] = {**SETTINGS, "speculation_model": random, "jsonl": metrics, "wandb": False}
        with start_worker(CHECKPOINTS / "ones", log_file=folder / "worker.log", **flags) as worker:
            try:
                phases = observe(worker, metrics, heads, args.tokens)
            except CountingError as error:
                print(f"FAILED: a token is wrong: {error}")
                return 1
    print_table("draft models", [{name: getattr(phase, name) for name in Phase.__slots__} for phase in phases])
    if not follows(phases, args.least):
        print("FAILED: acceptance does not follow the heads")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
