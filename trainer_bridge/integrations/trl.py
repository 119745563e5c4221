"""TRL's asynchronous GRPO on workers of this project: its `rollout_worker` and its `weight_transfer`.

    parts = async_grpo_parts(worker.endpoints, args, dataset, reward, tokenizer)
    AsyncGRPOTrainer(model, reward, args, dataset, tokenizer, **parts).train()

    trainer's thread     send_weights -> update_model_version      rollout_buffer.get ... loss ... step
    "rollouts" thread    prompts -> worker -> rewards, advantages -> rollout_buffer

Imports nothing of TRL: its trainer asks for methods and attributes, not for types. Invariants:

- A sample's `old_log_probs` are log-softmax of logits / temperature at the sampled tokens, which is what the trainer
  computes again, at the positions of those tokens; 0 in the prompt.
- `model_version` is the version of the oldest weights that drew a token of the sample, in the trainer's count. It comes
  from the worker's stamps, not from when something was asked for.
- `send_weights` returns when every worker uses the weights: a version is reported only once it is applied.
- At most `ahead` samples are in progress or wait for the trainer, so none is made that it would drop as stale.
- Nothing that was generated is dropped here.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.results import Completion, GenerateResult
from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.finish_reasons import COMPLETE
from trainer_bridge.wire.sampling_rules import RULES

if TYPE_CHECKING:
    import torch

    from trainer_bridge.wire.keys import ClientCurve

RewardFunction = Callable[..., Any]  # (prompts, completions, completion_ids, columns) -> a float or None for each

_POLL_S = 0.2  # time between two heartbeats
_ROOM_S = 0.01  # time between two looks at the trainer's buffer
_COLUMNS_OF_OURS = ("prompt", "completion", "completion_ids")


@dataclass(slots=True)
class Sample:
    """A completion as TRL's trainer takes it from the buffer. Arrays have an entry for each token of `input_ids`."""

    prompt: Any
    completion: Any
    input_ids: np.ndarray  # int64, prompt and completion
    completion_mask: np.ndarray  # int64, 1 for tokens of the completion
    old_log_probs: np.ndarray  # float32, 0 in the prompt
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


