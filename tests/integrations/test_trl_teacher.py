"""A worker is the teacher of TRL's GOLD and GKD trainers: its logits and their losses are those of a local model."""

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install '.[trl]'", allow_module_level=True)

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.integrations.distillation import PROMPTS, exact, make_pair
from tests.support.integrations.integration_worker import start
from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint
from tests.support.tokenizer_folder import TEMPLATE
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.integrations.trl_generation import use_workers
from trainer_bridge.integrations.trl_teacher import WorkerTeacher
from trainer_bridge.wire.errors import RolloutError

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 6, "max_steps": 4, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
    "logging_steps": 1, "max_length": 64, "max_completion_length": 8, "report_to": "none", "save_strategy": "no",
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "seed": 1,
    "use_extended_uld": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, WorkerProcess]]:
    """The folders of a student and a teacher of one vocabulary of 18 tokens, and the teacher's worker."""
    folder = tmp_path_factory.mktemp("pair")
    student, teacher = make_pair(folder)
    with start(teacher, folder / "log", max_rows=16, dtype="float32") as worker:
        yield student, teacher, worker


def local(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def losses(trainer: Any, endpoints: str | None = None) -> list[float]:
    """The losses of a training. With `endpoints` the student's texts come from a worker."""
    with nullcontext() if endpoints is None else use_workers(trainer, endpoints):
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def gold(student: Any, teacher: Any, rows: list[dict[str, str]], folder: Path, tokenizer: Path, **changes: Any) -> Any:
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    args = GOLDConfig(**COMMON | {"output_dir": str(folder), "lmbda": 0.0, "temperature": 1.0} | changes)
    processing = AutoTokenizer.from_pretrained(tokenizer)
    return GOLDTrainer(student, teacher, args, train_dataset=Dataset.from_list(rows), processing_class=processing)


def test_its_logits_are_those_of_transformers(pair: tuple[Path, Path, WorkerProcess]) -> None:
    _, folder, worker = pair
    ids = torch.randint(2, 18, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 7:], mask[2] = 0, 0, 0
    with torch.inference_mode():
        expected = [local(folder)(ids[row : row + 1, mask[row].bool()]).logits[0].log_softmax(-1) for row in (0, 1)]
    with WorkerTeacher(str(folder), worker.endpoints) as teacher:
        found = teacher(input_ids=ids, attention_mask=mask).logits
        assert found.shape == (3, 11, 18) and not found[mask == 0].any()
        for row, rows in enumerate(expected):
            torch.testing.assert_close(found[row, mask[row].bool()], rows, atol=1e-4, rtol=0)
        teacher.resize_token_embeddings(24)
        wider = teacher(input_ids=ids, attention_mask=mask).logits.softmax(-1)
        assert wider.shape[-1] == 24 and wider[mask == 1][:, 18:].sum(-1).max() < 1e-5
        torch.testing.assert_close(wider[0, 4:, :18], expected[0].exp(), atol=1e-5, rtol=0)
        with pytest.raises(TypeError):
            teacher(input_ids=ids, pixel_values=ids)
        with pytest.raises(RolloutError, match="context"):
            teacher(input_ids=torch.full((1, 257), 3))


def test_tokens_that_it_does_not_know_share_the_rest(pair: tuple[Path, Path, WorkerProcess]) -> None:
    _, folder, worker = pair
    ids = torch.randint(2, 18, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = local(folder)(ids).logits.log_softmax(-1)
    with WorkerTeacher(str(folder), worker.endpoints, top=3) as teacher:
        found = teacher(input_ids=ids).logits
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 9), atol=1e-5, rtol=0)
    likeliest = expected.topk(3).indices
    torch.testing.assert_close(found.gather(-1, likeliest), expected.gather(-1, likeliest), atol=1e-4, rtol=0)
    own = torch.cat([ids[:, 1:], ids[:, -1:]], 1)[:, :, None]  # the last token is asked for twice
    torch.testing.assert_close(found.gather(-1, own), expected.gather(-1, own), atol=1e-4, rtol=0)
    known = torch.zeros_like(found, dtype=torch.bool).scatter(-1, likeliest, True).scatter(-1, own, True)
    for row, others in zip(found.flatten(0, 1), ~known.flatten(0, 1), strict=True):
        assert row[others].max() - row[others].min() < 1e-5, "they are equally likely"


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_gold_has_the_losses_of_a_local_teacher(
    pair: tuple[Path, Path, WorkerProcess], tmp_path: Path, beta: float
) -> None:
    student, folder, worker = pair
    rows = [{"prompt": f"{prompt} ", "completion": "4 5 6"} for prompt in PROMPTS]
    with WorkerTeacher(str(folder), worker.endpoints) as teacher:
        found, expected = (
            losses(gold(local(student), each, rows, tmp_path, student, beta=beta)) for each in (teacher, local(folder))
        )
    assert len(found) == 4 and min(expected) > 1e-2
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.nightly
def test_a_student_of_gold_learns_with_a_worker_on_each_side(
    pair: tuple[Path, Path, WorkerProcess], tmp_path: Path
) -> None:
    """The student's texts come from a worker that gets its weights, the teacher's log-probs from another one."""
    student, folder, worker = pair
    model, rows = local(student), [{"prompt": f"{prompt} ", "completion": "4"} for prompt in PROMPTS]
    before = exact(model, folder)
    with (
        start(student, tmp_path / "log", max_rows=16, dtype="float32") as policy,
        WorkerTeacher(str(folder), worker.endpoints) as teacher,
    ):
        trainer = gold(model, teacher, rows, tmp_path, student, lmbda=1.0, beta=1.0, max_steps=30)
        losses(trainer, policy.endpoints)
    assert exact(model, folder) < 0.9 * before


