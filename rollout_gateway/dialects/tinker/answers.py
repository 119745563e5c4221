"""The answer to a sample in both forms of Tinker's API: protobuf, which its package reads, and JSON.

`_SAMPLE` is the table of protobuf's field numbers. Numbers from 1001 on are this gateway's own: other readers pass over
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.config.gateway_settings import LogprobMode
from rollout_gateway.answers.answer_facts import fault, finish_reason, version_runs
from rollout_gateway.answers.logprobs import finite, sampled
from rollout_gateway.dialects.tinker.request_bodies import SampleBody, TargetTokens
from rollout_gateway.http.http_errors import HttpError
from trainer_bridge.client.results import Completion, GenerateResult

#: Number and kind of a field: the table of a message inside, or None for a number, text or array.
_Fields = Mapping[str, tuple[int, Any]]

_TOPS: _Fields = {"token_ids": (1, None), "logprobs": (2, None), "k": (3, None), "length": (4, None)}
_SPARSE: _Fields = {"values": (1, None), "crow_indices": (2, None), "col_indices": (3, None)}
_TENSOR: _Fields = {"dense": (1, None), "sparse_csr": (2, _SPARSE), "dtype": (3, None), "shape": (4, None)}
_VERSIONS: _Fields = {"version": (1, None), "start": (2, None), "end": (3, None)}
_MARK: _Fields = {"position": (1, None), "version": (2, None)}
_SEQUENCE: _Fields = {
    "stop_reason": (1, None),
    "tokens": (2, None),
    "logprobs": (3, None),
    "topk_sampled_logprobs": (4, _TOPS),
    "weight_versions": (1001, _VERSIONS),
    "adapter_versions": (1002, _MARK),
}
_SAMPLE: _Fields = {
    "sequences": (1, _SEQUENCE),
    "prompt_logprobs": (2, None),
    "topk_prompt_logprobs": (3, _TOPS),
    "prompt_cache_hit_tokens": (4, None),
    "target_prompt_logprobs": (5, _TENSOR),
    "prompt_weight_version": (1001, None),
}
_STOP_REASONS = {"stop": 0, "length": 1}
_FLOAT32 = 1  # the number of this type in a tensor
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0  # fill rows of likeliest tokens up
_SEQUENCE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Tops:
    """The likeliest tokens at each position: `ids` int32 and `logprobs` float32, both [positions, k]."""

    ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, logprobs: np.ndarray, positions: int) -> Tops:
        """Rows for the last of `positions`; what is unknown has Tinker's mark."""
        known = (ids >= 0) & np.isfinite(logprobs)
        more = ((positions - len(ids), 0), (0, 0))
        return cls(
            np.pad(np.where(known, ids, _NO_TOKEN).astype(np.int32), more, constant_values=_NO_TOKEN),
            np.pad(np.where(known, logprobs, _NO_LOGPROB).astype(np.float32), more, constant_values=_NO_LOGPROB),
        )

    def message(self) -> dict[str, Any]:
        """The fields in protobuf."""
        length, k = self.ids.shape
        return {"token_ids": self.ids, "logprobs": self.logprobs, "k": k, "length": length}

    def rows(self) -> list[list[tuple[int, float]] | None]:
        """The rows in JSON: `[[token, log-prob], ...]`, None where nothing is known."""
        rows = zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        found = [[pair for pair in zip(*row, strict=True) if pair[1] != _NO_LOGPROB] for row in rows]
        return [row or None for row in found]