class WeightTransfer:
    """TRL's `weight_transfer`: an update by `WeightPublisher`; generation continues meanwhile.

    `options` are `WeightPublisher`'s (`transport`, deadlines). `keep` is on unless they say otherwise: a worker that is
    started again would draw samples that are all too old for the trainer, which then makes no step and no update.
    `base` is the version that the workers had before: the trainer's version v is theirs of `base` + v, or later by the
    attempts that failed.
    """

    def __init__(self, endpoints: str | Sequence[str], **options: Any) -> None:
        self._endpoints, self._options = endpoints, {"keep": True, **options}
        self._publisher: Any = None
        self.base = 0
        self.sent = 0
        self._versions: list[int] = []  # the trainer's, of each attempt

    def init_weight_transfer(self) -> None:
        """Connect. Raises `RolloutError` when a worker does not answer."""
        from trainer_bridge.publish.publisher import WeightPublisher

        if self._publisher is None:
            self._publisher = WeightPublisher(self._endpoints, **self._options)
        self.base, self.sent = max(status["version"] for status in self._publisher.status()), 0
        self._versions = []

    def pause(self) -> None:
        """Nothing: weights are swapped in between two steps of a worker that generates on."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Bring the tensors to every worker; returns when all of them use them.

        Raises the first worker's error; that worker has its old weights then. All tensors are collected before they are
        sent. TRL gathers a sharded model tensor by tensor, so the whole model is collected.
        """
        if self._publisher is None:
            raise RuntimeError("send_weights came before init_weight_transfer")
        # A worker may have taken a failed attempt: the next attempt must have a newer version.
        self._versions.append(self.sent + 1)
        handle = self._publisher.publish(list(iterator), version=self.version)
        handle.applied()
        self.sent += 1

    @property
    def version(self) -> int:
        """The workers' version of the last update, also of one that failed."""
        return self.base + len(self._versions)

    def trainer_version(self, version: int) -> int:
        """The trainer's version of a worker's weights."""
        attempt = version - self.base
        return self._versions[attempt - 1] if 0 < attempt <= len(self._versions) else attempt

    def resume(self) -> None:
        """Nothing, as for `pause`."""

    def destroy(self) -> None:
        """Close the connections. Idempotent."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


class RolloutWorker(ProcessBound):
    """TRL's `rollout_worker`: groups of completions of a dataset's prompts, scored, in the order in which they end.

    `dataset` is a sequence of rows with `prompt`, a text or a list of messages, and columns for the reward functions,
    which are called as TRL does: with `prompts`, `completions`, `completion_ids` and every column as lists of one
    group. A sum of them is the reward; a completion for which all give None gets advantage 0. The dataset is gone
    through again and again. `generate` has more arguments of the client's `generate` (`top_p`, `stop`, ...).

    At most `ahead` samples, but at least one group, are under way or wait in the buffer; divided by the samples of a
    step, that is about how many steps old they get. `weights` tells how the workers' versions are counted; without it
    they are the trainer's own. Requests outlive a worker that is started again (`resume=True`).
    """

    _instead = "take its samples in its process"

    def __init__(
        self,
        endpoints: str | Sequence[str],
        dataset: Sequence[dict[str, Any]],
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        tokenizer: Any,
        *,
        num_generations: int = 8,
        max_tokens: int = 2048,
        temperature: float = 1.0,
        ahead: int = 64,
        seed: int = 0,
        timeout_s: float | None = 600.0,
        chat_template_kwargs: dict[str, Any] | None = None,
        weights: WeightTransfer | None = None,
        curve: ClientCurve | None = None,
        **generate: Any,
    ) -> None:
        if len(dataset) == 0 or num_generations < 1:
            raise ValueError("the dataset needs a row, and num_generations must be at least 1")
        self.rollout_buffer: queue.Queue[Sample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue()
        self._endpoints, self._curve, self._timeout_s = endpoints, curve, timeout_s
        self._dataset, self._tokenizer, self._weights = dataset, tokenizer, weights
        self._reward_funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._fields = {"n": num_generations, "max_tokens": max_tokens, "temperature": temperature, **generate}
        self._seed, self._template_kwargs = seed, chat_template_kwargs or {}
        self._ahead, self._n, self._under_way = max(ahead, num_generations), num_generations, 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._beat_s = time.monotonic()
        self.model_version = 0

    # --- what the trainer calls ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to generate, in a thread of its own. RuntimeError if it runs."""
        if self._thread is not None:
            raise RuntimeError("the rollout worker runs already; stop it first")
        self._stop.clear()
        self._error, self._beat_s, self._under_way = None, time.monotonic(), 0
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and cancel what is under way at the workers. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()

    def update_model_version(self, model_version: int) -> None:
        """The version that the trainer has now. Samples don't need it: the workers stamp every token."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if generation has failed, or its loop has not turned for `stale_after_s` seconds."""
        if self._error is not None:
            raise RuntimeError(f"generating rollouts failed: {self._error}") from self._error
        age_s = time.monotonic() - self._beat_s
        if self._thread is not None and age_s > stale_after_s:
            raise RuntimeError(
                f"the rollout loop has made no progress for {age_s:.0f} s; a reward function may block it"
            )

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._generate_all())
        except BaseException as error:  # noqa: BLE001 the trainer must hear of it, whatever it is
            self._error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error

    async def _generate_all(self) -> None:
        """Every group from the first on, until `stop`; the first error ends all."""
        groups = iter(zip(itertools.count(), itertools.cycle(self._dataset), strict=False))
        client = AsyncRolloutClient(self._endpoints, resume=True, timeout_s=self._timeout_s, curve=self._curve)
        async with client:
            tasks = {asyncio.create_task(self._groups(client, groups)) for _ in range(self._ahead // self._n)}
            try:
                while not self._stop.is_set():
                    self._beat_s = time.monotonic()
                    done, _ = await asyncio.wait(tasks, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _groups(self, client: AsyncRolloutClient, groups: Iterator[tuple[int, dict[str, Any]]]) -> None:
        """One group after the other; several of these run side by side."""
        while True:
            while self.rollout_buffer.qsize() + (self._under_way + 1) * self._n > self._ahead:
                await asyncio.sleep(_ROOM_S)
            self._under_way += 1
            group_id, row = next(groups)
            began_s = time.monotonic()
            prompt_ids = self._tokenize(row["prompt"])
            result = await client.generate(prompt_ids, seed=self._seed + group_id, **self._fields)
            check_ended(result.completions)
            samples = await self._score(group_id, row, prompt_ids, result)
            self._tell(result, time.monotonic() - began_s)
            for sample in samples:
                sample.enqueued_at = time.time()
                self.rollout_buffer.put(sample)
            self._under_way -= 1

    def _tokenize(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        given = {"add_generation_prompt": True, "return_dict": False, **self._template_kwargs}
        return list(self._tokenizer.apply_chat_template(prompt, **given))

    async def _score(
        self, group_id: int, row: dict[str, Any], prompt_ids: list[int], result: GenerateResult
    ) -> list[Sample]:
        completions = [self._as_completion(row["prompt"], item) for item in result.completions]
        given = {name: [value] * len(completions) for name, value in row.items() if name not in _COLUMNS_OF_OURS}
        given["prompts"], given["completions"] = [row["prompt"]] * len(completions), completions
        given["completion_ids"] = [item.token_ids.tolist() for item in result.completions]
        rewards_FN = np.array([await _call(function, given) for function in self._reward_funcs], dtype=float)
        known_N = ~np.isnan(rewards_FN).all(0)
        rewards_N = np.where(known_N, np.nansum(rewards_FN, 0), np.nan)
        mean, std = (rewards_N[known_N].mean(), rewards_N[known_N].std()) if known_N.any() else (np.nan, np.nan)
        advantages_N = np.where(known_N, (rewards_N - mean) / (std + 1e-8), 0.0)
        names = [f"rewards/{_name(function)}" for function in self._reward_funcs]
        samples = []
        for i, item in enumerate(result.completions):
            metrics = dict(zip(names, map(float, rewards_FN[:, i]), strict=True))
            metrics |= {"reward": float(rewards_N[i]), "reward_std": float(std)}
            version = min(version for version, _ in item.versions)
            version = version if self._weights is None else self._weights.trainer_version(version)
            ids, mask, logprobs = _rows(prompt_ids, item)
            sample = Sample(
                *(row["prompt"], completions[i], ids, mask, logprobs),
                *(float(advantages_N[i]), version, group_id, metrics),
            )
            samples.append(sample)
        return samples

    def _as_completion(self, prompt: Any, item: Completion) -> Any:
        text = self._tokenizer.decode(item.token_ids.tolist(), skip_special_tokens=True)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    def _tell(self, result: GenerateResult, seconds: float) -> None:
        """The metrics of a group for the trainer's log; pairs are rates."""
        items = result.completions
        tokens, count = float(sum(len(item) for item in items)), float(len(items))
        self.metrics_queue.put(
            {
                "completions/mean_length": (tokens, count),
                "completions/clipped_ratio": (float(sum(item.finish_reason == "length" for item in items)), count),
                "rollout/versions_mean": (float(sum(len(item.versions) for item in items)), count),
                "rollout/queued_s": result.timing.queued_s,
                "rollout/duration_s": seconds,
                "rollout/preemptions_total": float(result.preemptions),
                "rollout/resumes_total": float(result.resumes),
            }
        )


def check_ended(completions: Sequence[Completion]) -> None:
    """Raise `RolloutError` unless each completion ended by itself."""
    broken = [item for item in completions if item.finish_reason not in COMPLETE]
    if broken:
        reason = broken[0].error or broken[0].finish_reason
        raise RolloutError(f"{len(broken)} of {len(completions)} completions did not end by themselves: {reason}")


async def _call(function: RewardFunction, given: dict[str, Any]) -> list[float]:
    """Rewards of a group, NaN for None. A function that is no coroutine runs in a thread: it may take its time."""
    if inspect.iscoroutinefunction(function):
        rewards = await function(**given)
    else:
        rewards = await asyncio.to_thread(function, **given)
    if len(rewards) != len(given["completions"]):
        raise ValueError(f"{_name(function)} gave {len(rewards)} rewards for {len(given['completions'])} completions")
    return [np.nan if reward is None else float(reward) for reward in rewards]


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _rows(prompt_ids: list[int], item: Completion) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`input_ids`, `completion_mask` and `old_log_probs` of a sample."""
    before = len(prompt_ids)
    ids = np.concatenate([np.asarray(prompt_ids, np.int64), item.token_ids.astype(np.int64)])
    mask = (np.arange(len(ids)) >= before).astype(np.int64)
    return ids, mask, np.concatenate([np.zeros(before, np.float32), item.logprobs])


def async_grpo_parts(
    endpoints: str | Sequence[str],
    args: Any,
    dataset: Sequence[dict[str, Any]],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    tokenizer: Any,
    *,
    curve: ClientCurve | None = None,
    **publisher_options: Any,
) -> dict[str, Any]:
    """`rollout_worker` and `weight_transfer` for `AsyncGRPOTrainer`, with the settings of its `AsyncGRPOConfig`.

    Connects to nothing yet: ranks other than 0 may call it as well. Raises ValueError without `token_budget`, for which
    TRL would otherwise ask a vLLM server.
    """
    if args.token_budget is None:
        raise ValueError(
            "set token_budget in AsyncGRPOConfig, to prompt plus completion at most, or 0 for fixed batches"
        )
    weights = WeightTransfer(endpoints, curve=curve, **publisher_options)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    ahead = args.max_inflight_tasks if args.max_inflight_tasks > 0 else max(args.max_staleness, 1) * per_step
    rollouts = RolloutWorker(
        endpoints,
        dataset,
        reward_funcs,
        tokenizer,
        num_generations=args.num_generations,
        max_tokens=args.max_completion_length,
        ahead=min(ahead, args.queue_maxsize) if args.queue_maxsize > 0 else ahead,
        seed=args.seed,
        timeout_s=args.request_timeout,
        chat_template_kwargs=args.chat_template_kwargs,
        weights=weights,
        curve=curve,
        **{rule.name: getattr(args, rule.name, rule.default) for rule in RULES},
    )
    return {"rollout_worker": rollouts, "weight_transfer": weights}
