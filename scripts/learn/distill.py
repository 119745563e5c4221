"""On-policy distillation in plain PyTorch: a student learns a teacher's distribution on the text that it writes itself.

    python -m scripts.learn.distill --student FOLDER --teacher FOLDER --prompts FILE     FILE: a prompt on each line

In each step the student's worker samples and reports its likeliest tokens at each position. The teacher's worker scores
these tokens. The trainer lowers the reverse KL divergence (arXiv 2306.13649) and publishes the student. Both models
have one tokenizer. With --turns both workers use one device: each sleeps while the other works.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.learn.rollouts import checked
from trainer_bridge import RolloutClient, WeightPublisher, start_worker

DEVICE, DTYPE = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")


def reverse_kl(logits_TV: torch.Tensor, ids_TK: np.ndarray, teacher_TK: np.ndarray) -> torch.Tensor:
    """The divergence at each position [T], nats, over K tokens; all other tokens count as one more token."""
    ids, teacher = (torch.from_numpy(array.copy()).to(logits_TV.device) for array in (ids_TK, teacher_TK))
    student = logits_TV.float().log_softmax(-1).gather(-1, ids.long())
    rest, others = (torch.log((1 - some.exp().sum(-1)).clamp(min=1e-6)) for some in (student, teacher))
    return (student.exp() * (student - teacher)).sum(-1) + rest.exp() * (rest - others)


def question(text: list[int], ids_TK: np.ndarray) -> dict[str, Any]:
    """A request for the scores of K tokens at each of the last T positions of a text."""
    return {"prompt": text, "prompt_logprob_token_ids": ids_TK, "prompt_logprobs_last": len(ids_TK)}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("student", "teacher", "prompts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, value in {"steps": 20, "batch": 8, "samples": 4, "new": 64, "top": 20, "lr": 1e-5}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="default: %(default)s")
    parser.add_argument("--turns", action="store_true", help="the workers sleep in turn, for one device")
    parser.add_argument("--out", type=Path, default=Path("runs/distilled"), help="folder for the trained student")
    args = parser.parse_args(argv)
    lines = [line for line in args.prompts.read_text().splitlines() if line.strip()]
    if not lines:
        parser.error(f"--prompts {args.prompts} has no prompt: write one on each line")
    tokenizer = AutoTokenizer.from_pretrained(args.student)
    prompts = [tokenizer(line)["input_ids"] for line in lines]
    model: Any = AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.to(DEVICE).parameters(), lr=args.lr)
    how = {"max_rows": args.batch * args.samples, "dtype": DTYPE, "kv_memory_max_gib": 4, "sleep": args.turns}
    with (
        start_worker(str(args.student), **how) as worker,
        start_worker(str(args.teacher), **how) as other,
        RolloutClient(worker.endpoints) as student,
        RolloutClient(other.endpoints) as teacher,
        WeightPublisher(worker.endpoints) as publisher,
    ):
        if args.turns:
            teacher.sleep()
        for step in range(args.steps):
            batch = [prompts[(step * args.batch + i) % len(prompts)] for i in range(args.batch)]
            results = student.generate_many(batch, n=args.samples, max_tokens=args.new, logprobs=args.top)
            if args.turns:
                student.sleep()
                teacher.wake()
            drawn = [item for result in results for item in checked(result).completions]
            texts = [[*batch[i // args.samples], *item.token_ids] for i, item in enumerate(drawn)]
            asked = [question(text, item.top_ids) for text, item in zip(texts, drawn, strict=True)]
            scores = teacher.generate_many(asked, max_tokens=0)
            if args.turns:
                teacher.sleep()
                student.wake()
            total, tokens = 0.0, sum(len(item.token_ids) for item in drawn)
            for text, item, score in zip(texts, drawn, scores, strict=True):
                logits = model(torch.tensor([text], device=DEVICE)).logits[0, -len(item.token_ids) - 1 : -1]
                loss = reverse_kl(logits, item.top_ids, score.prompt_chosen_logprobs).sum() / tokens
                loss.backward()
                total += loss.item()
            print(f"step {step}: reverse KL {total:.4f} nats a token", flush=True)
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model.state_dict(), version=step + 1).applied()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