@dataclass(frozen=True, slots=True)
class TinkerSequence:
    """One completion: `tokens` int32 [tokens], `logprobs` float32 [tokens].

    `versions`: runs of tokens by weights version. `adapter_versions`: from which position on the adapter had which one.
    """

    stop_reason: str
    tokens: np.ndarray
    logprobs: np.ndarray
    tops: Tops | None
    versions: list[dict[str, int]]
    adapter_versions: list[dict[str, int]]

    @classmethod
    def of(cls, completion: Completion, mode: LogprobMode, top: int) -> TinkerSequence:
        """The form of a completion. Raises `HttpError` if it is not whole: Tinker has no word for that."""
        failed = fault(completion)
        if failed is not None:
            raise failed
        reason = finish_reason(completion)
        if reason not in _STOP_REASONS:
            raise HttpError(503, "the request was aborted before its completions were complete")
        tops = None
        if top and completion.top_ids is not None and completion.top_logprobs is not None:
            tops = Tops.of(completion.top_ids[:, :top], completion.top_logprobs[:, :top], len(completion))
        logprobs = sampled(completion, mode)
        marks = [{"position": position, "version": version} for position, version in completion.adapter_versions]
        return cls(reason, completion.token_ids, logprobs, tops, version_runs(completion.versions), marks)


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """The answer to a sample. Arrays of the prompt have an entry for each of its tokens, NaN where it is unknown.

    `targets`: the tokens that were scored at positions of the prompt, and their log-probs.
    """

    sequences: list[TinkerSequence]
    cached_tokens: int
    prompt_logprobs: np.ndarray | None
    prompt_tops: Tops | None
    targets: tuple[TargetTokens, np.ndarray] | None
    prompt_version: int | None

    @classmethod
    def of(
        cls, result: GenerateResult, body: SampleBody, scored: int, targets: TargetTokens | None, mode: LogprobMode
    ) -> SampleAnswer:
        """The answer to a request. `scored`: the tokens at the prompt's end that it has scored. Raises `HttpError`."""
        sequences = [TinkerSequence.of(each, mode, body.topk_sample_logprobs) for each in result.completions]
        own = tops = scores = None
        if body.prompt_logprobs:
            assert result.prompt_logprobs is not None, "they were asked for"
            own = np.full(result.prompt_tokens, np.nan, np.float32)
            own[result.prompt_tokens - scored :] = result.prompt_logprobs[-scored:]
        if body.topk_prompt_logprobs:
            assert result.prompt_tops is not None, "they were asked for"
            most, found = body.topk_prompt_logprobs, result.prompt_tops
            tops = Tops.of(found.ids[-scored:, :most], found.logprobs[-scored:, :most], result.prompt_tokens)
        if targets is not None:
            assert result.prompt_chosen_logprobs is not None, "they were asked for"
            scores = targets, targets.answer(result.prompt_chosen_logprobs)
        return cls(sequences, result.cached_tokens, own, tops, scores, result.prompt_version)

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        tops = [
            each for each in (self.prompt_tops, *(sequence.tops for sequence in self.sequences)) if each is not None
        ]
        arrays = [array for each in tops for array in (each.ids, each.logprobs)]
        arrays += [array for each in self.sequences for array in (each.tokens, each.logprobs)]
        arrays += [] if self.prompt_logprobs is None else [self.prompt_logprobs]
        arrays += [] if self.targets is None else [self.targets[1], *self.targets[0].arrays]
        return sum(array.nbytes for array in arrays) + _SEQUENCE_BYTES * (1 + len(self.sequences))

    def protobuf(self) -> bytes:
        """The answer as protobuf's `SampleResponse` of Tinker's package."""
        return _message(
            {
                "sequences": [
                    {
                        "stop_reason": _STOP_REASONS[each.stop_reason],
                        "tokens": each.tokens,
                        "logprobs": each.logprobs,
                        "topk_sampled_logprobs": None if each.tops is None else each.tops.message(),
                        "weight_versions": each.versions,
                        "adapter_versions": each.adapter_versions,
                    }
                    for each in self.sequences
                ],
                "prompt_logprobs": self.prompt_logprobs,
                "topk_prompt_logprobs": None if self.prompt_tops is None else self.prompt_tops.message(),
                "prompt_cache_hit_tokens": self.cached_tokens,
                "target_prompt_logprobs": None if self.targets is None else _tensor(*self.targets),
                "prompt_weight_version": self.prompt_version,
            },
            _SAMPLE,
        )

    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "type": "sample",
            "sequences": [
                {
                    "stop_reason": each.stop_reason,
                    "tokens": each.tokens.tolist(),
                    "logprobs": _numbers(each.logprobs),
                    "weight_versions": each.versions,
                    "adapter_versions": each.adapter_versions,
                }
                | ({} if each.tops is None else {"topk_logprobs": each.tops.rows()})
                for each in self.sequences
            ],
            "prompt_logprobs": None if self.prompt_logprobs is None else _numbers(self.prompt_logprobs),
            "topk_prompt_logprobs": None if self.prompt_tops is None else self.prompt_tops.rows(),
            "prompt_cache_hit_tokens": self.cached_tokens,
        }
        if self.targets is not None:
            targets, scores = self.targets
            tensor = {"dtype": "float32", "shape": targets.shape, "data": _numbers(scores)}
            if targets.sparse is not None:
                names = "sparse_crow_indices", "sparse_col_indices"
                tensor |= {name: each.tolist() for name, each in zip(names, targets.sparse, strict=True)}
            answer["target_prompt_logprobs"] = tensor
        return answer if self.prompt_version is None else answer | {"prompt_weight_version": self.prompt_version}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [finite(value) for value in values.tolist()]


def _tensor(targets: TargetTokens, scores: np.ndarray) -> dict[str, Any]:
    """The fields of the scores' tensor in protobuf, in the layout of the request."""
    tensor: dict[str, Any] = {"dtype": _FLOAT32, "shape": targets.shape}
    if targets.sparse is None:
        return tensor | {"dense": scores}
    rows, columns = targets.sparse
    return tensor | {"sparse_csr": {"values": scores, "crow_indices": rows, "col_indices": columns}}


def _message(values: Mapping[str, Any], fields: _Fields) -> bytes:
    """A protobuf message with the fields of the table; fields that are None are left out."""
    parts = []
    for name, (number, inner) in fields.items():
        value = values.get(name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int):
                parts += [_varint(number << 3), _varint(each)]
            elif each is not None:
                data = each.tobytes() if isinstance(each, np.ndarray) else _message(each, inner)
                parts += [_varint(number << 3 | 2), _varint(len(data)), data]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    return bytes(_groups(value))


def _groups(value: int) -> Iterator[int]:
    """Seven bits a byte, the lowest first; every byte except the last one has the highest bit."""
    assert value >= 0
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
