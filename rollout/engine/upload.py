"""An upload: all that the device needs to run a step, as one packed buffer and a small header of plain data.

    Plan --pack--> Upload = Header + words --execute--> the same step, in this process or in another one

                +---------------------------- words: int32, one H2D copy ----------------------------+
    a decode    | rows | new_pages | segments                             | what some steps have more |
    a prefill   | tokens | positions | token_span | rows | ends | lengths | what some steps have more |
                | sampled_rows | sampled_at | query_starts                |                           |
                +--------------------------------------------------------------------------------------+

    rows, new_pages        int64, int32 [size]: row of each span, 0 for padding; page that its token opens, 0 for none
    segments               int32 [2 size, W]: the shared parts of neighbouring rows (`segments.make_segments`); only of
                           an engine whose attention reads shared pages once
    tokens, positions,     int64 [T]: token ids, their positions, and the span of each token
      token_span
    ends, lengths          int64 [rows]: context after the step; LENGTH of the row state before the draw
    sampled_rows, _at      int64 [draws]: rows that draw a token, and the token of the step before each draw
    query_starts           int32 [rows + 1]: where each span's tokens begin

    init_*, page_updates, banned*, bias*, counts*   rows that the step sets up (`row_state.py`)
    copies                 int32 [n, 2]: pages to copy, source and target
    state_saves, _loads    int64 [n, 2]: states to copy, source and target place; first all saves, then all loads
    behind                 int32 [size]: for a row, how many tokens ahead follow it; for a token ahead, -1; only of
                           steps with any, of a model with states. It lies next to the sections of a decode
    known                  int64 [n, 3]: row, token that goes in, its position; of rows of a decode forward whose token
                           comes from the host
    of features            see their folders

The sections of a decode lie first and at the same offset in every upload of its size: captured steps read them there.
`Header`, words and extras say everything: `execute` needs no other state of the host, so an upload can be sent to a
process that has a copy of the model and of the device's KV, row state and feature data.

The way back is a `StepOutput`: a slot is read into it, and the scheduler commits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntFlag, auto
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from trainer_bridge.wire.sampling_rules import Part

#: Sections start at a multiple of this many int32 words: 16 bytes. Kernels are compiled anew for pointers that are less
#: well aligned, and nothing is compiled while serving.
_ALIGN = 4
#: int32 words that alignment adds to an upload at most: fewer than `_ALIGN` for each of fewer than 32 sections.
ALIGNMENT_WORDS = 32 * (_ALIGN - 1)
_TORCH_TYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}


class RowNeeds(IntFlag):
    """The needs of a row beyond a plain forward and draw: a step leaves out the parts that no row needs."""

    NONE = 0
    GREEDY = auto()
    DRAW = auto()
    TRUNCATE = auto()
    PENALIZE = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    CONSTRAIN = auto()
    LOGITS = auto()  # a feature reads the logits
    VARIANT = auto()  # the forward runs with a variant of the weights

    @property
    def reshapes(self) -> bool:
        """True if the drawn distribution is not the plain one."""
        return bool(self & ~(RowNeeds.GREEDY | RowNeeds.DRAW | RowNeeds.LOGITS | RowNeeds.VARIANT))


#: Sampling that is inside a captured step.
PLAIN = RowNeeds.GREEDY | RowNeeds.DRAW
#: The need of a sampling rule, by its part of the draw. Every draw has a temperature.
NEEDS: dict[Part, RowNeeds] = {
    "temperature": RowNeeds.NONE,
    "truncation": RowNeeds.TRUNCATE,
    "penalty": RowNeeds.PENALIZE,
}


class UploadSection(NamedTuple):
    """The range of a named array in the words of an upload."""

    start: int  # int32 words
    words: int
    dtype: str  # numpy's name for it
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The description of a step without its arrays: integers, strings, flags and tuples of them."""

    rows: int  # rows in the step
    tokens: int  # input tokens
    draws: int  # drawn tokens
    needs: int  # bits of `RowNeeds`
    max_context: int  # longest context in the step, this step's tokens included
    sections: dict[str, UploadSection]
    size: int = 0  # rows of the captured decode step that runs it; 0 if it is launched kernel by kernel
    #: A prefill: (first token of the step, tokens, context, draws) of each span. Empty: the decode forward.
    layout: tuple[tuple[int, int, int, int], ...] = ()
    most_ahead: int = 0  # most tokens ahead of a row; 0 in a step without any
    facts: dict[str, list[Any]] = {}  # plain data of features, by feature name

    def to_fields(self) -> dict[str, Any]:
        """A map of integers, strings and lists, for a wire."""
        return self._asdict()

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Header:
        """The inverse of `to_fields`; accepts lists in place of tuples, as a wire makes them."""
        sections = {
            name: UploadSection(start, words, dtype, tuple(shape))
            for name, (start, words, dtype, shape) in fields["sections"].items()
        }
        layout = tuple((first, tokens, context, draws) for first, tokens, context, draws in fields["layout"])
        return cls(**{**fields, "sections": sections, "layout": layout})


