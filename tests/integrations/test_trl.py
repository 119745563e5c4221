"""TRL's asynchronous trainer on a real worker: its steps, the weights that arrive, and log-probs in its convention."""

import dataclasses
import importlib.util
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from tests.support.integrations.integration_worker import start
from tests.support.integrations.tiny_checkpoints import make_checkpoint
from tests.support.integrations.trl_parts import ServedWeights, tree_attention
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.integrations.trl import RolloutWorker, Sample, WeightTransfer, async_grpo_parts
from trainer_bridge.publish.publisher import WeightPublisher

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install '.[trl]'"
)
ROWS = [{"prompt": f"{first}:", "wanted": str(first)} for first in (17, 23, 42, 58)]
STEPS, TEMPERATURE, TOKENS = 4, 0.8, 12


def mean_token(completion_ids: list[list[int]], wanted: list[str], **columns: Any) -> list[float]:
    """Something that differs between any two completions."""
    assert len(wanted) == len(completion_ids)
    return [sum(ids) / len(ids) / 16 for ids in completion_ids]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("trl") / "model", seed=3)


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[WorkerProcess]:
    """A worker of the model, with other weights than the checkpoint's, until the trainer publishes them."""
    with start(checkpoint, checkpoint.parent / "worker.log", load_format="random", max_rows=32) as worker:
        yield worker


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def trained(worker: WorkerProcess, checkpoint: Path, tokenizer: Any) -> tuple[Any, ServedWeights, int]:
    """TRL's own trainer after a few steps, what was seen after each, and the version that the worker had before."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    config = AsyncGRPOConfig(
        output_dir=str(checkpoint.parent / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=TOKENS,
        temperature=TEMPERATURE,
        token_budget=0,
        max_staleness=2,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    with WeightPublisher(worker.endpoint) as publisher:
        before = publisher.status()[0]["version"]
    parts = async_grpo_parts(worker.endpoint, config, ROWS, mean_token, tokenizer)
    dataset = Dataset.from_list(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        # It looks the GPU's name up for a metric, and has attention for GPUs only; all else is TRL's own.
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "none")
        trainer = AsyncGRPOTrainer(str(checkpoint), mean_token, config, dataset, tokenizer, **parts)
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    seen = ServedWeights(worker, checkpoint, "on_step_end")
    trainer.add_callback(seen)  # the last one: after TRL's own that sends the weights
    trainer.train()
    return trainer, seen, before


@needs_trl
def test_trl_trainer_steps_with_finite_loss(trained: tuple[Any, ServedWeights, int]) -> None:
    logs = [entry for entry in trained[0].state.log_history if "loss" in entry]
    assert len(logs) == STEPS
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in logs)
    assert all(entry["grad_norm"] > 0 for entry in logs)
    assert all(0 <= entry["rewards/mean_token"] <= 1 for entry in logs)
    assert all(entry["sample/staleness_max"] <= 2 and "sample/dropped_stale_total" not in entry for entry in logs)


@needs_trl
def test_worker_serves_the_trainers_weights_after_every_step(trained: tuple[Any, ServedWeights, int]) -> None:
    _, seen, before = trained
    assert seen.versions == [
        before + 1 + step for step in range(1, STEPS + 1)
    ]  # the first update is TRL's before step 1
    assert max(seen.errors) < 1e-4
    assert min(seen.errors_of_old) > 1e-3  # a step changes what is served: the comparison can fail


@needs_trl
def test_trl_computes_the_log_probs_that_it_was_given(trained: tuple[Any, ServedWeights, int]) -> None:
    first = next(entry for entry in trained[0].state.log_history if "ratio" in entry)
    assert first["sample/staleness_max"] == 0
    assert abs(first["ratio"] - 1) < 1e-4
    assert abs(first["kl"]) < 1e-6


@needs_trl
def test_sample_has_the_fields_of_trl() -> None:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    fields = [[field.name for field in dataclasses.fields(kind)] for kind in (Sample, RolloutSample)]
    assert fields[0] == fields[1]


# --- without TRL ------------------------------------------------------------------------------------------------------


def take(rollouts: RolloutWorker, count: int) -> list[Sample]:
    """Samples from the buffer; fails with the worker's own error."""
    samples, end = [], time.monotonic() + 60
    while len(samples) < count:
        try:
            samples.append(rollouts.rollout_buffer.get(timeout=0.2))
        except queue.Empty:
            rollouts.check_health(30)
            assert time.monotonic() < end, "no rollouts came"
    return samples


@pytest.fixture
def make_rollouts(worker: WorkerProcess, tokenizer: Any) -> Iterator[Callable[..., RolloutWorker]]:
    made: list[RolloutWorker] = []

    def make(rows: list[dict[str, Any]], rewards: Any, **settings: Any) -> RolloutWorker:
        given = {"num_generations": 4, "max_tokens": TOKENS, "ahead": 8, **settings}
        made.append(RolloutWorker(worker.endpoint, rows, rewards, tokenizer, **given))
        return made[-1]

    yield make
    for rollouts in made:
        rollouts.stop()


