"""Asynchronous GRPO in one file: plain PyTorch, a worker process, and verifiable rewards.

    python -m scripts.train_grpo --plot docs/grpo.png                            a tiny model on a CPU, in minutes
    python -m scripts.train_grpo --shape qwen3-1.7b --device cuda --lr 1e-5      the same with 1.7B's layers on a GPU

The task: from the prompt `N :` count down, `N-1 ... 1 0`, and stop. The reward is the length of the correct beginning
of a completion, as a share of the right answer. The model starts with random weights and learns from rewards only.

    trainer    batch t-1: loss, update | batch t: loss, update | ...      version t: the weights at the start of step t
    worker     batch t+S-1             | batch t+S             | ...      requested with `min_version` t; S: staleness

New weights are swapped in while completions run. The worker returns the log-probability and the version of every token,
for the importance ratio. The seed determines the draws; with a staleness above 0, timing determines which version draws
a token. Writes steps.jsonl, summary.json and a W&B run (offline without an API key) to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import wandb
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.metrics.mismatch import Mismatch, compare
from rollout.metrics.wandb_mode import wandb_mode
from scripts.bench.output import circumstances, write_summary
from scripts.bench.shapes import SHAPES, model_config
from trainer_bridge import GenerateResult, PublishHandle, WeightPublisher, start_worker
from trainer_bridge.integrations.background import BackgroundClient

# Shape suffixes: N completions of a batch, S positions that predict a token (all but the last one), V vocabulary.
EOS, COLON = 0, 1
_QUIET = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
_OWN_CONFIG = {"eos_token_id": EOS, "bos_token_id": None, "torch_dtype": "float32", "initializer_range": 0.05}


@dataclass(frozen=True)
class Countdown:
    """The task, for `numbers` numbers. Token 0 ends an answer, 1 is the colon, k + 2 is the number k."""

    numbers: int
    seed: int

    def prompts(self, step: int, groups: int) -> list[list[int]]:
        """The prompts of a step."""
        firsts = np.random.default_rng([self.seed, step]).integers(3, self.numbers + 2, groups)
        return [[first, COLON] for first in firsts.tolist()]

    def reward(self, prompt: list[int], answer: list[int]) -> float:
        """Length of the correct beginning as a share of the right answer with its end; 1 if all is right."""
        right = [*range(prompt[0] - 1, 1, -1), EOS]
        same = [given == wanted for given, wanted in zip(answer, right, strict=False)]
        return (same.index(False) if False in same else len(same)) / len(right)


def ask(client: BackgroundClient, task: Countdown, step: int, args: argparse.Namespace) -> Future[list[GenerateResult]]:
    """Request the batch of a step, from weights that are at most `staleness` steps old when it begins."""
    prompts, first_seed = task.prompts(step, args.groups), (args.seed * 1_000_000 + step) * args.groups
    return client.generate_many(
        [{"prompt": prompt, "seed": first_seed + i} for i, prompt in enumerate(prompts)],
        n=args.group_size,
        max_tokens=task.numbers + 1,
        temperature=args.temperature,
        min_version=max(1, step - args.staleness),
        timeout_s=args.timeout_s,
    )


@dataclass(frozen=True)
class Batch:
    """The completions of a step, padded on the right. Each position describes the token that it predicts."""

    ids_NT: torch.Tensor  # int64, T = S + 1
    answer_NS: torch.Tensor  # bool: that token belongs to the answer
    logprobs_NS: torch.Tensor  # float32, the worker's, 0 outside of answers
    versions_NS: torch.Tensor  # int64, of the weights that drew the token
    rewards_N: torch.Tensor
    advantages_N: torch.Tensor  # rewards, normalised within their group


def make_batch(task: Countdown, prompts: list[list[int]], results: list[GenerateResult], n: int, device: str) -> Batch:
    """Collect the results of the prompts. Raises RuntimeError if one is missing or was cut short."""
    rows = [(prompt, item) for prompt, result in zip(prompts, results, strict=True) for item in result.completions]
    broken = [item.error or item.finish_reason for _, item in rows if item.finish_reason not in ("stop", "length")]
    if broken or len(rows) != n * len(prompts):
        raise RuntimeError(f"of {n * len(prompts)} completions {len(rows)} came back, some broken: {broken[:3]}")
    length = max(len(prompt) + len(item) for prompt, item in rows)
    ids_NT = np.full((len(rows), length), EOS)
    answer_NS, versions_NS = np.zeros((len(rows), length - 1), bool), np.zeros((len(rows), length - 1), int)
    logprobs_NS = np.zeros((len(rows), length - 1), np.float32)
    for row, (prompt, item) in enumerate(rows):
        answer = slice(len(prompt) - 1, len(prompt) - 1 + len(item))
        ids_NT[row, : len(prompt) + len(item)] = [*prompt, *item.token_ids]
        answer_NS[row, answer], logprobs_NS[row, answer] = True, item.logprobs
        versions_NS[row, answer] = np.repeat(*np.array(item.versions).T)
    rewards = torch.tensor([task.reward(prompt, item.token_ids.tolist()) for prompt, item in rows])
    grouped = rewards.view(len(prompts), n)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    arrays = (torch.from_numpy(array).to(device) for array in (ids_NT, answer_NS, logprobs_NS, versions_NS))
    return Batch(*arrays, rewards.to(device), advantages.flatten().to(device))


def compare_tokens(worker_NS: torch.Tensor, trainer_NS: torch.Tensor, answer_NS: torch.Tensor) -> Mismatch:
    """The difference of two sets of log-probs at the tokens of answers. K3 estimates the KL divergence."""
    return compare(*(logprobs_NS[answer_NS].detach().cpu().numpy() for logprobs_NS in (worker_NS, trainer_NS)))


class Trainer:
    """The model, its optimizer, and the weights of the last steps, for comparison with the worker's log-probs."""

    def __init__(self, task: Countdown, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.config = AutoConfig.for_model(**model_config(args.shape) | _OWN_CONFIG | {"vocab_size": task.numbers + 2})
        self.model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).to(args.device)
        # A large eps: tiny gradients (all answers are right) must not be scaled up to full steps.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), args.lr, (0.9, 0.99), eps=1e-5, weight_decay=0.0)
        self._past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=args.staleness + 1)

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors to publish: the parameters themselves on a CPU, bfloat16 copies on a GPU."""
        dtype = torch.bfloat16 if self.args.device.startswith("cuda") else torch.float32
        return {name: tensor.detach().to(dtype) for name, tensor in self.model.named_parameters()}

    def remember(self, version: int) -> None:
        """Keep a copy of the present weights as version `version`."""
        self._past.append((version, {name: p.detach().clone() for name, p in self.model.named_parameters()}))

    def logprobs(self, ids_NT: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of every token after the first, and its entropy [N, S]; `weights` replace the model's own."""
        with torch.autocast("cuda", torch.bfloat16, enabled=ids_NT.is_cuda):
            called = torch.func.functional_call(self.model, weights, (ids_NT[:, :-1],), {"use_cache": False})
        logprobs_NSV = (called.logits.float() / self.args.temperature).log_softmax(-1)
        entropy_NS = -(logprobs_NSV.exp() * logprobs_NSV).sum(-1)
        return logprobs_NSV.gather(-1, ids_NT[:, 1:, None]).squeeze(-1), entropy_NS

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """The clipped policy gradient loss, a mean over tokens, and its statistics."""
        logprobs_NS, entropy_NS = self.logprobs(batch.ids_NT, {})
        ratio_NS = (logprobs_NS - batch.logprobs_NS).exp()
        advantage_N1, answer_NS = batch.advantages_N[:, None], batch.answer_NS
        clipped_NS = ratio_NS.clamp(1 - self.args.clip[0], 1 + self.args.clip[1])
        gain_NS = torch.minimum(ratio_NS * advantage_N1, clipped_NS * advantage_N1)
        with torch.no_grad():
            clipped_pct = 100 * (gain_NS != ratio_NS * advantage_N1)[answer_NS].float().mean().item()
            off_policy = compare_tokens(batch.logprobs_NS, logprobs_NS, answer_NS)
        facts = {"policy/k3_kl": off_policy.k3_kl, "policy/clipped_pct": clipped_pct}
        facts["policy/entropy"] = entropy_NS[answer_NS].mean().item()
        return -(gain_NS + self.args.entropy * entropy_NS)[answer_NS].mean(), facts

    @torch.no_grad()
    def mismatch(self, batch: Batch) -> dict[str, float]:
        """Compare the worker's log-probs with ours, for completions of a single version whose weights we kept."""
        newest_N = batch.versions_NS.masked_fill(~batch.answer_NS, -1).amax(1)
        single_N = ((batch.versions_NS == newest_N[:, None]) | ~batch.answer_NS).all(1)
        found = Mismatch()
        for version, weights in self._past:
            rows_N = single_N & (newest_N == version)
            if rows_N.any():
                logprobs_NS, _ = self.logprobs(batch.ids_NT[rows_N], weights)
                found += compare_tokens(batch.logprobs_NS[rows_N], logprobs_NS, batch.answer_NS[rows_N])
        return {"mismatch/k3_kl": found.k3_kl, "mismatch/max_abs": found.max_abs, "mismatch/tokens": found.tokens}

    def update(self, loss: torch.Tensor, published: PublishHandle) -> float:
        """Take an optimizer step after the publisher has read the weights; returns the norm of the gradient."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        published.held()
        self.optimizer.step()
        return float(norm)


def train(trainer: Trainer, task: Countdown, client: BackgroundClient, publisher: WeightPublisher) -> dict[str, Any]:
    """All steps; returns the sums and means over the run."""
    args, began_s, completions, tokens = trainer.args, time.perf_counter(), 0, 0
    rows: list[dict[str, Any]] = []
    published = publisher.publish(trainer.weights(), version=1)
    batches = deque(ask(client, task, step, args) for step in range(1, min(args.steps, args.staleness) + 1))
    with open(args.out / "steps.jsonl", "w") as lines:
        for step in range(1, args.steps + 1):
            trainer.remember(step)
            if step + args.staleness <= args.steps:
                batches.append(ask(client, task, step + args.staleness, args))
            asked_s, future = time.perf_counter(), batches.popleft()
            while not wait([future], timeout=1.0).done:
                if published.error is not None:  # otherwise the update is in progress or applied; do not wait for it
                    raise published.error
            results, waited_s = future.result(), time.perf_counter() - asked_s
            batch = make_batch(task, task.prompts(step, args.groups), results, args.group_size, args.device)
            facts = trainer.mismatch(batch) if step % args.check_every == 0 else {}
            loss, more = trainer.loss(batch)
            norm = trainer.update(loss, published)
            published = publisher.publish(trainer.weights(), version=step + 1)
            rewards_N, age_NS = batch.rewards_N, (step - batch.versions_NS)[batch.answer_NS]
            mixed = sum(len(item.versions) > 1 for result in results for item in result.completions)
            completions, tokens = completions + len(batch.ids_NT), tokens + len(age_NS)
            row = {
                **{"step": step, "reward": rewards_N.mean().item(), "exact": (rewards_N == 1).float().mean().item()},
                **{"staleness/mean": age_NS.float().mean().item(), "staleness/max": age_NS.max().item()},
                **{"staleness/mixed_pct": 100 * mixed / len(batch.ids_NT), "tokens": len(age_NS), "gradient": norm},
                **{"time/waited_s": waited_s, "time/step_s": time.perf_counter() - asked_s, **more, **facts},
            }
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)
            if args.wandb:
                wandb.log(row, step=step)
            if step % 10 == 0 or step == 1:
                print(f"step {step}: reward {row['reward']:.3f}, staleness {row['staleness/mean']:.2f}", flush=True)
    published.applied(args.timeout_s)
    sums = {"steps": step, "completions": completions, "tokens": tokens, "seconds": time.perf_counter() - began_s}
    return sums | means(rows)


def means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over all steps, or over the first or last ones; the largest mismatch, and its number of tokens."""

    def mean(name: str, of: list[dict[str, Any]] = rows) -> float:
        return statistics.fmean(row[name] for row in of)

    checked = [row for row in rows if row.get("mismatch/tokens")]
    names = ("staleness/mean", "staleness/mixed_pct", "policy/k3_kl", "time/waited_s", "time/step_s")
    return {
        "reward of the first 5 steps": mean("reward", rows[:5]),
        "reward of the last 20 steps": mean("reward", rows[-20:]),
        "exact of the last 20 steps": mean("exact", rows[-20:]),
        **{name: mean(name) for name in names},
        "staleness/max": max(row["staleness/max"] for row in rows),
        **{name: max((row[name] for row in checked), default=None) for name in ("mismatch/k3_kl", "mismatch/max_abs")},
        "mismatch/tokens": sum(row["mismatch/tokens"] for row in checked),
    }


