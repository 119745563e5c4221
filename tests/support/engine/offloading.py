"""Engines whose pool is smaller than their requests need, with host memory; six requests and their right tokens."""

import pytest
import torch

from rollout.engine.kv.tiers.host_tier import HostTier
from rollout.engine.kv.tiers.known import KnownBooks
from rollout.engine.kv.tiers.offload import in_host_tier
from rollout.engine.sequence.sequence import Sequence
from tests.support.engine.harness import Bench, Completion

PAGE = 4


def offloading(model, host_pages: int = 512, piece_pages: int = 3, device=None, receiver=None, **engine) -> Bench:
    """An engine with a given number of host pages, copied a given number at a time."""
    page_size = engine.setdefault("page_size", PAGE)
    page_bytes = model.spec.kv_bytes_per_token(torch.float32) * page_size
    fields = {"host_kv_gib": host_pages * page_bytes / 2**30, "host_kv_piece_mib": piece_pages * page_bytes / 2**20}
    return Bench(model, device, receiver, **{"kv_pages": 40, **fields, **engine})


def submit_six(bench: Bench, prompt_of) -> None:
    """6 * 70 tokens: more than fit in the pool of 39 pages."""
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(10, i), 60, sampling={"temperature": 1.0, "seed": i})


def host_tier(bench: Bench) -> HostTier:
    tier = bench.engine.parts.tier
    assert isinstance(tier, HostTier)
    return tier


def copies_pay(bench: Bench) -> KnownBooks:
    """Have copies and reads pay, however dear they are beside so small a model. Returns the books of known KV."""
    known = host_tier(bench).known
    known.costs.worth = 1e12
    return known


def counts(bench: Bench):
    return host_tier(bench).offload.counts


def restoring(seq: Sequence) -> bool:
    """True while a copy from the host writes to a page of the sequence."""
    return seq.kv.is_offloaded and any(restore.copying for restore in in_host_tier(seq).offloaded.restores)


_undisturbed: dict[str, Completion] = {}  # of the first checkpoint, whose weights `model` has; made once


def assert_as_if_undisturbed(bench: Bench, model, prompt_of) -> None:
    if not _undisturbed:
        roomy = Bench(model, kv_pages=600)
        submit_six(roomy, prompt_of)
        roomy.finish()
        _undisturbed.update({name: completion for (name, _), completion in roomy.completions.items()})
    for i in range(6):
        mine, theirs = bench.completions[f"r{i}", 0], _undisturbed[f"r{i}"]
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert mine.raw_logprobs == pytest.approx(theirs.raw_logprobs, abs=1e-4)