def test_samples_carry_log_probs_at_the_temperature_and_the_trainers_version(
    worker: WorkerProcess, checkpoint: Path, tokenizer: Any, make_rollouts: Callable[..., RolloutWorker]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = WeightTransfer(worker.endpoint)
    weights.init_weight_transfer()
    weights.send_weights(iter(model.named_parameters()))
    rollouts = make_rollouts(ROWS, mean_token, temperature=0.7, weights=weights)
    rollouts.start()
    for sample in take(rollouts, 16):
        before = len(tokenizer(sample.prompt)["input_ids"])
        assert sample.completion_mask.tolist() == [0] * before + [1] * (len(sample.input_ids) - before)
        ids = torch.from_numpy(sample.input_ids)[None]
        with torch.no_grad():
            logprobs = (model(ids[:, :-1]).logits / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        assert not sample.old_log_probs[:before].any()
        assert np.allclose(sample.old_log_probs[before:], logprobs[before - 1 :].numpy(), atol=1e-4)
        assert sample.model_version == 1  # the trainer's count, whatever the worker had before
    weights.destroy()
    weights.destroy()


def test_advantages_are_normalised_in_the_group_and_unknown_rewards_get_none(
    make_rollouts: Callable[..., RolloutWorker],
) -> None:
    def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(i) for i in range(len(completion_ids))]

    async def first_is_unknown(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None, *[1.0] * (len(completion_ids) - 1)]

    def all_unknown(completion_ids: list[list[int]], **columns: Any) -> list[None]:
        return [None] * len(completion_ids)

    for rewards, wanted in (
        ([length, first_is_unknown], [0.0, 2.0, 3.0, 4.0]),
        ([first_is_unknown], [np.nan, 1.0, 1.0, 1.0]),
        ([all_unknown], [np.nan] * 4),
    ):
        rollouts = make_rollouts(ROWS[:1], rewards, ahead=4)
        rollouts.start()
        samples = take(rollouts, 4)
        rollouts.stop()
        assert np.allclose([sample.metrics["reward"] for sample in samples], wanted, equal_nan=True)
        known = np.array(wanted)[~np.isnan(wanted)]
        expected = [0.0 if np.isnan(r) else (r - known.mean()) / (known.std() + 1e-8) for r in wanted]
        assert np.allclose([sample.advantage for sample in samples], expected)


def test_messages_are_rendered_and_groups_cycle_through_the_dataset(
    make_rollouts: Callable[..., RolloutWorker],
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}:"}], "wanted": str(n)} for n in (7, 8)]
    seen: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], wanted: list[str], **columns: Any) -> list[float]:
        seen.append((prompts, wanted))
        return [float(len(messages[0]["content"])) for messages in completions]

    rollouts = make_rollouts(rows, reward, ahead=4)
    rollouts.start()
    samples = take(rollouts, 12)
    assert [sample.group_id for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4
    assert samples[0].input_ids[0] == samples[8].input_ids[0] != samples[4].input_ids[0]
    assert seen[1] == ([rows[1]["prompt"]] * 4, ["8"] * 4)
    told = rollouts.metrics_queue.get_nowait()
    assert told["completions/mean_length"] == (sum(int(sample.completion_mask.sum()) for sample in samples[:4]), 4.0)


def test_no_more_is_made_than_the_trainer_may_take_and_nothing_is_lost(
    make_rollouts: Callable[..., RolloutWorker],
) -> None:
    scored = threading.Semaphore(0)

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        scored.release()
        return [0.0] * len(completions)

    rollouts = make_rollouts(ROWS, reward, ahead=8)
    rollouts.start()
    assert scored.acquire(timeout=30) and scored.acquire(timeout=30)
    assert not scored.acquire(timeout=0.5)  # two groups wait for the trainer
    taken = take(rollouts, 4)
    assert scored.acquire(timeout=30)
    assert not scored.acquire(timeout=0.5)
    taken += take(rollouts, 12)
    # Groups come as they end: up to two of the next ones may be before the last of the first four.
    groups = Counter(sample.group_id for sample in taken)
    assert list(groups.values()) == [4] * 4 and max(groups) < 6


def test_check_health_reports_a_failing_reward_function(make_rollouts: Callable[..., RolloutWorker]) -> None:
    def reward(**columns: Any) -> list[float]:
        raise ZeroDivisionError("no reward")

    rollouts = make_rollouts(ROWS, reward)
    rollouts.start()
    with pytest.raises(RuntimeError, match="no reward"):
        take(rollouts, 1)


def test_config_without_token_budget_is_refused(tokenizer: Any) -> None:
    class Config:
        token_budget = None

    with pytest.raises(ValueError, match="token_budget"):
        async_grpo_parts("tcp://127.0.0.1:1", Config(), ROWS, mean_token, tokenizer)