def sharp_chat_checkpoint(folder: Path, template: str) -> Path:
    """A model that gives nearly all of the probability to 256 tokens."""
    model = local(make_chat_checkpoint(folder, 4, template))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("extended", [True, False])
def test_gold_has_the_losses_of_a_local_teacher_of_another_tokenizer(tmp_path: Path, extended: bool) -> None:
    student = make_chat_checkpoint(tmp_path / "student", 3, TEMPLATE)
    folder = sharp_chat_checkpoint(tmp_path / "teacher", TEMPLATE + "{# what is the sum of numbers #}")
    rows = [{"prompt": f"what is {n} plus {n}?", "completion": f" the sum is {2 * n}"} for n in range(12, 24)]
    changes = {"use_uld_loss": True, "use_extended_uld": extended, "teacher_tokenizer_name_or_path": str(folder)}
    with (
        start(folder, tmp_path / "log", max_rows=16, dtype="float32") as worker,
        WorkerTeacher(str(folder), worker.endpoints) as teacher,
    ):
        found, expected = (
            losses(gold(local(student), each, rows, tmp_path, student, **changes)) for each in (teacher, local(folder))
        )
    assert len(found) == 4 and min(expected) > 1e-2
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_gkd_has_the_losses_of_a_local_teacher(tmp_path: Path) -> None:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    student, folder = (
        make_chat_checkpoint(tmp_path / "student", 3, TEMPLATE),
        sharp_chat_checkpoint(tmp_path / "t", TEMPLATE),
    )
    talks = [
        [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": str(2 * n)}] for n in range(9, 21)
    ]
    given = {name: value for name, value in COMMON.items() if name not in ("use_extended_uld", "max_completion_length")}
    args = GKDConfig(**given | {"output_dir": str(tmp_path), "lmbda": 0.0, "max_new_tokens": 8})
    found = []
    with (
        start(folder, tmp_path / "log", max_rows=16, dtype="float32") as worker,
        WorkerTeacher(str(folder), worker.endpoints) as teacher,
    ):
        for each in (teacher, local(folder)):
            rows = Dataset.from_list([{"messages": talk} for talk in talks])
            tokenizer = AutoTokenizer.from_pretrained(student)
            trainer = GKDTrainer(local(student), each, args, train_dataset=rows, processing_class=tokenizer)
            found.append(losses(trainer))
    assert len(found[0]) == 4 and min(found[1]) > 1e-2
    np.testing.assert_allclose(*found, rtol=1e-2)
