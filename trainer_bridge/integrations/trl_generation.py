"""Generation of TRL's trainers by workers of this project: in place of vLLM, or as a `rollout_func`.

    trainer = GRPOTrainer(MODEL, reward, GRPOConfig("runs/trl"), dataset)          without use_vllm
    with use_workers(trainer, worker.endpoints):
        trainer.train()

    TRL calls                            what happens
    vllm_generation.sync_weights()       rank 0 publishes; all ranks go on when every worker uses the weights
    vllm_generation.generate(prompts)    each rank sends its prompts, equal neighbours as one request

GRPO, RLOO, Distillation, SDPO, SDFT, GOLD and IW-OPD call these two methods and nothing else. Invariants:

- Token ids go both ways and are never made from text here.
- A completion is drawn under the trainer's last weights or later ones (`min_version`), also after a worker's restart.
- Log-probs are of the distribution that a token was drawn from: after temperature, truncation and penalties, as TRL's
  correction for importance wants them.
- Without an update in between, a run with the same seed sends the same requests with the same seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from accelerate.utils import broadcast_object_list, is_peft_model
from trl.generation.vllm_generation import VLLMGeneration

from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.media import MediaPrompt, processor_prompt
from trainer_bridge.client.results import Completion
from trainer_bridge.integrations.trl import WeightTransfer, check_ended
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.sampling_rules import RULES

if TYPE_CHECKING:
    import torch

    from trainer_bridge.wire.keys import ClientCurve

_SEEDS_OF_A_RANK = 2**40

#: The answer of an environment to a completion's text: text for the next turn, or None to end.
Reply = Callable[[Any, str], str | None]


class WorkerGeneration(VLLMGeneration):
    """TRL's `vllm_generation` for a trainer, with its sampling settings and its ways to gather a model's weights.

    `generation_kwargs` and `vllm_structured_outputs_regex` of the trainer's config are used, too: the former are more
    fields of the client's `generate` (`stop`, `constraint`, ...). `options` are `WeightPublisher`'s. Every rank makes
    one. Raises `RolloutError` when a worker does not answer.
    """

    def __init__(
        self, trainer: Any, endpoints: str | Sequence[str], *, curve: ClientCurve | None = None, **options: Any
    ) -> None:
        args = trainer.args
        self._weights: WeightTransfer | None = None
        if trainer.accelerator.is_main_process:
            self._weights = WeightTransfer(endpoints, curve=curve, **options)
            self._weights.init_weight_transfer()
        self._client = RolloutClient(endpoints, resume=True, curve=curve)
        self._version = 0
        self._seeds = itertools.count(args.seed + _SEEDS_OF_A_RANK * trainer.accelerator.process_index)
        super().__init__(
            trainer.model,
            trainer.accelerator,
            trainer.processing_class,
            mode="server",
            structured_outputs_regex=getattr(args, "vllm_structured_outputs_regex", None),
            repetition_penalty=getattr(args, "repetition_penalty", 1.0),
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=getattr(args, "min_p", None) or 0.0,
            max_completion_length=args.max_completion_length,
            generation_kwargs=getattr(args, "generation_kwargs", None),
        )

    def _init_vllm(self) -> None:
        """Nothing: TRL's constructor would start or reach a vLLM engine here."""

    # --- what the trainer calls ---------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Bring the trainer's weights to every worker; all ranks return when all workers use them.

        Raises the first worker's error, on every rank.
        """
        tensors = list(self._tensors())
        error: RolloutError | None = None
        if self._weights is not None:
            try:
                self._weights.send_weights(tensors)
            except RolloutError as caught:
                error = caught
        outcome = [None if self._weights is None else (self._weights.version, error and str(error))]
        broadcast_object_list(outcome, from_process=0)
        assert outcome[0] is not None
        self._version, problem = outcome[0]
        if problem is not None:
            raise error or RolloutError(f"rank 0 could not publish the weights: {problem}")

    def generate(
        self,
        prompts: Sequence[list[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """A completion for each prompt (token ids): ids of prompts and completions, log-probs, and their token ids.

        Log-probs and their ids have shape [prompts][tokens][1]: the drawn token's alone. `num_generations` is not
        needed, since equal prompts that follow each other become one request. `images` are the pictures of each prompt;
        the trainer's own image processor makes their pixels.
        """
        with profiler or nullcontext():
            drawn = self.complete(self.with_images(prompts, images))
        ids = [item.token_ids.tolist() for item in drawn]
        logprobs = [[[value] for value in drawn_logprobs(item)] for item in drawn]
        return [list(prompt) for prompt in prompts], ids, logprobs, [[[token] for token in row] for row in ids]

    # --- the rest -----------------------------------------------------------------------------------------------------

    def with_images(
        self, prompts: Sequence[list[int]], images: Sequence[Any] | None
    ) -> Sequence[list[int] | MediaPrompt]:
        """The prompts with the pixels of their pictures. Raises ValueError if the trainer has no image processor."""
        if images is None or not any(images):
            return prompts
        processor = getattr(self.processing_class, "image_processor", None)
        token_id = getattr(self.processing_class, "image_token_id", None)
        if processor is None or token_id is None:
            raise ValueError("these prompts have images: give the trainer the model's processor as processing_class")
        found: list[list[int] | MediaPrompt] = []
        for prompt, pictures in zip(prompts, images, strict=True):
            if not pictures:
                found.append(prompt)
                continue
            inputs = processor(images=list(pictures), return_tensors="pt")
            found.append(processor_prompt({"input_ids": [prompt], **inputs}, token_id))
        return found

    def complete(
        self, prompts: Sequence[list[int] | MediaPrompt], limits: Sequence[int] | None = None
    ) -> list[Completion]:
        """A completion for each prompt, in their order, of at most `limits` tokens (the trainer's, if absent).

        Raises `RolloutError` if a completion did not end by a stop token or its length.
        """
        limits = [self.max_completion_length] * len(prompts) if limits is None else limits
        requests = []
        for _, equal in itertools.groupby(zip(prompts, limits, strict=True), lambda row: (_content(row[0]), row[1])):
            (prompt, limit), *others = equal
            request = {"prompt": prompt, "max_tokens": limit, "n": 1 + len(others), "seed": next(self._seeds)}
            requests.append(request)
        results = self._client.generate_many(requests, **self._fields())
        drawn = [item for result in results for item in result.completions]
        check_ended(drawn)
        return drawn

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()
        if self._weights is not None:
            self._weights.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            **{rule.name: getattr(self, rule.name) for rule in RULES if hasattr(self, rule.name)},
            "min_version": self._version,
        }
        if self.structured_outputs_regex is not None:
            fields["constraint"] = {"regex": self.structured_outputs_regex}
        return {**fields, **self.generation_kwargs}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors by name, on rank 0. Every rank must iterate: TRL gathers them together.

        A tensor that TRL merges or gathers is valid only until the next, so it is copied to host memory.
        """
        copies = is_peft_model(self.model) or self._dist.is_fsdp or self._dist.is_zero3
        for name, tensor in self._iter_named_params():
            if self._weights is not None:
                yield name, tensor.detach().to("cpu", copy=True) if copies else tensor


def _content(prompt: list[int] | MediaPrompt) -> tuple[list[int], list[str]]:
    """Equal for equal prompts."""
    if isinstance(prompt, MediaPrompt):
        return prompt.token_ids.tolist(), [item.hash for item in prompt.media]
    return list(prompt), []


def _followed(prompt: list[int] | MediaPrompt, token_ids: list[int]) -> list[int] | MediaPrompt:
    """A prompt and the tokens after it."""
    return prompt.followed_by(token_ids) if isinstance(prompt, MediaPrompt) else list(prompt) + token_ids


def drawn_logprobs(item: Completion) -> list[float]:
    """A completion's log-probs under the distribution that its tokens were drawn from."""
    return (item.logprobs if item.drawn_logprobs is None else item.drawn_logprobs).tolist()


def use_workers(
    trainer: Any, endpoints: str | Sequence[str], *, curve: ClientCurve | None = None, **options: Any
) -> WorkerGeneration:
    """Have a trainer of TRL generate by workers. Returns the resources in use; close them after the training.

    Call this once, on every rank, between the trainer's construction and `train`. The config must not say `use_vllm`.
    `options` are `WeightPublisher`'s. Raises TypeError for a trainer that does not generate, ValueError if it uses
    vLLM.
    """
    if not hasattr(trainer, "use_vllm"):
        raise TypeError(f"{type(trainer).__name__} does not generate by vLLM, so it cannot use workers in its place")
    if trainer.use_vllm:
        raise ValueError("this trainer uses vLLM already; leave use_vllm out of its config")
    generation = WorkerGeneration(trainer, endpoints, curve=curve, **options)
    trainer.vllm_generation, trainer.use_vllm = generation, True
    trainer.vllm_mode = "server"  # prevents that TRL looks for an engine in its own process
    trainer._last_loaded_step = -1
    if hasattr(trainer.args, "vllm_sync_frequency"):  # GOLD and IW-OPD
        trainer.vllm_sync_frequency = trainer.args.vllm_sync_frequency
        trainer._last_vllm_sync_step = -trainer.vllm_sync_frequency
    return generation


class WorkerRollouts:
    """TRL's `rollout_func`: brings the trainer's weights to the workers, then has them complete the prompts.

        rollouts = WorkerRollouts(worker.endpoints)
        GRPOTrainer(MODEL, reward, args, dataset, rollout_func=rollouts).train()

    `reply(prompt, completion)` makes conversations of several turns. It gets the row's prompt and the text of the turn
    that has ended, special tokens included. It returns the environment's text, with the markers of the chat template,
    and the model's next turn follows; or None to end. Only the model's tokens are trained on (`env_mask`). All turns
    together have at most the trainer's `max_completion_length` tokens; an answer that does not fit ends them.

    TRL corrects importance by the log-probs only if `use_workers` was called for the trainer, too.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        reply: Reply | None = None,
        curve: ClientCurve | None = None,
        **options: Any,
    ) -> None:
        self._endpoints, self._reply, self._curve, self._options = endpoints, reply, curve, options
        self._own: WorkerGeneration | None = None
        self._step: int | None = None  # step of the workers' weights

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Token ids and log-probs of a completion for each prompt, and with `reply` their `env_mask`."""
        generation = self._generation(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        with_images = generation.with_images(prompt_ids, images)
        turns = [_Turns(ids, trainer.max_completion_length) for ids in prompt_ids]
        speaking = list(range(len(prompts)))
        while speaking:
            drawn = generation.complete(
                [_followed(with_images[i], turns[i].completion_ids) for i in speaking],
                [turns[i].left for i in speaking],
            )
            going_on = []
            for i, item in zip(speaking, drawn, strict=True):
                turns[i].add_drawn(item)
                if self._reply is not None and item.finish_reason == "stop":
                    answer = self._answer(self._reply, trainer.processing_class, prompts[i], item)
                    if answer is not None and len(answer) < turns[i].left:
                        turns[i].add_answer(answer)
                        going_on.append(i)
            speaking = going_on
        names = ["prompt_ids", "completion_ids", "logprobs", *([] if self._reply is None else ["env_mask"])]
        return {name: [getattr(each, name) for each in turns] for name in names}

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _generation(self, trainer: Any) -> WorkerGeneration:
        """A generator for this trainer, by workers that have its present weights."""
        if trainer.use_vllm:  # TRL brings the weights
            if not isinstance(trainer.vllm_generation, WorkerGeneration):
                raise ValueError("this trainer uses vLLM; leave use_vllm out of its config")
            return trainer.vllm_generation
        if self._own is None:
            self._own = WorkerGeneration(trainer, self._endpoints, curve=self._curve, **self._options)
        if trainer.state.global_step != self._step:
            self._own.sync_weights()
            self._step = trainer.state.global_step
        return self._own

    def _answer(self, reply: Reply, tokenizer: Any, prompt: Any, item: Completion) -> list[int] | None:
        text = reply(prompt, tokenizer.decode(item.token_ids.tolist(), skip_special_tokens=False))
        return None if text is None else list(tokenizer(text, add_special_tokens=False)["input_ids"])


class _Turns:
    """A conversation after its prompt; lists have an entry for each token of `completion_ids`."""

    def __init__(self, prompt_ids: list[int], max_tokens: int) -> None:
        self.prompt_ids = list(prompt_ids)
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.env_mask: list[int] = []  # 1 for what the model drew
        self._max_tokens = max_tokens

    @property
    def left(self) -> int:
        """Number of tokens that may follow."""
        return self._max_tokens - len(self.completion_ids)

    def add_drawn(self, item: Completion) -> None:
        self.completion_ids += item.token_ids.tolist()
        self.logprobs += drawn_logprobs(item)
        self.env_mask += [1] * len(item)

    def add_answer(self, ids: list[int]) -> None:
        self.completion_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.env_mask += [0] * len(ids)
