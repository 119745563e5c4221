"""TRL's GRPOTrainer with a rollout worker, by TRL's `rollout_func`. Runs on a CPU.

    pip install '.[worker,trl]'
    python scripts/trl_grpo_rollout_func.py --steps 60

Without `--model` it trains the demo's tiny model from random weights: GRPO teaches it to write sevens.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL calls `rollout_func` experimental

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

from trainer_bridge import start_worker
from trainer_bridge.integrations.trl_generation import WorkerRollouts

DEMO_MODEL = Path(__file__).parents[1] / "rollout" / "demo" / "checkpoints" / "ones"


def share_of_sevens(completions: list[str], **columns: Any) -> list[float | None]:
    """The reward: how much of a completion is the digit 7."""
    return [text.count("7") / max(1, len(text)) for text in completions]


def fresh_model(folder: Path) -> str:
    """The demo's model and tokenizer in a folder, with random weights: the demo's own are too sure to explore."""
    set_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO_MODEL)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return str(folder)


def train(model: str, steps: int, output: str, **worker_flags: Any) -> list[float]:
    """Train; returns the mean reward of each step."""
    dataset = Dataset.from_list([{"prompt": f"{number}:"} for number in range(10, 90)])
    args = GRPOConfig(
        output,
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=24,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    with (
        start_worker(model, max_rows=32, device="cpu", **worker_flags) as worker,
        WorkerRollouts(worker.endpoints) as rollouts,
    ):
        trainer = GRPOTrainer(model, share_of_sevens, args, dataset, processing_class=tokenizer, rollout_func=rollouts)
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    """Train, and print how the reward grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint folder [the demo's model with random weights]")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps [60]")
    parser.add_argument("--output", default="runs/trl_grpo", help="folder for what TRL writes [runs/trl_grpo]")
    options = parser.parse_args()
    model = options.model or fresh_model(Path(options.output) / "model")
    rewards = train(model, options.steps, options.output)
    print(f"mean reward: {rewards[0]:.3f} at the first step, {rewards[-1]:.3f} at the last; TRL wrote {options.output}")


if __name__ == "__main__":
    main()
