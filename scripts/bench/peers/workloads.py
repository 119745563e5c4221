"""Prompts and lengths made from seeds: every engine gets the same ones in the same order.

Token ids are uniform over the vocabulary except its first ten, so no prompt is repeated by accident. Every timed run
has new prompts, so that a prefix cache cannot skip a timed prefill; only the experiment on prefixes repeats them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: The lengths of the long job: log-normal and fixed, so that all runs and engines are comparable.
_LENGTHS_SEED, _MEDIAN, _SIGMA, _SHORTEST, _LONGEST = 20261121, 3000.0, 0.8, 16, 16384
FIRST_TOKEN = 10


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, each with a prompt, `n` completions and an exact number of tokens for each of them."""

    prompts: list[list[int]]
    lengths: list[int]
    n: int = 1

    @property
    def tokens(self) -> int:
        """Total number of new tokens."""
        return sum(self.lengths) * self.n


def completion_lengths(count: int = 256) -> list[int]:
    """Lengths of the long job's completions: log-normal around 3,000 tokens, from 16 to 16,384."""
    drawn = np.random.default_rng(_LENGTHS_SEED).lognormal(np.log(_MEDIAN), _SIGMA, count)
    return [int(n) for n in np.rint(drawn).clip(_SHORTEST, _LONGEST)]


def tail_begin(ends: Sequence[float]) -> float:
    """The time at which nine tenths of the completions have ended; `ends` ascend from 0, in any unit."""
    before = int(len(ends) * 0.9)
    return ends[before - 1] if before else 0


def random_prompts(count: int, tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """`count` prompts of `tokens` random token ids."""
    rng = np.random.default_rng([seed, count, tokens])
    return rng.integers(FIRST_TOKEN, vocab, (count, tokens)).tolist()


def uniform_work(rows: int, prompt: int, new: int, vocab: int, seed: int) -> Work:
    """`rows` new prompts of one length, `new` tokens each."""
    return Work(random_prompts(rows, prompt, vocab, seed), [new] * rows)


def nested_prompts(rows: int, context: int, longest: int, vocab: int) -> list[list[int]]:
    """Prompts of `context` tokens. Row i of a shorter context is a prefix of row i of a longer one, for any row count.

    So an engine with a prefix cache prefills each token only once for all contexts up to `longest`.
    """
    return [
        np.random.default_rng([7, row]).integers(FIRST_TOKEN, vocab, longest)[:context].tolist() for row in range(rows)
    ]


def grouped_work(prompts: int, n: int, prompt: int, new: int, vocab: int, seed: int, separate: bool) -> Work:
    """`n` completions of each of `prompts` new prompts: one request for each prompt, or `separate` equal requests."""
    asked = random_prompts(prompts, prompt, vocab, seed)
    if separate:
        return Work([tokens for tokens in asked for _ in range(n)], [new] * (prompts * n))
    return Work(asked, [new] * prompts, n)


def arrival_times(count: int, per_s: float, seed: int) -> list[float]:
    """Seconds at which `count` requests of a Poisson process arrive, ascending."""
    return np.random.default_rng([seed, count]).exponential(1 / per_s, count).cumsum().tolist()


def long_job(vocab: int, prompts: int = 32, completions: int = 8, prompt: int = 256, scale: float = 1.0) -> Work:
    """A step of a trainer: groups of completions of very different lengths. `scale` shortens all of them."""
    base = np.random.default_rng(7).integers(FIRST_TOKEN, vocab, (prompts, prompt)).tolist()
    lengths = completion_lengths(prompts * completions)
    return Work(
        [base[i // completions] for i in range(prompts * completions)],
        [max(_SHORTEST, int(length * scale)) for length in lengths],
    )
