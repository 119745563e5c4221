"""Turns a sequence's state into the service's events and the meter's totals."""

from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rollout.engine.messages.requests import VersionRuns
from rollout.engine.messages.to_service import Delta, DeltaFields, DoneFields, RequestDone
from rollout.engine.schedule.step_feature import RequestFeature
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.sequence.sequence_kv import PrefixHit

_Fields = TypeVar("_Fields", DeltaFields, DoneFields)

#: Error of a completion whose next token could not be drawn.
NOT_FINITE = "the model's logits are not finite (NaN or infinity): look at the weights of this version"


@dataclass(slots=True)
class Counters:
    """Running totals since start."""

    tokens: int = 0
    zombie_rows: int = 0
    decode_rows: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # prompt tokens of admitted sequences
    cached_tokens: int = 0  # prompt tokens with cached KV
    older_tokens: int = 0  # tokens of admitted sequences with cached KV of older weights
    snapshot_loads: int = 0  # rows that started from a snapshot
    prefix_hits: Counter[PrefixHit] = field(default_factory=Counter)  # rows that did not compute their whole prompt
    prefilled_tokens: int = 0  # prefilled tokens, recomputed ones included


def make_delta(seq: Sequence, features: Seq[RequestFeature] = ()) -> Delta:
    """The tokens of `seq` that no delta has carried yet, with what features add; counts them as flushed."""
    drawn, kv = seq.drawn, seq.kv
    start, end, versions = drawn.flushed, len(drawn.tokens), drawn.versions
    delta = Delta(
        key=seq.group.key,
        index=seq.index,
        offset=start,
        token_ids=_slice(drawn.tokens, start, end),
        logprobs=_slice(drawn.logprobs, start, end),
        raw_logprobs=_slice(drawn.raw_logprobs, start, end),
        drawn_logprobs=_slice(drawn.drawn_logprobs, start, end) if drawn.drawn_logprobs is not None else None,
        versions=last_runs(versions, end - start),
        seed=seq.seed,
        finish=seq.finish,
        recomputed=kv.recomputed,
        kv_versions=kv.found,
        version_span=versions[-1][0] - versions[0][0] if seq.finish and versions else 0,
        **_merged(features, lambda feature: feature.delta_fields(seq)),
    )
    for feature in features:  # nothing may fail from here on: a fault before this loses nothing
        feature.delta_made(seq)
    drawn.flushed = end
    return delta


def _merged(features: Seq[RequestFeature], of_feature: Callable[[RequestFeature], _Fields]) -> _Fields:
    """The fields that features give."""
    fields: _Fields = {}
    for feature in features:
        given = of_feature(feature)
        assert fields.keys().isdisjoint(given), f"{feature.name} gives a field that another feature has given"
        fields.update(given)
    return fields


def last_runs(runs: list[list[int]], count: int) -> VersionRuns:
    """The runs that cover the last `count` tokens."""
    taken: VersionRuns = []
    for version, length in reversed(runs):
        if count == 0:
            break
        used = min(length, count)
        taken.append((version, used))
        count -= used
    assert count == 0, "every generated token has a version"
    return taken[::-1]


def make_request_done(group: Group, now_s: float, features: Seq[RequestFeature] = ()) -> RequestDone:
    """The closing event of a request, with its times."""
    admitted, first_token = min(group.admitted_s, now_s), min(group.first_token_s, now_s)
    return RequestDone(
        key=group.key,
        prompt_tokens=len(group.request.prompt),
        cached_tokens=group.cached_tokens,
        preemptions=group.preemptions,
        queued_s=admitted - group.arrived_s,
        prefill_s=first_token - admitted,
        decode_s=now_s - first_token,
        total_s=now_s - group.arrived_s,
        **_merged(features, lambda feature: feature.done_fields(group)),
    )


def _slice(values: array, start: int, end: int) -> np.ndarray:
    return np.array(values[start:end], dtype=np.int32 if values.typecode == "i" else np.float32)
