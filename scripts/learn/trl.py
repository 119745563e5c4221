"""The same problems, model, batch and optimizer with TRL's GRPOTrainer: transformers, vLLM or a worker generates.

    python -m scripts.learn.trl --generation transformers --model MODEL --level 2 --steps 40 --out runs/trl
    python -m scripts.learn.trl --generation vllm --model MODEL --level 2 --steps 40 --out runs/trl_vllm
    python -m scripts.learn.trl --generation worker --model MODEL --level 2 --steps 40 --out runs/trl_worker
    python -m scripts.learn --mode sync --model MODEL --level 2 --steps 40 --out runs/own

TRL has no curriculum, so name a level; and it asks for no other problems in place of those that teach nothing. Its
weights are float32, with bfloat16 autocast on a GPU, as the recipe's. vLLM runs in TRL's process (`colocate`). The
command writes run.json, in the recipe's form. Needs the extra `trl`.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from scripts.bench.output import circumstances, write_summary
from scripts.learn import toy
from scripts.learn.grpo import micro_tokens
from scripts.learn.recipe import Recipe, add_flags, read_recipe
from scripts.learn.run import make_task, rounded, thinned, worker_flags
from scripts.learn.tasks import Answer, Curriculum, Verdict
from scripts.learn.together import Start, add_start_flags, read_start
from trainer_bridge import start_worker
from trainer_bridge.integrations.trl_generation import use_workers


class Record(TrainerCallback):
    """The rewards of each step, with the seconds since training began."""

    def __init__(self, tell: Any, max_seconds: float = 0.0) -> None:
        self.max_seconds = max_seconds
        self.rows: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []
        self.tokens = 0
        self._total = 0
        self._began_s = self._last_s = 0.0
        self._tell = tell

    def on_train_begin(self, *given: Any, **more: Any) -> None:
        """Start the clock."""
        self._began_s = self._last_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Take in the step that has ended."""
        now_s = time.perf_counter()
        self._total += self.tokens
        row = {"step": state.global_step, "wall_s": now_s - self._began_s, "tokens_total": self._total}
        row |= {"reward": statistics.fmean(each.reward for each in self.verdicts), "tokens": self.tokens}
        row |= {"right": statistics.fmean(each.right for each in self.verdicts), "time/step_s": now_s - self._last_s}
        self.rows.append(row)
        self._tell(f"step {row['step']} {row['wall_s']:.1f} s: reward {row['reward']:.3f}, right {row['right']:.3f}")
        self.verdicts, self.tokens, self._last_s = [], 0, now_s
        if 0 < self.max_seconds < row["wall_s"]:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Add TRL's own figure for the difference of log-probs to the step that has ended."""
        names = [name for name in logs or {} if name.startswith("sampling/sampling_logp_difference")]
        if self.rows:
            self.rows[-1] |= {name: float(logs[name]) for name in names}


