"""The hyper-parameters of a run, and the command line that is made from them.

Every field of `Recipe` is a flag. Replace what you need: `Recipe(model=..., task="chain_sum", lr=1e-5)`.
"""

import argparse
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from scripts.learn.tasks import TASKS

#: The least values of numbers.
_LEAST = {"steps": 1, "prompts": 1, "group_size": 2, "rounds": 1, "minibatches": 1, "staleness": 1, "eval_problems": 1}
_LEAST |= dict.fromkeys(("save_every", "eval_every", "check_every", "max_seconds", "max_tokens", "micro_tokens"), 0)
_LEAST |= dict.fromkeys(("entropy", "entropy_target", "entropy_step", "kl", "importance_cap", "warmup", "max_rows"), 0)
_LEAST |= dict.fromkeys(("lr", "weight_decay", "clip_low", "clip_high"), 0)
#: Numbers that must be more than 0.
_POSITIVE = ("temperature", "max_norm", "kv_gib")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """One run of GRPO. Times in seconds; a step is one batch and one update of the weights.

    Raises ValueError with the flag's name for a number that makes no sense.
    """

    model: str = _setting("", "folder or hub id of the model; without it the task `counting` makes a tiny one")
    task: str = _setting("chain_sum", f"what is learned: {', '.join(TASKS)}; your own: see scripts/learn/tasks.py")
    mode: Literal["sync", "async"] = _setting("async", "sync: trainer and worker take turns; async: they overlap")
    staleness: int = _setting(1, "async: batches that are requested ahead; no token is older, in versions")
    steps: int = _setting(200, "updates of the weights")
    max_seconds: float = _setting(0.0, "end after the step that passes this time; 0: no limit")
    seed: int = _setting(0, "of problems, draws and rollouts")
    level: int = _setting(-1, "train on this level of the task alone; -1: a curriculum over all levels")
    save_every: int = _setting(0, "steps between two checkpoints; 0: none")
    # the batch
    prompts: int = _setting(64, "problems of a step that teach: their completions have different rewards")
    group_size: int = _setting(16, "completions of a problem")
    rounds: int = _setting(4, "requests for a batch: each replaces problems that do not teach by new ones")
    max_tokens: int = _setting(0, "most tokens of an answer; 0: the task's own number")
    temperature: float = _setting(1.0, "of the rollouts")
    # the loss
    scale_rewards: Literal["batch", "group", "none"] = _setting(
        "batch", "advantages are divided by the standard deviation of the batch's rewards or of the group's, or by 1"
    )
    minibatches: int = _setting(1, "optimizer steps of a batch; the weights are published after the last one")
    clip_low: float = _setting(0.2, "how far a ratio may fall below 1 within a batch; with one minibatch it is 1")
    clip_high: float = _setting(0.28, "how far a ratio may rise above 1 within a batch")
    importance_cap: float = _setting(2.0, "largest weight of a token, by the trainer's probability over the worker's")
    entropy: float = _setting(0.0, "first weight of the entropy of tokens, which is added to the gain")
    entropy_target: float = _setting(0.2, "the weight acts while the entropy, nats a token, is below this; 0: always")
    entropy_step: float = _setting(0.005, "a step changes the weight by this: up below the target, else down to 0")
    kl: float = _setting(0.0, "weight of the KL divergence from the first weights; it keeps a copy of them")
    # the optimizer
    lr: float = _setting(1e-5, "learning rate of AdamW after the warm-up")
    warmup: int = _setting(10, "steps in which the learning rate rises from 0")
    weight_decay: float = _setting(0.0, "of AdamW")
    max_norm: float = _setting(1.0, "the gradient is scaled down to this norm")
    micro_tokens: int = _setting(0, "tokens of one forward pass, padding included; 0: 16384 on a GPU, 1024 on a CPU")
    # the engine
    device: str = _setting("", "of the trainer: cpu, cuda or cuda:N; without it a GPU if there is one")
    worker_device: str = _setting("", "of the worker, if it is another one")
    kv_on_swap: Literal["keep", "recompute"] = _setting("keep", "KV of running completions when the weights change")
    speculation: Literal["off", "suffix", "ngram", "auto"] = _setting("off", "source of the worker's drafts")
    weight_dtype: Literal["auto", "bf16", "fp8_block", "fp8_row", "mxfp8"] = _setting("auto", "of the worker's weights")
    kv_dtype: Literal["auto", "fp8_e4m3", "fp8_int8"] = _setting("auto", "of the worker's KV")
    max_rows: int = _setting(0, "completions that the worker runs at once; 0: one batch, at most 1024")
    kv_gib: float = _setting(4.0, "most memory for the worker's KV")
    # what is measured
    eval_every: int = _setting(10, "steps between two evaluations; 0: none")
    eval_problems: int = _setting(96, "held-out problems, drawn greedily")
    check_every: int = _setting(10, "steps between two comparisons of log-probs under equal weights; 0: none")

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"--task {self.task} is none of {', '.join(TASKS)}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:  # NaN is not
                raise ValueError(f"{_flag(name)} must be at least {least}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{_flag(name)} must be more than 0")
        if self.minibatches > self.prompts * self.group_size:
            raise ValueError("--minibatches must be at most the completions of a step")

    @property
    def ahead(self) -> int:
        """Batches that are requested before the step that trains on the first of them."""
        return 0 if self.mode == "sync" else self.staleness


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of `Recipe`."""
    kinds = typing.get_type_hints(Recipe)
    for one in fields(Recipe):
        kind = kinds[one.name]
        how: dict[str, Any] = {"type": kind}
        if typing.get_origin(kind) is Literal:
            how = {"choices": typing.get_args(kind)}
        shown = "" if one.default == "" else " (%(default)s)"
        parser.add_argument(_flag(one.name), default=one.default, help=one.metadata["help"] + shown, **how)


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe of parsed flags. Raises SystemExit with the flag's name for values that make no sense."""
    try:
        recipe = Recipe(**{one.name: getattr(arguments, one.name) for one in fields(Recipe)})
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not recipe.model and recipe.task != "counting":
        raise SystemExit("--model is missing: name a folder, such as the one that scripts.fetch_smollm2 makes")
    return recipe
