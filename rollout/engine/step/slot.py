"""A slot: the buffers and events of one step in flight.

                 host                     device
    input   [words] int32, pinned  -H2D->  [words] int32      one packed upload a step
    output  [4, rows] int32        <-D2H-  [4, rows] int32    token ids, and three log-probs as float bits
    record  [tokens, words] int32  <-D2H-  the same           experts of its tokens, behind the output; where it is kept

    h2d_done   the upload has arrived          start  compute begins (recorded after the wait on the upload)
    d2h_done   the outputs are on the host     end    compute is over; the D2H copy waits for it

What some steps have beside these is in `masks` and `scores`. With constrained rows the step has two parts, and the
second waits for their masks: start, forward_end, draw_start, end.

A slot is taken from acquire until the commit that read its host outputs has returned; its buffers are written by
nobody else in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.engine.device.streams import Device
from rollout.engine.messages import RoutingShape
from rollout.engine.step.expert_trace import record_words
from rollout.engine.step.masks import StepMasks
from rollout.engine.step.scores import StepScores
from rollout.engine.step.step_record import StepRecord

#: Sections start at a multiple of this many int32 words: at 16 bytes. Kernels are compiled anew for pointers that are
#: not that well aligned, and nothing is to be compiled while serving.
_ALIGN = 4
#: int32 words that alignment adds to an upload at the most: fewer than `_ALIGN` a section, of which there are fewer
#: than 32.
ALIGNMENT_WORDS = 32 * (_ALIGN - 1)
_TORCH_TYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}
OUTPUT_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Section:
    """Where a named array lies in a packed upload."""

    start: int  # int32 words
    words: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Slot:
    """Buffers and events of one step."""

    def __init__(
        self,
        device: Device,
        upload_words: int,
        max_rows: int,
        vocab: int,
        chunk_tokens: int,
        routing: RoutingShape | None = None,
    ) -> None:
        self.input_host = device.host_buffer((upload_words,), torch.int32)
        self.input = torch.zeros(upload_words, dtype=torch.int32, device=device.torch_device)
        words = self._output_words = OUTPUT_FIELDS * max_rows
        behind = record_words(routing, max(max_rows, chunk_tokens))
        self._result = torch.zeros(words + behind, dtype=torch.int32, device=device.torch_device)
        self._result_host = device.host_buffer((words + behind,), torch.int32)
        self.output = self._result[:words].view(OUTPUT_FIELDS, max_rows)
        self.output_host = self._result_host[:words].view(OUTPUT_FIELDS, max_rows)
        self.record = None if routing is None else StepRecord(routing, self._result[words:])
        self._token_words = record_words(routing, 1)
        self.h2d_start, self.h2d_done = device.event(), device.event()
        self.start, self.end = device.event(), device.event()
        self.d2h_start, self.d2h_done = device.event(), device.event()
        self.masks = StepMasks(device, max_rows, vocab)
        self.scores = StepScores(device, max_rows, chunk_tokens, vocab)
        self.forward_end, self.draw_start = device.event(), device.event()  # of a step whose draw is held
        self.forwarded: tuple[torch.Tensor, torch.Tensor] | None = None  # its logits and rows
        self._staging = self.input_host.numpy()
        self._used = 0
        self._sections: dict[str, Section] = {}

    def begin(self) -> None:
        """Forget the last upload."""
        self._used = 0
        self._sections = {}
        self.scores.begin()

    def download(self, tokens: int) -> None:
        """Copy the output to the host, and the record of a step of so many tokens; on the D2H stream."""
        if self.record is None:
            self._result_host.copy_(self._result, non_blocking=True)
        else:
            words = self._output_words + self._token_words * tokens
            self._result_host[:words].copy_(self._result[:words], non_blocking=True)

    def record_host(self, tokens: int) -> np.ndarray | None:
        """The record that has arrived, int32 [tokens, words]; the next step writes over it. None where none is kept."""
        if self.record is None:
            return None
        words = self._result_host[self._output_words : self._output_words + self._token_words * tokens]
        return words.view(tokens, self._token_words).numpy()

    def put(self, name: str, array: np.ndarray) -> None:
        """Append an int32, int64 or float32 array to the upload."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        start = self._used
        assert start + len(flat) <= len(self._staging), "the scheduler plans no step that exceeds the staging buffer"
        self._staging[start : start + len(flat)] = flat
        self._sections[name] = Section(start, len(flat), _TORCH_TYPES[array.dtype.str], array.shape)
        self._used = -(-(start + len(flat)) // _ALIGN) * _ALIGN

    def upload(self) -> Upload:
        """The finished upload, to be copied and then read on the device."""
        return Upload(self.input_host[: self._used], self.input[: self._used], self._sections)


@dataclass(frozen=True, slots=True)
class Upload:
    """One packed upload: the same words on the host and, once copied, on the device."""

    host: torch.Tensor
    device: torch.Tensor
    sections: dict[str, Section] = field(default_factory=dict)

    def copy(self) -> None:
        """Copy host to device; runs on the H2D stream."""
        self.device.copy_(self.host, non_blocking=True)

    def __contains__(self, name: str) -> bool:
        return name in self.sections

    def __getitem__(self, name: str) -> torch.Tensor:
        """A section on the device."""
        section = self.sections[name]
        return self.device[section.start : section.start + section.words].view(section.dtype).view(section.shape)