def plot(out: Path, picture: Path) -> None:
    """Draw steps.jsonl: the reward, and the age of the weights that drew the tokens."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes, name, label in (
        (upper, "reward", "reward: correct share of the answer"),
        (upper, "exact", "share of completions that are fully right"),
        (lower, "staleness/mean", "age of a token's weights, versions"),
    ):
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=label, lw=1.2)
        axes.grid(alpha=0.3)
        axes.legend()
    lower.set(xlabel="step", ylim=(0, None))
    figure.savefig(picture, dpi=110)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=SHAPES, default="toy", help="sizes of the layers; the vocabulary is the task's"
    )
    parser.add_argument("--device", default="cpu", help="device of the trainer: cpu, cuda or cuda:N")
    parser.add_argument("--worker-device", help="device of the worker, if it differs")
    parser.add_argument("--endpoints", nargs="+", help="new workers of this model; without it, one is started")
    parser.add_argument("--numbers", type=int, default=16, help="largest number to count down from")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--groups", type=int, default=16, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=16, help="completions of a prompt")
    parser.add_argument(
        "--staleness", type=int, default=2, help="batches requested ahead; 0: trainer and worker take turns"
    )
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--entropy", type=float, default=0.005, help="weight of the entropy in the loss")
    parser.add_argument(
        "--clip", type=float, nargs=2, default=(0.2, 0.28), help="clip range of the ratio, below and above 1"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--speculation",
        choices=("off", "suffix", "ngram", "auto"),
        default="off",
        help="of the worker that is started; the summary says how many drafts were accepted",
    )
    parser.add_argument("--check-every", type=int, default=5, help="steps between two measurements of the mismatch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="seconds to wait for a batch and for the last update"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--wandb", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="file for a picture of the run (needs matplotlib)")
    return parser.parse_args(argv)


def speculation_totals(metrics: Path) -> dict[str, float]:
    """The counts of drafts in the worker's last line of metrics."""
    last = json.loads(metrics.read_text().splitlines()[-1])
    names = ("drafted", "accepted", "accepted_pct", "tokens_a_step")
    return {name: last[f"speculation/{name}"] for name in names if f"speculation/{name}" in last}