def train(recipe: Recipe, generation: str, out: Path, tell: Any = print, start: Start | None = None) -> dict[str, Any]:
    """Train by TRL; returns the summary. Raises SystemExit for a task of several turns, or without a level."""
    start = start or Start()
    if recipe.level < 0 or recipe.mode != "sync":
        raise SystemExit("TRL is compared on one level: name a --level, and --mode sync")
    model = recipe.model or str(toy.make_model(out / "model", recipe.seed))
    tokenizer = AutoTokenizer.from_pretrained(model)
    task = make_task(recipe, tokenizer)
    if task.reply is not None:
        raise SystemExit(f"TRL is compared on tasks of one turn, and {recipe.task} has several: name another --task")
    record, curriculum = Record(tell), Curriculum(task, recipe.seed, recipe.level)
    steps = range(1, recipe.steps + 1)
    problems = [problem for step in steps for problem in islice(curriculum.problems(step), recipe.prompts)]
    texts = [tokenizer.decode(problem.prompt_ids) for problem in problems]
    for problem, text in zip(problems, texts, strict=True):
        if tokenizer(text)["input_ids"] != problem.prompt_ids:
            raise ValueError("this tokenizer does not give a prompt's text the prompt's token ids")

    def reward(
        completions: list[str], completion_ids: list[list[int]], number: list[int], **columns: Any
    ) -> list[float | None]:
        config: Any = trainer.model.generation_config  # type: ignore[union-attr]
        ends = set(end if isinstance(end := config.eos_token_id, list) else [end])
        found = [
            task.reward(problems[i], Answer(ids, text, ids[-1] in ends))
            for text, ids, i in zip(completions, completion_ids, number, strict=True)
        ]
        record.verdicts += found
        record.tokens += sum(map(len, completion_ids))
        return [each.reward for each in found]

    device = recipe.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    vllm = {"use_vllm": True, "vllm_max_model_length": task.max_context} if generation == "vllm" else {}
    trainer = GRPOTrainer(
        model,
        reward,
        grpo_config(recipe, out, task.max_tokens, on_gpu, **vllm),
        Dataset.from_dict({"prompt": texts, "number": list(range(len(texts)))}),
        processing_class=tokenizer,
        callbacks=[record],
    )
    with ExitStack() as stack:
        with start.turn():
            if generation == "worker":
                worker = stack.enter_context(start_worker(model, **worker_flags(recipe, task, device, out)))
                stack.enter_context(use_workers(trainer, worker.endpoints))
        record.max_seconds = start.wait(recipe.max_seconds, tell)
        trainer.train()
    rows = record.rows
    summary = {
        **circumstances(),
        "recipe": {**asdict(recipe), "model": Path(recipe.model).name or "tiny"},
        "generation": generation,
        "steps_done": len(rows),
        "seconds": rows[-1]["wall_s"],
        "step_s": rounded({"median": statistics.median(row["time/step_s"] for row in rows)}),
        "points": [rounded(row) for row in thinned(rows, 60)],
        "evaluations": [],
    }
    write_summary(out / "run.json", summary)
    return summary


def grpo_config(recipe: Recipe, out: Path, max_tokens: int, on_gpu: bool, **more: Any) -> GRPOConfig:
    """TRL's settings for the recipe's loss and optimizer; `more` are settings of TRL."""
    batch = recipe.prompts * recipe.group_size
    # TRL pads all samples to one length. Prompts are about as long as answers, and not shorter than 64 tokens.
    rows = max(1, micro_tokens(recipe, "cuda" if on_gpu else "cpu") // (max_tokens + max(64, max_tokens)))
    micro = max(count for count in range(1, min(rows, batch) + 1) if batch % count == 0)
    return GRPOConfig(
        str(out / "trl"),
        max_steps=recipe.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=recipe.group_size,
        max_completion_length=max_tokens,
        shuffle_dataset=False,
        temperature=recipe.temperature,
        top_k=0,
        beta=recipe.kl,
        scale_rewards=recipe.scale_rewards,
        entropy_coef=recipe.entropy,
        use_adaptive_entropy=recipe.entropy_target > 0,
        entropy_target=recipe.entropy_target,
        entropy_coef_delta=recipe.entropy_step,
        epsilon=recipe.clip_low,
        epsilon_high=recipe.clip_high,
        loss_type="dapo",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=recipe.importance_cap,
        learning_rate=recipe.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=recipe.max_norm,
        model_init_kwargs={"dtype": "float32"},
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        seed=recipe.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.set_defaults(mode="sync")
    parser.add_argument("--generation", choices=("transformers", "vllm", "worker"), default="worker")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"), help="folder for what is written (%(default)s)")
    add_start_flags(parser)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tell = partial(print, flush=True)
    summary = train(read_recipe(arguments), arguments.generation, arguments.out, tell, read_start(arguments))
    print(json.dumps({"steps": summary["steps_done"], **summary["step_s"]}))


if __name__ == "__main__":
    main()
