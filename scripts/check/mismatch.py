"""Compares a worker's log-probs with the log-probs that transformers computes for the same tokens.

    python -m scripts.check.mismatch MODEL --completions 4 --tokens 16384 --report

MODEL is a checkpoint folder or a hub id; `--make qwen3 1.7b` first creates that folder with random weights. A worker
generates at temperature 1: the script starts one, or --endpoint names one that serves the same weights. Then
transformers runs prompt and completion in one forward, once in float32 and once in bf16. The worker's `raw_logprobs`
are compared with both: mean and largest absolute difference, and the K3 estimate of KL(worker || trainer), in nats. The
two runs of transformers are compared with each other, too, which shows the share of bf16 rounding. With --report the
script reports the bf16 log-probs to the worker as a trainer does, and the worker's metrics show the same figures. Exit
status 1 if the K3 KL against bf16 is above --most-k3.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.metrics.logprob_mismatch import MismatchSums, compare
from rollout.process.progress import stage
from scripts.bench.output import print_table, write_results
from scripts.bench.reference import FAMILIES, SIZES, all_logits, attention_of, make_checkpoint
from scripts.bench.shapes import kv_pages
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker
from trainer_bridge.client.results import GenerateResult

_PROMPT_TOKENS = 64
_PAGE = 16
_POSITIONS = 1024  # positions whose logits are in memory at once


@torch.inference_mode()
def recompute(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """Log-probs of the completion's tokens, float32 [tokens]; the logits of some positions at a time."""
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    hidden_KH = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    tokens_K1 = ids[0, len(prompt) :, None]
    parts = []
    for first in range(0, len(completion), _POSITIONS):
        logits_PV = all_logits(model, hidden_KH[first : first + _POSITIONS]).float()
        parts.append(logits_PV.log_softmax(-1).gather(1, tokens_K1[first : first + _POSITIONS])[:, 0])
    return torch.cat(parts).cpu().numpy()


def load(path: str, dtype: torch.dtype, device: str) -> Any:
    """The transformers model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = attention_of(AutoConfig.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    return model.to(torch.device(device)).eval()  # type: ignore[arg-type]


def generate(client: RolloutClient, args: argparse.Namespace) -> list[tuple[list[int], GenerateResult]]:
    """Prompts of random tokens, and the worker's completions."""
    rng = np.random.default_rng(args.seed)
    vocab = args.vocab or client.status()["vocab_size"]
    prompts = [rng.integers(0, vocab, _PROMPT_TOKENS).tolist() for _ in range(args.completions)]
    fields: dict[str, Any] = {"max_tokens": args.tokens, "seed": args.seed, "stop": {"ignore_eos": True}}
    results = client.generate_many(prompts, progress=True, timeout_s=args.timeout_s, **fields)
    return list(zip(prompts, results, strict=True))


def measure(
    args: argparse.Namespace, client: RolloutClient, made: list[tuple[list[int], GenerateResult]]
) -> Iterator[dict[str, Any]]:
    """A row for each precision, and a row that compares the two."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    exact: list[np.ndarray] = []
    own = MismatchSums()
    for dtype in (torch.float32, torch.bfloat16):
        model, total = load(args.model, dtype, device), MismatchSums()
        with stage(f"transformers in {dtype}".replace("torch.", "")) as advance:
            for i, (prompt, result) in enumerate(made):
                (completion,) = result.completions
                trainer = recompute(model, prompt, completion.token_ids.tolist())
                total += compare(completion.raw_logprobs, trainer)
                if dtype is torch.float32:
                    exact.append(trainer)
                else:
                    own += compare(trainer, exact[i])
                if args.report and dtype is torch.bfloat16:
                    client.report(result, [trainer])
                advance(i + 1, len(made))
        yield _row("worker", str(dtype).removeprefix("torch."), total)
    yield _row("transformers in bfloat16", "float32", own)


def _row(of: str, against: str, total: MismatchSums) -> dict[str, Any]:
    figures = {"tokens": total.tokens, "mean_abs": total.mean_abs, "max_abs": total.max_abs, "k3_kl": total.k3_kl}
    return {"of": of, "against": against, **figures}


def make(folder: Path, family: str, size: str) -> None:
    """A checkpoint with random weights, as in `scripts.check.correctness`. Raises SystemExit for an unknown kind."""
    if family not in FAMILIES or size not in SIZES:
        raise SystemExit(f"--make takes a family of {', '.join(FAMILIES)} and a size of {', '.join(SIZES)}")
    folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(family, size, "bfloat16", "cuda" if torch.cuda.is_available() else "cpu", folder)


def main() -> int:
    """Generate, recompute, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--endpoint", help="endpoint of a worker with these weights; default: start one")
    parser.add_argument("--make", nargs=2, metavar=("FAMILY", "SIZE"), help="create MODEL first, with random weights")
    parser.add_argument("--completions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, help="largest token id of prompts, exclusive; default: all ids")
    parser.add_argument("--dtype", default="auto", help="device of the worker")
    parser.add_argument("--device", help="of transformers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--most-k3", type=float, default=1e-2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.make is not None:
        make(Path(args.model), *args.make)
    with ExitStack() as stack:
        endpoint = args.endpoint
        if endpoint is None:
            context = _PROMPT_TOKENS + args.tokens
            settings = {
                "max_rows": args.completions,
                "max_context_tokens": context,
                "page_size": _PAGE,
                "kv_pages": kv_pages(args.completions, context, _PAGE),  # leaves the other memory to transformers
            }
            worker = stack.enter_context(start_worker(args.model, wandb=False, dtype=args.dtype, **settings))
            endpoint = worker.endpoint
        client = stack.enter_context(RolloutClient(endpoint, timeout_s=args.timeout_s, acknowledge=not args.report))
        rows = list(measure(args, client, generate(client, args)))
        print_table(f"{args.model}: log-probs of the worker against transformers", rows)
        if args.out is not None:
            write_results(args.out, rows, model=args.model, completions=args.completions)
    *_, bf16, _ = rows
    print(json.dumps({row["against"]: row["k3_kl"] for row in rows[:2]}))
    return int(bf16["k3_kl"] > args.most_k3)


if __name__ == "__main__":
    sys.exit(main())
