"""A student and a teacher of one tokenizer, and the divergence between them by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.learn.toy import make_model

PROMPTS = [f"{number} :" for number in range(1, 13)]


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of a student and of a teacher, which is surer of itself."""
    student, teacher = (make_model(folder / name, seed) for seed, name in enumerate(("student", "teacher")))
    sharp = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        sharp.get_output_embeddings().weight.mul_(6)
    sharp.save_pretrained(teacher)
    return student, teacher


def exact(student: Any, teacher: Path) -> float:
    """Nats: the mean reverse divergence of the token after each prompt, over the whole vocabulary."""
    tokenizer, found = AutoTokenizer.from_pretrained(teacher), []
    models = [student.eval(), AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()]
    for prompt in PROMPTS:
        with torch.inference_mode():
            own, other = (
                model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].double().log_softmax(-1)
                for model in models
            )
        found.append(float((own.exp() * (own - other)).sum()))
    return sum(found) / len(found)