@dataclass(frozen=True, eq=False, slots=True)
class Extra:
    """Data that a feature sends with a step outside of the words, because it is too large for them."""

    feature: str  # equal to `DeviceFeature.name`
    fields: list[Any]  # integers, strings and lists of them
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Upload:
    """A packed step on the host."""

    header: Header
    words: torch.Tensor  # int32
    extras: tuple[Extra, ...] = ()


class StepInput:
    """An upload on the device: its arrays by name."""

    __slots__ = ("extras", "header", "words")

    def __init__(self, header: Header, words: torch.Tensor, extras: tuple[Extra, ...] = ()) -> None:
        self.header = header
        self.words = words
        self.extras = extras  # on the host

    def receive(self, words: torch.Tensor) -> None:
        """Copy the words of an upload here; on the H2D stream."""
        self.words.copy_(words, non_blocking=True)

    def __contains__(self, name: str) -> bool:
        return name in self.header.sections

    def get(self, name: str) -> torch.Tensor | None:
        """A section, as a view; None if the step does not have it."""
        return self[name] if name in self else None

    def __getitem__(self, name: str) -> torch.Tensor:
        """A section, as a view."""
        start, words, dtype, shape = self.header.sections[name]
        return self.words[start : start + words].view(_TORCH_TYPES[dtype]).view(shape)


class UploadStaging:
    """Host memory in which the upload of one step is packed."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words  # int32
        self.used = 0
        self.sections: dict[str, UploadSection] = {}
        self.extras: list[Extra] = []
        self.facts: dict[str, list[Any]] = {}
        self._array = words.numpy()

    def begin(self) -> None:
        self.used = 0
        self.sections = {}
        self.extras = []
        self.facts = {}

    def put(self, name: str, array: np.ndarray) -> None:
        """Append an int32, int64 or float32 array."""
        assert name not in self.sections, f"the section {name} is put twice"
        flat = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        start, words = self.used, len(flat)
        assert start + words <= len(self._array), "the scheduler plans no step that exceeds the staging buffer"
        self._array[start : start + words] = flat
        self.sections[name] = UploadSection(start, words, array.dtype.str, array.shape)
        self.used = -(-(start + words) // _ALIGN) * _ALIGN

    def upload(self, rows: int, tokens: int, draws: int, needs: int, max_context: int, **more: Any) -> Upload:
        """The upload of the put arrays; `more` are the other fields of its header."""
        header = Header(rows, tokens, draws, needs, max_context, self.sections, **more, facts=self.facts)
        return Upload(header, self.words[: self.used], tuple(self.extras))


def put_decode(staging: UploadStaging, rows: Seq[int], opens: Seq[tuple[int, int]], size: int) -> None:
    """Put the rows of a decode forward and the pages that they open, (index, page), padded to `size` with row 0.

    The segments come next, where attention reads shared pages once.
    """
    rows_B = np.zeros(size, dtype=np.int64)
    rows_B[: len(rows)] = rows
    pages_B = np.zeros(size, dtype=np.int32)
    for index, page in opens:
        pages_B[index] = page
    staging.put("rows", rows_B)
    staging.put("new_pages", pages_B)


def put_behind(staging: UploadStaging, counts: Seq[int], size: int) -> None:
    """Put the number of tokens ahead of each row of a step, right after its other sections of a decode.

    Padded to `size`. `counts` has a number for each row, in their order.
    """
    behind_B = np.zeros(size, dtype=np.int32)
    at = 0
    for count in counts:
        behind_B[at : at + 1 + count] = [count] + [-1] * count
        at += 1 + count
    staging.put("behind", behind_B)


def put_prefill(
    staging: UploadStaging, spans: Seq[tuple[int, int, int, int]], tokens: np.ndarray
) -> tuple[tuple[int, int, int, int], ...]:
    """Put a prefill: for each span (row, start, tokens, draws), and all token ids (int64). Returns the layout."""
    rows, starts, lengths, draws = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    ends = starts + lengths
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    samples = np.flatnonzero(draws)
    staging.put("tokens", tokens)
    staging.put("positions", np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths))
    staging.put("token_span", np.repeat(np.arange(len(spans)), lengths))
    staging.put("rows", rows)
    staging.put("ends", ends)
    staging.put("lengths", ends - draws)  # the draw advances a row by one, so a row that draws is left one short
    staging.put("sampled_rows", rows[samples])
    staging.put("sampled_at", bounds[1:][samples] - 1)
    staging.put("query_starts", bounds.astype(np.int32))
    return tuple(zip(bounds[:-1].tolist(), lengths.tolist(), ends.tolist(), draws.tolist(), strict=True))


Of = TypeVar("Of")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The samples of a step, one entry for each row that drew a token, in the order of the plan."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    drawn_logprobs: list[float]
    #: In a step with tokens ahead: the number of accepted ones, at the index of the row's own draw.
    accepted: list[int] = field(default_factory=list)
    of_features: Mapping[str, object] = field(default_factory=dict)  # results that features pass to their host part

    def of(self, feature: str, kind: type[Of]) -> Of:
        """The result of a feature that has one in this step."""
        found = self.of_features[feature]
        assert isinstance(found, kind)
        return found
