"""The job of one child process: plain data, sent as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.bench.peers.workloads import completion_lengths

#: `ours-blocking` is our engine at pipeline depth 1, `ours-apart` with shared experts apart from the others,
#: `ours-fallback` with transformers' code as the model, those of `SPECULATING` speculate, `service` is our worker,
#: measured by a client of its socket. `vllm-ngram` is vLLM with its speculation by n-grams, `vllm-ngram-gpu` with those
#: found on the GPU.
SPECULATING = ("ours-suffix", "ours-ngram", "ours-auto")
ENGINES = (
    *("ours", "ours-blocking", "ours-apart", "ours-fallback", *SPECULATING, "service"),
    *("vllm", "vllm-ngram", "vllm-ngram-gpu", "transformers"),
)
VLLM = ("vllm", "vllm-ngram", "vllm-ngram-gpu")
#: Those that run a model on several GPUs here.
SHARDED = ("service", *VLLM)
EXPERIMENTS = ("decode", "contexts", "post", "short", "long_job", "groups", "prefill", "arrivals", "repeats")
_SLACK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One engine, one shape, some experiments, and their sizes."""

    engine: str = "ours"
    shape: str = "qwen3-8b"
    layers: int = 0  # the first ones of the shape; 0: all
    gpus: int = 1  # of `service` and vLLM
    workers: int = 1  # of `service`; each runs the model on its part of the GPUs, and they share the work
    experiments: tuple[str, ...] = ("decode",)
    device: str = "auto"
    rows: tuple[int, ...] = (1, 8, 32, 128)  # of decode, contexts and repeats
    context_rows: tuple[int, ...] = ()  # of contexts, if they are others
    prompt: int = 128  # tokens; of decode and post
    new: int = 512  # tokens of a completion of decode
    repeats: int = 2  # of each timed run of decode and contexts; the best counts
    contexts: tuple[int, ...] = (1024, 4096, 16384, 32768)  # tokens
    context_steps: int = 64
    context_groups: tuple[int, ...] = (1,)  # rows of one prompt
    count_experts: bool = False  # vLLM, too, tells the distinct experts of its steps, and is about 1% slower
    post_rows: int = 32
    post_new: int = 8192
    short_requests: int = 512
    short_prompt: int = 700
    short_new: tuple[int, ...] = (3, 30)
    job_rows: int = 128  # of short, long_job, prefill and arrivals
    job_prompts: int = 32
    job_completions: int = 8
    job_prompt: int = 256
    job_scale: float = 1.0
    group_rows: tuple[int, ...] = (256,)
    group_prompts: tuple[int, ...] = (4096,)  # tokens
    group_sizes: tuple[int, ...] = (8,)  # completions of each prompt
    group_requests: tuple[str, ...] = ("one", "separate")  # for a prompt: one of n completions, or n equal ones
    group_new: int = 1024
    prefill_requests: int = 64
    prefill_prompt: int = 4096
    arrivals_per_s: tuple[float, ...] = (6.0, 12.0)
    arrivals_s: float = 20.0  # how long requests arrive
    arrivals_prompt: int = 2048
    arrivals_new: int = 256
    repeat_prompts: tuple[int, ...] = (1024,)  # tokens
    repeat_new: int = 512  # tokens of a completion
    repeat_chances: tuple[float, ...] = (0.8, 0.9, 0.96)  # that the text goes on as before
    drafts: int = 3  # of a row in a step, at most, where an engine speculates
    seeds_from: int = 0  # another number gives other prompts, that are not in a prefix cache yet

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Job:
        """The job with these fields; lists become tuples."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)

    def to_json(self) -> str:
        """The job as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def ranks(self) -> int:
        """GPUs that run one model together. Raises ValueError if the workers cannot have equally many."""
        if self.gpus % self.workers:
            raise ValueError(f"{self.gpus} GPUs are no equal parts for {self.workers} workers")
        return self.gpus // self.workers

    @property
    def most_rows(self) -> int:
        """Rows that the engine must be able to decode at once."""
        wanted = {"decode": max(self.rows), "contexts": max(self.context_rows or self.rows), "post": self.post_rows}
        wanted |= {"groups": max(self.group_rows), "repeats": max(self.rows)}
        return max(wanted.get(name, self.job_rows) for name in self.experiments)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        wanted = {
            "decode": self.prompt,
            "contexts": max(self.contexts),
            "post": self.prompt,
            "short": self.short_prompt,
            "long_job": self.job_prompt,
            "groups": max(self.group_prompts),
            "prefill": self.prefill_prompt,
            "arrivals": self.arrivals_prompt,
            "repeats": max(self.repeat_prompts),
        }
        return max(wanted[name] for name in self.experiments)

    @property
    def most_context(self) -> int:
        """Tokens, prompt and completion, of the longest sequence, and a little more."""
        wanted = {
            "decode": self.prompt + self.new,
            "contexts": max(self.contexts) + 2 * self.context_steps,
            "post": self.prompt + self.post_new,
            "short": self.short_prompt + max(self.short_new),
            "long_job": self.job_prompt + self._longest_completion(),
            "groups": max(self.group_prompts) + self.group_new,
            "prefill": self.prefill_prompt + 1,
            "arrivals": self.arrivals_prompt + self.arrivals_new,
            "repeats": max(self.repeat_prompts) + self.repeat_new + self.drafts,
        }
        return max(wanted[name] for name in self.experiments) + _SLACK_TOKENS

    def _longest_completion(self) -> int:
        return max(16, int(max(completion_lengths(self.job_prompts * self.job_completions)) * self.job_scale))
