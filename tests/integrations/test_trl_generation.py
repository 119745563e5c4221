"""TRL's own trainers with a worker in place of vLLM: their steps, weights, log-probs, and tokens of several turns."""

import importlib.util
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install '.[trl]'", allow_module_level=True)

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTTrainer

from tests.support.integrations.integration_worker import start
from tests.support.integrations.tiny_checkpoints import make_chat_checkpoint
from tests.support.integrations.trl_parts import ServedWeights, served_error
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.client.results import Completion
from trainer_bridge.integrations.trl_generation import WorkerGeneration, WorkerRollouts, use_workers

ROWS = [{"prompt": f"{first}:"} for first in (17, 23, 42, 58)]
TURNS = 3
TOOL_CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9][0-9]{0,3}, "b": [0-9]\}\}\n</tool_call>'


def mean_token(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Something that differs between any two completions."""
    return [sum(ids) / len(ids) / 16 for ids in completion_ids]


def config_of(kind: type, folder: Path, **changes: Any) -> Any:
    given = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "temperature": 0.8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1,
    }
    return kind(**{**given, **changes})


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template is one that TRL can parse tool calls of."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    return make_chat_checkpoint(tmp_path_factory.mktemp("trl") / "model", seed=3, template=template)


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[WorkerProcess]:
    """A worker of the model, with other weights than the checkpoint's, until the trainer publishes them."""
    flags = {"load_format": "random", "max_rows": 32, "max_context_tokens": 2048}
    with start(checkpoint, checkpoint.parent / "worker.log", **flags) as worker:
        yield worker


def check_steps(trainer: Any, seen: ServedWeights, steps: int) -> None:
    """Finite steps, and a worker that had the trainer's weights at each: the newest, and not those before."""
    logs = steps_of(trainer)
    assert len(logs) == steps
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logs)
    assert np.diff(seen.versions).tolist() == [1] * (steps - 1)
    assert len(seen.errors) == steps and max(seen.errors) < 1e-4
    assert min(seen.errors_of_old) > 1e-3  # a step changes what is served: the comparison can fail


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        (3, {}),
        pytest.param(10, {}, marks=pytest.mark.nightly),
        pytest.param(3, {"top_k": 6, "top_p": 0.9}, marks=pytest.mark.nightly),
    ],
    ids=["plain", "long", "truncated"],
)
def test_grpo_steps_with_the_workers_tokens_and_the_worker_with_its_weights(
    worker: WorkerProcess, checkpoint: Path, steps: int, changes: dict[str, Any]
) -> None:
    args = config_of(GRPOConfig, checkpoint.parent, max_steps=steps, **changes)
    trainer = GRPOTrainer(str(checkpoint), mean_token, args, Dataset.from_list(ROWS))
    seen = ServedWeights(worker, checkpoint, "on_pre_optimizer_step")
    trainer.add_callback(seen)
    with use_workers(trainer, worker.endpoints):
        trainer.train()
    check_steps(trainer, seen, steps)
    # TRL compares the worker's log-probs with its own, which know no truncation.
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in steps_of(trainer)]
    assert min(differences) > 1e-3 if changes else max(differences) < 1e-4


@pytest.mark.nightly
def test_rloo_steps_with_the_workers_tokens_and_the_worker_with_its_weights(
    worker: WorkerProcess, checkpoint: Path
) -> None:
    args = config_of(RLOOConfig, checkpoint.parent, max_steps=3)
    trainer = RLOOTrainer(str(checkpoint), mean_token, args, Dataset.from_list(ROWS))
    seen = ServedWeights(worker, checkpoint, "on_pre_optimizer_step")
    trainer.add_callback(seen)
    with use_workers(trainer, worker.endpoints):
        trainer.train()
    check_steps(trainer, seen, 3)


@pytest.mark.nightly
def test_adapters_of_peft_are_merged_for_the_worker_and_stay_apart_in_the_trainer(
    worker: WorkerProcess, checkpoint: Path
) -> None:
    args = config_of(GRPOConfig, checkpoint.parent, max_steps=2, learning_rate=1e-1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = GRPOTrainer(str(checkpoint), mean_token, args, Dataset.from_list(ROWS), peft_config=lora)
    with use_workers(trainer, worker.endpoints) as generation:
        trainer.train()
        generation.sync_weights()
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps_of(trainer)) < 1e-4
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert served_error(worker, base) > 1e-3
    assert served_error(worker, trainer.model.merge_and_unload().eval()) < 1e-4


@pytest.mark.nightly
def test_rollout_func_with_workers_corrects_importance_by_their_log_probs(
    worker: WorkerProcess, checkpoint: Path
) -> None:
    args = config_of(GRPOConfig, checkpoint.parent, max_steps=2)
    with WorkerRollouts(worker.endpoints) as rollouts:
        trainer = GRPOTrainer(str(checkpoint), mean_token, args, Dataset.from_list(ROWS), rollout_func=rollouts)
        seen = ServedWeights(worker, checkpoint, "on_pre_optimizer_step")
        trainer.add_callback(seen)
        with use_workers(trainer, worker.endpoints):
            trainer.train()
    check_steps(trainer, seen, 2)
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in steps_of(trainer)) < 1e-4


