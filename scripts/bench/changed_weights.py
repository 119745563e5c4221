"""Measures the share of a model's bfloat16 weights that a step of GRPO changes, at several learning rates.

    PYTHONPATH=.:kernels python -m scripts.bench.changed_weights models/SmolLM2-135M-Instruct --out FILE

The model answers sums, a reward says which answers are right, and the loss is that of `scripts.learn`. Every learning
rate has its own weights and AdamW state, and takes the same gradients: those at the first learning rate's weights. So
the rates differ in the optimizer's step alone. `masters` rounds float32 weights to bfloat16 after each step; `pure`
keeps the weights in bfloat16, where a change of less than half a unit in the last place is lost.

A row has the share of changed values, and the bytes of a delta in the form that `trainer_bridge.publish.delta` sends,
over the bytes of the weights.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from scripts.bench.output import write_results
from scripts.learn.grpo import Trainer, micro_batches, token_loss
from scripts.learn.recipe import Recipe
from scripts.learn.rollouts import Group, Sample
from scripts.learn.tasks import Problem, chat_ids, graded, last_number

_RATES = (1e-6, 5e-6, 1e-5)
_BETAS = (0.9, 0.95)


def problems(tokenizer: Any, seed: int) -> Iterator[tuple[Problem, str]]:
    """Sums of two numbers and their answers, without end."""
    draw = Random(seed)
    while True:
        a, b = draw.randint(2, 40), draw.randint(2, 40)
        text = f"What is {a} + {b}? Answer with the number alone."
        yield Problem(0, chat_ids(tokenizer, [{"role": "user", "content": text}]), {}), str(a + b)


@torch.no_grad()
def answered(trainer: Trainer, tokenizer: Any, problem: Problem, right: str, count: int, most: int) -> Group:
    """A group of drawn answers and their rewards."""
    prompt = torch.tensor([problem.prompt_ids])
    drawn = trainer.model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=count,
        max_new_tokens=most,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    samples = []
    for row in drawn[:, prompt.shape[1] :].tolist():
        ended = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id) + 1] if ended else row
        verdict = graded(float(last_number(tokenizer.decode(ids, skip_special_tokens=True)) == right), ended)
        zeros = np.zeros(len(ids), np.float32)
        samples.append(Sample(problem.prompt_ids, ids, np.ones(len(ids), bool), zeros, zeros.astype(int), verdict, 1))
    return Group(problem, samples, 0, 0, 0)


def set_gradients(trainer: Trainer, groups: list[Group], recipe: Recipe) -> float:
    """The gradient of GRPO's loss on a batch, in the parameters, scaled down to the recipe's norm; its norm before."""
    for part in micro_batches(groups, recipe, "cpu"):
        tokens = sum(int(rows.drawn_NS.sum()) for rows in part)
        for rows in part:
            new, _ = trainer.logprobs(rows)
            old = new.detach()  # the weights that drew the tokens are these
            advantage = rows.advantage_N1.expand_as(rows.drawn_NS)[rows.drawn_NS]
            (token_loss(new, old, old, advantage, recipe).sum() / tokens).backward()
    return float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), recipe.max_norm))


class Weights:
    """The weights at one learning rate: float32 masters, or bfloat16 alone."""

    def __init__(self, trainer: Trainer, rate: float, pure: bool) -> None:
        self.rate, self.pure = rate, pure
        dtype = torch.bfloat16 if pure else torch.float32
        self.own = [parameter.detach().clone().to(dtype).requires_grad_() for parameter in trainer.model.parameters()]
        self._optimizer = torch.optim.AdamW(self.own, rate, _BETAS, eps=1e-8, weight_decay=0.0)

    def step(self, trainer: Trainer) -> dict[str, Any]:
        """Take a step with the trainer's gradients; the share of changed values, and of bytes that a delta needs."""
        before = [parameter.detach().bfloat16().clone() for parameter in self.own]
        for mine, theirs in zip(self.own, trainer.model.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.to(mine.dtype)
        self._optimizer.step()
        changed = total = code_bytes = 0
        for old, mine in zip(before, self.own, strict=True):
            now = mine.detach().bfloat16()
            where = (now.view(torch.int16) != old.view(torch.int16)).view(-1).nonzero()[:, 0]
            gaps = where.diff(prepend=torch.tensor([-1])) - 1
            changed, total = changed + len(where), total + now.numel()
            code_bytes += min(3 * len(where) + int((gaps // 255).sum()), now.numel() // 8 + 2 * len(where))
        weights = "pure bfloat16" if self.pure else "float32 masters"
        return {"lr": self.rate, "weights": weights, "changed": changed / total, "bytes": code_bytes / (2 * total)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    recipe = Recipe(model=asked.model, lr=_RATES[0], group_size=asked.group_size, seed=asked.seed)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    trainer = Trainer(recipe, asked.model, "cpu")
    kept = [Weights(trainer, rate, pure) for pure in (False, True) for rate in _RATES]
    some = problems(tokenizer, asked.seed)
    rows = []
    for step in range(1, asked.steps + 1):
        groups: list[Group] = []
        while sum(group.teaches for group in groups) < asked.prompts:
            problem, right = next(some)
            groups.append(answered(trainer, tokenizer, problem, right, asked.group_size, asked.max_tokens))
        trainer.optimizer.zero_grad()
        norm = set_gradients(trainer, groups, recipe)
        for weights in kept:
            rows.append({"step": step, **weights.step(trainer), "gradient_norm": norm})
            print(rows[-1], flush=True)
        with torch.no_grad():
            for parameter, mine in zip(trainer.model.parameters(), kept[0].own, strict=True):
                parameter.copy_(mine)
    if asked.out is not None:
        write_results(asked.out, rows, model=Path(asked.model).name, prompts=asked.prompts)


if __name__ == "__main__":
    main()
