"""TRL's GRPO with images: a worker draws from the same pixels as the trainer's forward sees."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install '.[trl]'", allow_module_level=True)

from datasets import Dataset
from PIL import Image, ImageDraw
from transformers import Qwen3VLForConditionalGeneration
from trl import GRPOConfig, GRPOTrainer

from tests.support.gateway.image_folder import add_processor
from tests.support.integrations.image_processor import WordsAndImages
from tests.support.integrations.integration_worker import start
from tests.support.models.images import make_model
from trainer_bridge.integrations.trl_generation import use_workers

COUNTS = (1, 2, 3, 4)
STEPS = 10


def drawn_shapes(count: int) -> Image.Image:
    """A picture of so many squares."""
    picture = Image.new("RGB", (40, 24))
    draw = ImageDraw.Draw(picture)
    for i in range(count):
        draw.rectangle((2 + 9 * i, 4, 8 + 9 * i, 12), fill=(255, 60 * i, 30))
    return picture


def reward_of_counts(completion_ids: list[list[int]], count: list[int], **columns: Any) -> list[float]:
    """The share of words whose number leaves the count of squares, divided by 4: it depends on the picture."""
    return [
        sum(token % 4 == squares % 4 for token in ids) / max(len(ids), 1)
        for ids, squares in zip(completion_ids, count, strict=True)
    ]


@pytest.mark.nightly  # also in the run of all integrations
def test_grpo_learns_to_count_in_ten_steps(tmp_path: Path) -> None:
    make_model("Qwen3-VL", tmp_path / "model")
    add_processor(tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": "w5"}], "image": drawn_shapes(count), "count": count}
        for count in COUNTS
    ]
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=32, num_generations=8, max_completion_length=8, temperature=1.0,
        learning_rate=2e-3, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, seed=1, max_steps=STEPS,
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(
        model,
        reward_of_counts,
        args,
        Dataset.from_list(rows),
        processing_class=WordsAndImages.from_pretrained(tmp_path / "model"),
    )
    flags = {"images": True, "max_rows": 32}
    with start(tmp_path / "model", tmp_path / "log", **flags) as worker, use_workers(trainer, worker.endpoints):
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == STEPS and all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logs)
    differences = [value for entry in logs for key, value in entry.items() if "sampling_logp_difference/max" in key]
    assert len(differences) == STEPS and max(differences) < 1e-3, "the worker and the trainer see the same pixels"
    rewards = [entry["reward"] for entry in logs]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.15, rewards
