"""TRL's own distillation trainer learns from a teacher behind the gateway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.gateway.harness import gateway
from tests.support.integrations.distillation import PROMPTS, exact, make_pair
from tests.support.worker.harness import launch

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """The folders of a student and a teacher, and the address of the teacher's gateway."""
    folder = tmp_path_factory.mktemp("distillation")
    student, teacher = make_pair(folder)
    with (
        launch(teacher, log=folder / "log", max_rows=16, max_context_tokens=256, dtype="float32") as worker,
        gateway([worker.endpoint], served_model_name=("teacher",), logprobs="raw") as client,
    ):
        yield student, teacher, str(client.base_url).rstrip("/")


@pytest.mark.parametrize("loss", [{"beta": 0.0, "loss_top_k": 12}, {"beta": 1.0}, {"beta": 0.5}], ids=str)
def test_a_student_of_trls_server_distillation_learns(
    pair: tuple[Path, Path, str], tmp_path: Path, vllm_client: Any, loss: dict[str, Any]
) -> None:
    """`beta` 0: forward divergence over the teacher's likeliest tokens; 1: reverse, of the drawn ones."""
    distillation = pytest.importorskip("trl.experimental.server_distillation")
    datasets = pytest.importorskip("datasets")
    student, teacher, url = pair
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    before = exact(model, teacher)
    settings = distillation.ServerDistillationConfig(
        output_dir=str(tmp_path), teacher_model_server_url=url, per_device_train_batch_size=8, max_steps=30,
        learning_rate=3e-3, lr_scheduler_type="constant", max_completion_length=8, report_to=[], save_strategy="no",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **loss,
    )  # fmt: skip
    distillation.ServerDistillationTrainer(
        model=model,
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(student),
    ).train()
    after = exact(model, teacher)
    assert after < 0.9 * before
