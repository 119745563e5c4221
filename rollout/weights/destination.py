"""The destination of an update's bytes on a worker: staging memory, or the parameters themselves.

    StagedDestination     host buffer  [--> shadow buffer on the device, on a separate stream]  --swap--> parameters
    InPlaceDestination    bucket by bucket into the parameters, while generation is held

Both run in the receiver's thread, or in a thread that it waits for. Staged bytes may be wrong: they are used only after
all of them are verified. Bytes that land in place change the served weights at once; `dirty` is true from then on.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rollout.models.cut import CutView
from rollout.weights.parameter_map import Fit
from rollout.weights.staging import DeviceShadow
from trainer_bridge.transports.tensors import TORCH_DTYPES, typed_view
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import Manifest, TensorEntry


class StagedDestination:
    """The whole stream, in host memory and (with `shadow`) from there in memory of the device."""

    dirty = False
    has_room = True

    def __init__(self, host: torch.Tensor, shadow: DeviceShadow | None) -> None:
        self._host, self._shadow = host, shadow
        self._bytes = host.numpy()  # the same memory: NumPy and file reads fill it without holding the GIL

    @property
    def stream(self) -> torch.Tensor:
        """The memory of the complete update, once `copied`."""
        return self._host if self._shadow is None else self._shadow.memory

    def memory(self, start: int, end: int) -> np.ndarray:
        """The memory of these bytes."""
        return self._bytes[start:end]

    def landed(self, start: int, end: int) -> None:
        """Start to copy the bytes to the device."""
        if self._shadow is not None:
            self._shadow.upload(self._host, start, end)

    def put(self, start: int, data: torch.Tensor) -> None:
        """Take bytes from any device."""
        if self._shadow is not None:
            self._shadow.put(start, data)
        else:
            self._host[start : start + data.numel()].copy_(data)

    def copied(self) -> bool:
        """Whether all bytes that landed are in the memory that the swap reads."""
        return self._shadow is None or self._shadow.copied()

    def check_aliases(self, manifest: Manifest, fit: Fit, views: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightsRejected` when tensors that are one parameter differ."""
        entries = {entry.name: entry for entry in manifest.tensors} if fit.aliases else {}
        for kept, other in fit.aliases:
            a, b = (typed_view(self.stream, entries[name]) for name in (kept, other))
            check_equal(kept, other, a, b, views[kept].dtype)

    def abandon(self) -> None:
        """Return when this update's memory is neither written nor read."""
        if self._shadow is not None:
            self._shadow.wait()


class InPlaceDestination:
    """The parameters. `memory` is one buffer: call `landed` before you ask for the next bytes."""

    has_room = True

    def __init__(self, manifest: Manifest, fit: Fit, views: Mapping[str, torch.Tensor], pinned: bool) -> None:
        self.dirty = False
        self._entries = manifest.tensors
        self._starts = [entry.offset for entry in self._entries]
        self._views = views
        self._aliases = {other for _, other in fit.aliases}
        self._unused = set(fit.unused)
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._parts: dict[int, torch.Tensor] = {}  # tensors that are copied to their view in one piece
        self._missing = [entry.nbytes for entry in self._entries]
        device = next(iter(views.values())).device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # recorded after each `put`
        self._device = device

    def memory(self, start: int, end: int) -> np.ndarray:
        """The buffer."""
        if self._buffer.numel() < end - start:
            self._buffer = torch.empty(end - start, dtype=torch.uint8, pin_memory=self._pinned)
        return self._buffer[: end - start].numpy()

    def landed(self, start: int, end: int) -> None:
        """Copy the buffer into the parameters."""
        self.put(start, self._buffer[: end - start])

    @torch.inference_mode()
    def put(self, start: int, data: torch.Tensor) -> None:
        """Copy bytes into the parameters; `data` may be reused after the call, in stream order."""
        end = start + data.numel()
        for i in entries_within(self._entries, self._starts, start, end):
            entry = self._entries[i]
            if entry.name not in self._unused:
                lo, hi = max(entry.offset, start), min(entry.end, end)
                self._write(i, entry, lo - entry.offset, data[lo - start : hi - start])
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def copied(self) -> bool:
        """Whether all copies are done: the next reader of the parameters is on another stream."""
        return self._copied is None or self._copied.query()

    def check_aliases(self, manifest: Manifest, fit: Fit, views: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightsRejected` when tensors that are one parameter differ."""
        numbers = {entry.name: i for i, entry in enumerate(self._entries)} if fit.aliases else {}
        for kept, other in fit.aliases:
            part = self._parts.pop(numbers[other], None)
            if part is not None:
                entry = self._entries[numbers[other]]
                view, sent = views[kept], typed_view(part, _at_zero(entry))
                check_equal(kept, other, view, view.cut.take(sent) if isinstance(view, CutView) else sent, view.dtype)

    def abandon(self) -> None:
        """Return when this update writes no more; free the gathered parts."""
        if self._copied is not None:
            self._copied.synchronize()
        self._parts.clear()

    def _write(self, i: int, entry: TensorEntry, at: int, data: torch.Tensor) -> None:
        view = self._views[entry.name]
        self._missing[i] -= data.numel()
        alias = entry.name in self._aliases
        plain = type(view) in (torch.Tensor, torch.nn.Parameter)  # others quantise or cut a whole tensor
        if plain and view.is_contiguous() and not alias:
            typed = data.view(TORCH_DTYPES[entry.dtype])
            first = at // typed.element_size()
            self.dirty = True
            view.view(-1)[first : first + typed.numel()].copy_(typed)  # host memory: returns when it is copied
            return
        part = self._parts.get(i)
        if part is None:
            part = self._parts[i] = torch.empty(entry.nbytes, dtype=torch.uint8, device=view.device)
        part[at : at + data.numel()].copy_(data)
        if self._missing[i] == 0 and not alias:
            self.dirty = True
            view.copy_(typed_view(self._parts.pop(i), _at_zero(entry)))


def entries_within(entries: Sequence[TensorEntry], starts: Sequence[int], start: int, end: int) -> Iterator[int]:
    """The numbers of the tensors that have bytes from `start` to `end` of the stream; `starts` are their offsets."""
    for i in range(max(0, bisect.bisect_right(starts, start) - 1), len(entries)):
        if entries[i].offset >= end:
            return
        if max(entries[i].offset, start) < min(entries[i].end, end):
            yield i


def _at_zero(entry: TensorEntry) -> TensorEntry:
    return TensorEntry(entry.name, entry.dtype, entry.shape, 0)


def check_equal(kept: str, other: str, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `WeightsRejected` unless `a` and `b` are equal, bit for bit or after the conversion to the parameter."""
    same = (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dtype == b.dtype else False
    )
    if not same and not torch.equal(a.to(dtype), b.to(dtype)):
        raise WeightsRejected(
            f"{kept} and {other} are one parameter of the worker's model, but differ: send one of them. If it is an "
            "output layer that the trainer's model does not tie to its embedding, start the worker with a checkpoint "
            "that has both tensors, and tie_word_embeddings = false in config.json",
            field="manifest",
        )