def test_what_cannot_be_served_is_refused(worker: WorkerProcess, checkpoint: Path) -> None:
    args = config_of(GRPOConfig, checkpoint.parent)
    trainer = GRPOTrainer(str(checkpoint), mean_token, args, Dataset.from_list(ROWS))
    with use_workers(trainer, worker.endpoints) as generation:
        with pytest.raises(ValueError, match="images"):
            generation.generate([[8, 9]], [["an image"]], 1)
        with pytest.raises(ValueError, match="use_vllm"):
            use_workers(trainer, worker.endpoints)
    with pytest.raises(TypeError, match="SFTTrainer"):
        use_workers(SFTTrainer.__new__(SFTTrainer), worker.endpoints)


# --- several turns ----------------------------------------------------------------------------------------------------


class Drawn:
    """What the engine drew, by prompt: recorded as it comes from the worker."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.turns: list[tuple[list[int], Completion]] = []
        plain = WorkerGeneration.complete

        def recorded(generation: WorkerGeneration, prompts: Any, limits: Any = None) -> list[Completion]:
            drawn = plain(generation, prompts, limits)
            self.turns += zip(map(list, prompts), drawn, strict=True)
            return drawn

        patch.setattr(WorkerGeneration, "complete", recorded)

    def follow(self, prompt: list[int], ids: list[int], mask: list[int]) -> int:
        """Assert that all that the model said in a conversation is what the engine drew; return how many turns."""
        runs = [(said, len(list(run))) for said, run in itertools.groupby(mask)]
        at, turns = 0, 0
        for said, length in runs:
            if said:
                before, turn = prompt + ids[:at], ids[at : at + length]
                assert any(seen == before and item.token_ids.tolist() == turn for seen, item in self.turns)
                turns += 1
            at += length
        assert at == len(ids)
        return turns


def drifts(tokenizer: Any, ids: list[int]) -> bool:
    """Whether the text of the tokens has other tokens."""
    return tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] != ids


def test_tool_calls_train_on_the_tokens_that_the_engine_drew(
    worker: WorkerProcess, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: A number.
            b: Another one.

        Returns:
            Their sum.
        """
        return int(a) + int(b)

    drawn, batches = Drawn(monkeypatch), []
    plain = GRPOTrainer._generate_and_score_completions

    def recorded(self: Any, inputs: Any) -> Any:
        batches.append(plain(self, inputs))
        return batches[-1]

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", recorded)
    args = config_of(
        GRPOConfig,
        checkpoint.parent,
        max_steps=1,
        max_completion_length=600,
        max_tool_calling_iterations=TURNS - 1,
        generation_kwargs={"constraint": {"regex": TOOL_CALL}},
    )
    rows = [{"prompt": [{"role": "user", "content": f"add {n}"}]} for n in range(4)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    trainer = GRPOTrainer(
        str(checkpoint), mean_token, args, Dataset.from_list(rows), processing_class=tokenizer, tools=[add]
    )
    with use_workers(trainer, worker.endpoints):
        trainer.train()
    assert all(
        entry["tools/call_frequency"] > 0 and entry["tools/failure_frequency"] == 0 for entry in steps_of(trainer)
    )
    counts = []
    for batch in batches:
        for i in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            there = batch["completion_mask"][i].bool()
            ids, mask = batch["completion_ids"][i][there].tolist(), batch["tool_mask"][i][there].tolist()
            counts.append(drawn.follow(prompt, ids, mask))
    assert max(counts) == TURNS
    assert any(drifts(tokenizer, item.token_ids.tolist()) for _, item in drawn.turns)  # there is something to lose


def test_replies_of_rollout_func_train_on_the_tokens_that_the_engine_drew(
    worker: WorkerProcess, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, outputs, said = Drawn(monkeypatch), [], []

    def reply(prompt: Any, completion: str) -> str | None:
        said.append(completion)
        return "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n" if "call" in completion else None

    args = config_of(
        GRPOConfig,
        checkpoint.parent,
        max_steps=2,
        max_completion_length=100,
        generation_kwargs={"constraint": {"regex": "call [a-z]{2,4}|end"}},
    )
    rows = [{"prompt": [{"role": "user", "content": f"add {n}"}]} for n in range(4)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with WorkerRollouts(worker.endpoints, reply=reply) as rollouts:

        def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            outputs.append(rollouts(prompts, trainer))
            return outputs[-1]

        trainer = GRPOTrainer(
            str(checkpoint),
            mean_token,
            args,
            Dataset.from_list(rows),
            processing_class=tokenizer,
            rollout_func=recorded,
        )
        trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in steps_of(trainer))
    told = [dict(zip(output, row, strict=True)) for output in outputs for row in zip(*output.values(), strict=True)]
    assert len(told) == 16 and all(len(row["completion_ids"]) <= 100 for row in told)
    counts = [drawn.follow(row["prompt_ids"], row["completion_ids"], row["env_mask"]) for row in told]
    assert max(counts) > 1
    logprobs = [pair for row in told for pair in zip(row["logprobs"], row["env_mask"], strict=True)]
    assert not any(value for value, own in logprobs if not own)
    assert min(value for value, own in logprobs if own) < 0
    assert len(said) == sum(counts)
