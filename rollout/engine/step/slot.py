"""A slot: the buffers and events of one step in flight.

                 host                     device
    input   [words] int32, pinned  -H2D->  [words] int32      one packed upload
    output  [4, rows] int32        <-D2H-  [4, rows] int32    token ids, and three log-probs as float bits
    accepted [rows] int32   <-D2H-  the same                  of steps with tokens ahead, after the output
    of features, int32      <-D2H-  the same                  after these; see `OutputFeature.output_words`

    h2d_done   the upload has arrived          start  compute begins (recorded after the wait on the upload)
    d2h_done   the outputs are on the host     end    compute is over; the D2H copy waits for it

`masks` and `outputs` hold what only some steps have. A step with constrained rows has two parts, and the second waits
for their masks: start, forward_end, draw_start, end.

Where kernels wait for other ranks, the flag that says that a wait failed comes with the outputs. It is copied after the
step, so it is set if a wait of the step failed.

A slot is taken from acquire until the commit that read its host outputs has returned; nothing else writes to its
buffers in between.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from rollout_kernels.parallel import ONE_RANK, TensorGroup

from rollout.engine.device.streams import Device, DeviceError
from rollout.engine.schedule.step_feature import of_kind
from rollout.engine.step.device_feature import DeviceFeature, Drawn, LogitsFeature, OutputFeature
from rollout.engine.step.masks import StepMasks
from rollout.engine.upload import Header, StepInput, StepOutput, Upload, UploadStaging

OUTPUT_FIELDS = 4
_NO_WORDS = np.zeros(0, np.int32)


class FaultFlag:
    """The flag of kernels that wait for other ranks. This class, for one rank, does nothing."""

    def copy(self) -> None:
        """Copy the flag to the host, after the outputs of a step; on the D2H stream."""

    def check(self) -> None:
        """Raise DeviceError if a wait failed before the outputs were copied."""


class _PeerFlag(FaultFlag):
    """The flag `PeerBuffers.fault`: 0, or 1 and the rank that was waited for."""

    def __init__(self, device: Device, flag: torch.Tensor) -> None:
        self._flag, self._host = flag, device.host_buffer((1,), torch.int32)

    def copy(self) -> None:
        self._host.copy_(self._flag, non_blocking=True)

    def check(self) -> None:
        if fault := int(self._host):
            raise DeviceError(f"rank {fault - 1} did not send its part of a sum in time, or sent a wrong part")


def _fault_flag(device: Device, group: TensorGroup) -> FaultFlag:
    return FaultFlag() if group.peers is None else _PeerFlag(device, group.peers.fault)


class Slot:
    """Buffers and events of one step."""

    def __init__(
        self,
        device: Device,
        upload_words: int,
        max_rows: int,
        vocab: int,
        chunk_tokens: int,
        features: Seq[DeviceFeature] = (),
        group: TensorGroup = ONE_RANK,
    ) -> None:
        """Buffers for steps of up to `max_rows` rows, with rows of tokens ahead. `group` are the ranks of a step."""
        self.staging = UploadStaging(device.host_buffer((upload_words,), torch.int32))
        self.input = torch.zeros(upload_words, dtype=torch.int32, device=device.torch_device)
        output_words = OUTPUT_FIELDS * max_rows
        accepted_end = output_words + max_rows
        self._regions, end = _regions(of_kind(features, OutputFeature), accepted_end, max(max_rows, chunk_tokens))
        self._result = torch.zeros(end, dtype=torch.int32, device=device.torch_device)
        self._result_host = device.host_buffer((end,), torch.int32)
        self.output = self._result[:output_words].view(OUTPUT_FIELDS, max_rows)
        self._output_host = self._result_host[:output_words].view(OUTPUT_FIELDS, max_rows)
        self.accepted = self._result[output_words:accepted_end]
        self._accepted_host = self._result_host[output_words:accepted_end]
        #: Device outputs of features, by feature name.
        self.outputs: dict[str, Any] = {}
        self._features, self._of_logits = of_kind(features, OutputFeature), of_kind(features, LogitsFeature)
        spans = {feature.name: (start, end) for feature, start, end in self._regions}
        for feature in self._features:
            begin, end = spans.get(feature.name, (0, 0))
            self.outputs[feature.name] = feature.output(self._result[begin:end], max_rows, chunk_tokens)
        self.fault = _fault_flag(device, group)
        self.h2d_start, self.h2d_done = device.event(), device.event()
        self.start, self.end = device.event(), device.event()
        self.d2h_start, self.d2h_done = device.event(), device.event()
        self.masks = StepMasks(device, max_rows, vocab)
        self.drawn = Drawn(self.output, self.accepted, self.masks)
        self.forward_end, self.draw_start = device.event(), device.event()  # recorded when the draw waits for masks
        #: Logits and rows between the two parts of such a step; on the compute stream.
        self.forwarded: tuple[torch.Tensor, torch.Tensor] | None = None

    def input_for(self, upload: Upload) -> StepInput:
        """The place of an upload on the device."""
        return StepInput(upload.header, self.input[: len(upload.words)], upload.extras)

    def download(self, header: Header) -> None:
        """Copy the outputs of a step to the host; on the D2H stream."""
        if not self._regions:
            self._result_host.copy_(self._result, non_blocking=True)
        else:
            last = self._regions[-1]
            words = last.start + last.feature.output_words(header.tokens)
            self._result_host[:words].copy_(self._result[:words], non_blocking=True)
        self.fault.copy()

    def read(self, header: Header) -> StepOutput:
        """The outputs that have arrived. Outputs of features are views, which the next step overwrites."""
        output = self._output_host[:, : header.draws].numpy()
        logprobs = output[1:].view(np.float32)
        return StepOutput(
            output[0].tolist(),
            logprobs[0].tolist(),
            logprobs[1].tolist(),
            logprobs[2].tolist(),
            self._accepted_host[: header.draws].tolist() if header.most_ahead else [],
            self._of_features(header),
        )

    def downloads(self, header: Header) -> list[Callable[[], None]]:
        """The other copies of outputs to the host, on the D2H stream."""
        features, outputs = [feature for feature in self._of_logits if feature.takes_part(header)], self.outputs
        return [copy for feature in features for copy in feature.downloads(header, outputs[feature.name])]

    def _of_features(self, header: Header) -> dict[str, Any]:
        words = {
            feature.name: self._result_host[start : start + feature.output_words(header.tokens)].numpy()
            for feature, start, _ in self._regions
        }
        given = {
            feature.name: feature.read(words.get(feature.name, _NO_WORDS), header, self.outputs[feature.name])
            for feature in self._features
            if feature.takes_part(header)
        }
        return {name: value for name, value in given.items() if value is not None}


class _Region(NamedTuple):
    """The words of a slot's output that one feature writes."""

    feature: OutputFeature
    start: int
    end: int


def _regions(features: Seq[OutputFeature], start: int, tokens: int) -> tuple[list[_Region], int]:
    """The words of each feature that gives any, from `start` on, for steps of `tokens` tokens; and their end.

    Features with a fixed number of words come first, so that a download can end after the words of its step.
    """
    regions = []
    for feature in sorted(features, key=lambda feature: feature.output_words(0) == 0):
        if words := feature.output_words(tokens):
            regions.append(_Region(feature, start, start + words))
            start += words
    return regions, start
