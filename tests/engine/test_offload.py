"""KV of preempted sequences goes to the host and comes back: the same tokens, and nothing computed twice."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from harness import Bench, load
from streams import DeafDevice, LateDevice, random_delays
from test_recomputed import replayed
from test_swap import Mailbox, Update

from rollout.engine.build import rebuild_engine
from rollout.engine.parking import Parking
from rollout.engine.types import Cancel

SAMPLED = {"temperature": 1.0, "seed": 7}
PAGE = 4


@pytest.fixture
def other(folders):
    return load(folders[1])


def offloading(model, host_pages: int = 512, piece_pages: int = 3, device=None, receiver=None, **engine) -> Bench:
    """An engine with room for so many pages on the host, copied so many at a time."""
    page_size = engine.setdefault("page_size", PAGE)
    page_bytes = model.spec.kv_bytes_per_token(torch.float32) * page_size
    fields = {"host_kv_gib": host_pages * page_bytes / 2**30, "host_kv_piece_mib": piece_pages * page_bytes / 2**20}
    return Bench(model, device, receiver, **{"kv_pages": 40, **fields, **engine})


def watch_prefills(bench: Bench) -> list[int]:
    """Gets the input tokens of every prefill step from now on."""
    sizes, launched = [], bench.engine.scheduler.launched
    bench.engine.scheduler.launched = lambda plan: (
        plan.kind == "prefill" and sizes.append(plan.tokens),
        launched(plan),
    )
    return sizes


def submit_six(bench: Bench, prompt_of, tokens: int = 60) -> None:
    """More than the pool of 39 pages holds: 6 * 70 tokens."""
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), tokens, sampling={"temperature": 1.0, "seed": i})


def counts(bench: Bench):
    return bench.engine.scheduler.memory.parking.counts


def assert_as_if_undisturbed(bench: Bench, model, prompt_of, tokens: int = 60) -> None:
    roomy = Bench(model, kv_pages=600)
    submit_six(roomy, prompt_of, tokens)
    roomy.run()
    roomy.close()
    for i in range(6):
        mine, theirs = bench.completions[f"r{i}", 0], roomy.completions[f"r{i}", 0]
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert mine.raw_logprobs == pytest.approx(theirs.raw_logprobs, abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_offloaded_goes_on_where_it_was_and_computes_nothing_again(model, prompt_of, depth):
    bench = offloading(model, pipeline_depth=depth)
    prefills = watch_prefills(bench)
    submit_six(bench, prompt_of)
    bench.run()
    preemptions = bench.engine.scheduler.counters.preemptions
    assert preemptions > 0 and counts(bench).restored == counts(bench).parked == preemptions
    assert counts(bench).pages_out > 0 and counts(bench).pages_in > 0
    assert sum(prefills) == 6 * 10 + preemptions, "each prompt once, and after a return the token that was drawn last"
    assert all(bench.completions[f"r{i}", 0].recomputed == () for i in range(6))
    bench.close()
    assert_as_if_undisturbed(bench, model, prompt_of)


def test_the_tokens_are_transformers(model, prompt_of, greedy):
    bench = offloading(model)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60)
    bench.run()
    assert counts(bench).restored > 0
    for i in range(6):
        assert bench.tokens(f"r{i}") == greedy(prompt_of(10, i), 60)
    bench.close()
