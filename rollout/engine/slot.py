"""A slot: the buffers and events of one step in flight.

                 host                     device
    input   [words] int32, pinned  -H2D->  [words] int32      one packed upload a step
    output  [4, rows] int32        <-D2H-  [4, rows] int32    token ids, and three log-probs as float bits

    h2d_done   the upload has arrived          start  compute begins (recorded after the wait on the upload)
    d2h_done   the outputs are on the host     end    compute is over; the D2H copy waits for it

With constrained rows the step has two parts, and the second waits for their masks: start, forward_end, draw_start, end.

A slot is taken from acquire until the commit that read its host outputs has returned; its buffers are written by
nobody else in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.engine.device import Device
from rollout.engine.masks import StepMasks

#: Sections start at a multiple of this many int32 words: at 16 bytes. Kernels are compiled anew for pointers that are
#: not that well aligned, and nothing is to be compiled while serving.
_ALIGN = 4
#: int32 words that alignment adds to an upload at the most: fewer than `_ALIGN` a section, of which there are fewer
#: than 24.
ALIGNMENT_WORDS = 24 * (_ALIGN - 1)
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

    def __init__(self, device: Device, upload_words: int, max_rows: int, vocab: int) -> None:
        self.input_host = device.host_buffer((upload_words,), torch.int32)
        self.input = torch.zeros(upload_words, dtype=torch.int32, device=device.torch_device)
        self.output = torch.zeros(OUTPUT_FIELDS, max_rows, dtype=torch.int32, device=device.torch_device)
        self.output_host = device.host_buffer((OUTPUT_FIELDS, max_rows), torch.int32)
        self.h2d_start, self.h2d_done = device.event(), device.event()
        self.start, self.end = device.event(), device.event()
        self.d2h_start, self.d2h_done = device.event(), device.event()
        self.masks = StepMasks(device, max_rows, vocab)
        self.forward_end, self.draw_start = device.event(), device.event()  # of a step whose draw is held
        self.forwarded: tuple[torch.Tensor, torch.Tensor] | None = None  # its logits and rows
        self._staging = self.input_host.numpy()
        self._used = 0
        self._sections: dict[str, Section] = {}

    def begin(self) -> None:
        """Forget the last upload."""
        self._used = 0
        self._sections = {}

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
