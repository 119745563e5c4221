"""A slot: the buffers and events of one step in flight.

                 host                     device
    input   [words] int32, pinned  -H2D->  [words] int32      one packed upload
    output  [4, rows] int32        <-D2H-  [4, rows] int32    token ids, and three log-probs as float bits
    accepted [rows] int32   <-D2H-  the same                  of verify steps, after the output; with speculation
    guesses [rows, G] int32 <-D2H-  the same                  after these; where the device guesses
    experts [tokens, words] int32  <-D2H-  the same           of its tokens, after these; where they are kept

    h2d_done   the upload has arrived          start  compute begins (recorded after the wait on the upload)
    d2h_done   the outputs are on the host     end    compute is over; the D2H copy waits for it

`masks` and `scores` hold what only some steps have. A step with constrained rows has two parts, and the second waits
for their masks: start, forward_end, draw_start, end.

Where kernels wait for other ranks, the flag of a wait in vain comes with the outputs. It is copied after the step, so
it is set if the step waited in vain.

A slot is taken from acquire until the commit that read its host outputs has returned; nothing else writes to its
buffers in between.
"""

from __future__ import annotations

import numpy as np
import torch

from rollout.engine.device.streams import Device
from rollout.engine.messages import RoutingShape
from rollout.engine.step.expert_trace import StepExperts, record_words
from rollout.engine.step.masks import StepMasks
from rollout.engine.step.scores import StepScores
from rollout.engine.step_output import StepOutput
from rollout.engine.upload import Header, Staging, StepInput, Upload

OUTPUT_FIELDS = 4


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
        speculates: bool = False,
        fault: torch.Tensor | None = None,
        guesses: int = 0,
    ) -> None:
        """Buffers for steps of up to `max_rows` rows, drafts included; `speculates` if there may be any.

        `guesses` are those of the device for each row. `fault` is the flag of the tensor group's peer buffers
        (`PeerBuffers.fault`), if it has them.
        """
        self.staging = Staging(device.host_buffer((upload_words,), torch.int32))
        self.input = torch.zeros(upload_words, dtype=torch.int32, device=device.torch_device)
        output_words = OUTPUT_FIELDS * max_rows
        accepted_end = output_words + (max_rows if speculates else 0)
        words = self._output_words = accepted_end + max_rows * guesses
        more = record_words(routing, max(max_rows, chunk_tokens))
        self._result = torch.zeros(words + more, dtype=torch.int32, device=device.torch_device)
        self._result_host = device.host_buffer((words + more,), torch.int32)
        self.output = self._result[:output_words].view(OUTPUT_FIELDS, max_rows)
        self._output_host = self._result_host[:output_words].view(OUTPUT_FIELDS, max_rows)
        self.accepted = self._result[output_words:accepted_end]
        self._accepted_host = self._result_host[output_words:accepted_end]
        self.guesses = self._result[accepted_end:words].view(max_rows, guesses)
        self._guesses_host = self._result_host[accepted_end:words].view(max_rows, guesses)
        self.experts = None if routing is None else StepExperts(routing, self._result[words:])
        self._token_words = record_words(routing, 1)
        self._fault = fault
        self._fault_host = None if fault is None else device.host_buffer((1,), torch.int32)
        self.h2d_start, self.h2d_done = device.event(), device.event()
        self.start, self.end = device.event(), device.event()
        self.d2h_start, self.d2h_done = device.event(), device.event()
        self.masks = StepMasks(device, max_rows, vocab)
        self.scores = StepScores(device, max_rows, chunk_tokens, vocab)
        self.forward_end, self.draw_start = device.event(), device.event()  # of a step whose draw waits for masks
        #: Logits and rows between the two parts of such a step; on the compute stream.
        self.forwarded: tuple[torch.Tensor, torch.Tensor] | None = None

    def input_for(self, upload: Upload) -> StepInput:
        """Where an upload goes on the device."""
        return StepInput(upload.header, self.input[: len(upload.words)])

    def download(self, header: Header) -> None:
        """Copy the outputs of a step to the host; on the D2H stream."""
        if self.experts is None:
            self._result_host.copy_(self._result, non_blocking=True)
        else:
            words = self._output_words + self._token_words * header.tokens
            self._result_host[:words].copy_(self._result[:words], non_blocking=True)
        if self._fault is not None and self._fault_host is not None:
            self._fault_host.copy_(self._fault, non_blocking=True)

    @property
    def lost_rank(self) -> int | None:
        """The rank for which a kernel of this device waited in vain, before the outputs were copied; None if none."""
        fault = 0 if self._fault_host is None else int(self._fault_host)
        return fault - 1 if fault else None

    def read(self, header: Header) -> StepOutput:
        """The outputs that have arrived. `experts` is a view, which the next step overwrites."""
        output = self._output_host[:, : header.draws].numpy()
        logprobs = output[1:].view(np.float32)
        scores = None
        if header.tops or header.scored:
            asked = {"ranked": header.ranked, "prompt_tops": header.prompt_tops}
            scores = self.scores.read(header.tops, header.scored, **asked)
        return StepOutput(
            output[0].tolist(),
            logprobs[0].tolist(),
            logprobs[1].tolist(),
            logprobs[2].tolist(),
            scores,
            self._accepted_host[: header.draws].tolist() if header.drafts else None,
            self._experts_host(header.tokens),
            self._guesses_host[: header.draws].tolist() if header.guesses > 0 else None,
        )

    def _experts_host(self, tokens: int) -> np.ndarray | None:
        if self.experts is None:
            return None
        words = self._result_host[self._output_words : self._output_words + self._token_words * tokens]
        return words.view(tokens, self._token_words).numpy()
