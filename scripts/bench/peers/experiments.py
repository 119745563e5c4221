"""The experiments: the same work and the same results for every engine.

    decode      ms a step = (t(N) - t(1)) / (N - 1): prompts of 128 tokens, N new ones; all costs but prefill
    contexts    ms a step = (t(2N) - t(N)) / N: long prompts, whose KV is in the prefix cache from an earlier run;
                `completions` rows of each prompt. A row that is admitted before the others ends before them, in both
                runs; so all rows take part in the steps between, if the first row gets no N tokens before the last
    post        32 rows x 8,192 tokens, total time
    short       many requests of 3 or 30 new tokens: mostly prefill
    long_job    a trainer's step: 256 completions of log-normal lengths through 128 rows
    groups      many completions of each prompt, as one request for each prompt and as equal separate requests
    prefill     prompts of 4,096 tokens, one new token
    repeats     text that repeats, with weights made for it: ms a token of a row, with and without speculation
    arrivals    requests that arrive at random times: latencies, and the gaps between the tokens of a completion

Every row names the experiment and its sizes. Times are seconds unless the name says ms.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import Any, Protocol

import numpy as np

from scripts.bench.peers.job import Job
from scripts.bench.peers.repeating import repeating_prompts
from scripts.bench.peers.workloads import (
    Work,
    arrival_times,
    grouped_work,
    long_job,
    nested_prompts,
    tail_begin,
    uniform_work,
)

Row = dict[str, Any]
_WARM_TOKENS = 16
_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Finished:
    """The times at which the completions of some work were complete, seconds after its start, ascending."""

    ends_s: list[float]

    @property
    def total_s(self) -> float:
        """Seconds until all were complete."""
        return self.ends_s[-1]

    def tail_s(self) -> float:
        """Seconds spent on the last tenth of the completions."""
        return self.total_s - tail_begin(self.ends_s)


@dataclass(frozen=True, slots=True)
class Served:
    """Requests in turn: seconds from arrival to the end, and between tokens of a completion."""

    latencies_s: list[float]
    first_s: list[float]  # from arrival to the first token
    gaps_s: list[float]


class Engine(Protocol):
    """An engine. It samples at temperature 1 and returns the log-prob of every token."""

    vocab: int
    hidden: int  # width of the model
    capacity_tokens: int  # of KV
    keeps_prefixes: bool  # prompts seen before need no prefill
    sees_tokens: bool  # `serve` is there
    can_repeat: bool  # `repeat` is there

    def generate(self, work: Work) -> Finished:
        """Make all completions of `work`, to their full lengths, all asked for at once."""

    def serve(self, work: Work, arrivals_s: list[float]) -> Served:
        """Make all completions of `work`, each asked for at its time; every token is seen when it is there."""

    def repeat(self, chance: float) -> None:
        """Get the weights whose text repeats, at `chance`; only before all other work or after other chances."""

    def facts(self) -> Row:
        """Name, version and settings of the engine."""

    def last_steps(self) -> Row:
        """The engine's own figures of the decode steps of the last `generate`; may be empty.

        An engine that speculates tells the tokens `drafted` and `accepted`.
        """

    def close(self) -> None:
        """Release all resources."""


def run_job(engine: Engine, job: Job) -> Iterator[Row]:
    """The rows of all experiments of a job, as they come."""
    for name in job.experiments:
        for row in _EXPERIMENTS[name](engine, job):
            yield {"experiment": name, **row, "kv_tokens": engine.capacity_tokens}


def _decode(engine: Engine, job: Job) -> Iterator[Row]:
    seeds = count(1 + job.seeds_from)

    def new_work(new: int) -> Callable[[], Work]:
        return lambda: uniform_work(rows, job.prompt, new, engine.vocab, next(seeds))

    for rows in job.rows:
        engine.generate(new_work(min(_WARM_TOKENS, job.new))())
        yield {
            "rows": rows,
            "prompt": job.prompt,
            "new": job.new,
            **_per_step(engine, rows, new_work(1), new_work(job.new), job.new - 1, job.repeats),
        }


def _contexts(engine: Engine, job: Job) -> Iterator[Row]:
    if not engine.keeps_prefixes:
        yield {"skipped": "needs a prefix cache"}
        return
    longest = max(job.contexts)
    for rows, context, n in product(
        sorted(job.context_rows or job.rows, reverse=True), sorted(job.contexts), job.context_groups
    ):
        new = 2 * job.context_steps
        asked = {"rows": rows, "context": context, "first_new": job.context_steps, "new": new, "completions": n}
        if rows % n:
            continue
        pages = rows // n * -(-context // _PAGE_TOKENS) + rows * (-(-new // _PAGE_TOKENS) + 1)
        if pages * _PAGE_TOKENS > engine.capacity_tokens:
            yield {**asked, "skipped": f"the KV holds {engine.capacity_tokens} tokens"}
            continue
        prompts = [p for p in nested_prompts(rows // n, context, longest, engine.vocab) for _ in range(n)]
        first, whole = Work(prompts, [job.context_steps] * rows), Work(prompts, [new] * rows)
        engine.generate(first)  # leaves the prompts in the prefix cache
        engine.generate(whole)
        runs = (lambda w=first: w), (lambda w=whole: w)
        steps = _per_step(engine, rows, *runs, job.context_steps, job.repeats)  # type: ignore[arg-type]
        yield {**asked, **steps}


def _per_step(
    engine: Engine, rows: int, first: Callable[[], Work], whole: Callable[[], Work], steps: int, repeats: int
) -> Row:
    """Time of a step from the best of `repeats` runs of `first`, and of `whole`, which has `steps` tokens more."""
    first_s = [engine.generate(first()).total_s for _ in range(repeats)]
    whole_s, own = [], {}
    for _ in range(repeats):
        whole_s.append(engine.generate(whole()).total_s)
        if whole_s[-1] == min(whole_s):
            own = engine.last_steps()
    ms = (min(whole_s) - min(first_s)) / steps * 1e3
    return {
        "ms": ms,
        "tokens_per_s": rows / ms * 1e3,
        "first_s": min(first_s),
        "total_s": min(whole_s),
        "slowest_s": max(whole_s),
        **own,
    }


def _post(engine: Engine, job: Job) -> Iterator[Row]:
    seeds = count(1 + job.seeds_from)
    engine.generate(uniform_work(job.post_rows, job.prompt, _WARM_TOKENS, engine.vocab, next(seeds)))
    work = uniform_work(job.post_rows, job.prompt, job.post_new, engine.vocab, next(seeds))
    total_s = engine.generate(work).total_s
    yield {
        "rows": job.post_rows,
        "prompt": job.prompt,
        "new": job.post_new,
        "total_s": total_s,
        "tokens_per_s": work.tokens / total_s,
        **engine.last_steps(),
    }


def _short(engine: Engine, job: Job) -> Iterator[Row]:
    seeds = count(1 + job.seeds_from)
    for new in job.short_new:
        engine.generate(uniform_work(job.job_rows, job.short_prompt, new, engine.vocab, next(seeds)))
        work = uniform_work(job.short_requests, job.short_prompt, new, engine.vocab, next(seeds))
        total_s = engine.generate(work).total_s
        yield {
            "rows": job.job_rows,
            "requests": job.short_requests,
            "prompt": job.short_prompt,
            "new": new,
            "total_s": total_s,
            "requests_per_s": len(work.prompts) / total_s,
        }


def _long_job(engine: Engine, job: Job) -> Iterator[Row]:
    engine.generate(uniform_work(job.job_rows, job.job_prompt, _WARM_TOKENS, engine.vocab, 1))
    work = long_job(engine.vocab, job.job_prompts, job.job_completions, job.job_prompt, job.job_scale)
    finished = engine.generate(work)
    yield {
        "rows": job.job_rows,
        "completions": len(work.lengths),
        "tokens": work.tokens,
        "scale": job.job_scale,
        "total_s": finished.total_s,
        "tokens_per_s": work.tokens / finished.total_s,
        "tail_s": finished.tail_s(),
        **engine.last_steps(),
    }


def _groups(engine: Engine, job: Job) -> Iterator[Row]:
    seeds = count(100 + job.seeds_from)
    for rows in job.group_rows:
        for prompt in job.group_prompts:
            for n in job.group_sizes:
                asked = {"rows": rows, "prompt": prompt, "completions": n, "new": job.group_new}
                if engine.capacity_tokens < rows // n * prompt + rows * (job.group_new + 2 * _PAGE_TOKENS):
                    yield {**asked, "skipped": f"the KV holds {engine.capacity_tokens} tokens"}
                    continue
                engine.generate(grouped_work(rows // n, n, prompt, _WARM_TOKENS, engine.vocab, next(seeds), False))
                for asked_as in job.group_requests:
                    separate = asked_as == "separate"
                    work = grouped_work(rows // n, n, prompt, job.group_new, engine.vocab, next(seeds), separate)
                    total_s = engine.generate(work).total_s
                    named = {**asked, "requests": len(work.prompts)}
                    yield {**named, "total_s": total_s, "tokens_per_s": work.tokens / total_s, **engine.last_steps()}


def _prefill(engine: Engine, job: Job) -> Iterator[Row]:
    seeds = count(200 + job.seeds_from)
    engine.generate(uniform_work(4, job.prefill_prompt, 1, engine.vocab, next(seeds)))
    works = [
        uniform_work(job.prefill_requests, job.prefill_prompt, 1, engine.vocab, next(seeds)) for _ in range(job.repeats)
    ]
    total_s = [engine.generate(work).total_s for work in works]
    tokens = job.prefill_requests * job.prefill_prompt
    asked = {"requests": job.prefill_requests, "prompt": job.prefill_prompt, "new": 1}
    yield {**asked, "total_s": min(total_s), "slowest_s": max(total_s), "prefill_tokens_per_s": tokens / min(total_s)}


def _arrivals(engine: Engine, job: Job) -> Iterator[Row]:
    if not engine.sees_tokens:
        yield {"skipped": "does not see single tokens"}
        return
    seeds = count(300 + job.seeds_from)
    for per_s in job.arrivals_per_s:
        work = uniform_work(
            int(per_s * job.arrivals_s), job.arrivals_prompt, job.arrivals_new, engine.vocab, next(seeds)
        )
        served = engine.serve(work, arrival_times(len(work.prompts), per_s, next(seeds)))
        yield {
            "scale": per_s,
            "requests": len(work.prompts),
            "prompt": job.arrivals_prompt,
            "new": job.arrivals_new,
            "latency_s": float(np.median(served.latencies_s)),
            "first_token_s": float(np.median(served.first_s)),
            "gap_p50_ms": float(np.percentile(served.gaps_s, 50)) * 1e3,
            "gap_p99_ms": float(np.percentile(served.gaps_s, 99)) * 1e3,
            "gap_max_ms": max(served.gaps_s) * 1e3,
        }


def _repeats(engine: Engine, job: Job) -> Iterator[Row]:
    if not engine.can_repeat:
        yield {"skipped": "cannot get weights whose text repeats"}
        return
    seeds = count(400 + job.seeds_from)
    for chance in job.repeat_chances:
        engine.repeat(chance)
        for prompt, rows in product(job.repeat_prompts, job.rows):
            asked = {"rows": rows, "context": prompt, "new": job.repeat_new, "chance": chance}
            needs = rows * -(-(prompt + job.repeat_new + job.drafts) // _PAGE_TOKENS) * _PAGE_TOKENS
            if needs > engine.capacity_tokens:
                yield {**asked, "skipped": f"needs KV of {needs} tokens, there are {engine.capacity_tokens}"}
                continue
            made = (rows, prompt, engine.hidden, engine.vocab, chance)
            best: Row = {}
            if chance == job.repeat_chances[0]:
                _repeat_run(engine, repeating_prompts(*made, next(seeds)), min(_WARM_TOKENS, job.repeat_new))
            for _ in range(job.repeats):
                # New prompts: an engine may keep completions of old ones to draft from.
                run = _repeat_run(engine, repeating_prompts(*made, next(seeds)), job.repeat_new)
                best = run if not best or run["ms"] < best["ms"] else best
            yield {**asked, **best, "tokens_per_s": rows / best["ms"] * 1e3}


def _repeat_run(engine: Engine, prompts: list[list[int]], new: int) -> Row:
    """Milliseconds a token of a row without prefill, and the accepted length: tokens for each step of a row."""
    rows = len(prompts)
    first = Work(prompts, [1] * rows)
    engine.generate(first)  # leaves the prompts in the prefix cache
    first_s = engine.generate(first).total_s
    total_s = engine.generate(Work(prompts, [new] * rows)).total_s
    own = engine.last_steps()
    steps = rows * (new - 1)  # of a row, one for each token that was no accepted draft
    al = steps / (steps - own["accepted"]) if "accepted" in own else 1.0
    return {"ms": (total_s - first_s) / (new - 1) * 1e3, "al": al, "first_s": first_s, "total_s": total_s, **own}


_EXPERIMENTS: dict[str, Callable[[Engine, Job], Iterator[Row]]] = {
    "decode": _decode,
    "contexts": _contexts,
    "post": _post,
    "short": _short,
    "long_job": _long_job,
    "groups": _groups,
    "prefill": _prefill,
    "arrivals": _arrivals,
    "repeats": _repeats,
}