def main(argv: list[str] | None = None) -> int:
    """Train and print a summary."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    task = Countdown(args.numbers, args.seed)
    trainer = Trainer(task, args)
    if args.wandb:
        mode: Any = wandb_mode(os.environ)
        wandb.init(project="rollout-grpo", dir=args.out, mode=mode, config=vars(args), settings=_QUIET)
    trainer.config.save_pretrained(args.out / "model")  # no weights: the first update sends them
    flags: dict[str, Any] = {"device": args.worker_device or args.device, "load_format": "random", "wandb": False}
    flags |= {"dtype": "bfloat16" if args.device.startswith("cuda") else "float32", "kv_memory_max_gib": 4}
    flags |= {"max_rows": args.groups * args.group_size, "max_context_tokens": args.numbers + 16}
    flags |= {"log_file": args.out / "worker.log", "jsonl": args.out / "worker.jsonl", "speculation": args.speculation}
    flags |= {"speculation_rows": min(4096, 3 * flags["max_rows"])}  # three drafts of each row
    with nullcontext() if args.endpoints else start_worker(args.out / "model", **flags) as worker:
        endpoints = args.endpoints or worker.endpoints
        with WeightPublisher(endpoints, keep=True) as publisher, BackgroundClient(endpoints, resume=True) as client:
            summary = train(trainer, task, client, publisher)
            summary["workers"] = [{name: told[name] for name in ("version", "state")} for told in publisher.status()]
    if args.speculation != "off" and not args.endpoints:
        summary["speculation"] = speculation_totals(args.out / "worker.jsonl")
        print("speculation: " + ", ".join(f"{name} {value:g}" for name, value in summary["speculation"].items()))
    if args.wandb:
        wandb.finish()
    write_summary(args.out / "summary.json", {**circumstances(), **summary})
    print(f"{summary['completions']} completions, {summary['tokens']} tokens, {summary['seconds']:.0f} s")
    print(f"steps.jsonl, summary.json, the worker's log and metrics, and the W&B run are in {args.out.resolve()}")
    if args.plot:
        plot(args.out, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
