"""Commits the records of steps, and adds experts to what is sent.

Entries of KV from the host go to the pool's pages only when all earlier steps are committed: one of these may still
have to copy from the same page numbers.
"""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from rollout.engine.features.routing.entries import ExpertPages, SequenceExperts
from rollout.engine.kv.tier import PageMirror
from rollout.engine.messages.to_service import DeltaFields
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.step_feature import RequestFeature
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import StepOutput


class RoutingFeature(RequestFeature, PageMirror):
    """The experts of the tokens of one engine."""

    name = "routing"
    in_every_step = True  # a later request may reuse the KV, and ask for its experts

    def __init__(self, entries: ExpertPages) -> None:
        self.entries = entries
        self._unsent: dict[Sequence, SequenceExperts] = {}  # sequences that report their experts
        self._fetched: deque[tuple[int, list[int], np.ndarray]] = deque()  # steps before, pages, entries
        self._launched = self._committed = 0  # steps

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """The step's record has the experts of its tokens."""
        self._committed += 1
        for span in plan.spans if plan.kind == "prefill" else ():
            for copy in span.prompt.copies:
                self.entries.copy(*copy)
        self.entries.take(output.of(self.name, np.ndarray))
        self._put_fetched()

    def launched(self, plan: Plan) -> None:
        """Its commit comes after the commits of all earlier steps."""
        self._launched += 1

    def delta_fields(self, seq: Sequence) -> DeltaFields:
        """The unsent entries."""
        if seq.group.request.routing_from is None:
            return {}
        return {"routing": self._of(seq).unsent(self.entries, seq.kv.pages, seq.consumed)}

    def delta_made(self, seq: Sequence) -> None:
        """The entries count as sent."""
        if seq.finish is not None:
            self._unsent.pop(seq, None)
        elif (experts := self._unsent.get(seq)) is not None:
            experts.sent(seq.consumed)

    def left(self, seq: Sequence) -> None:
        """A preempted sequence takes its entries along: the entries in its pages may be computed again."""
        if seq.group.request.routing_from is not None and not seq.finalized:
            self._of(seq).keep(self.entries, seq.kv.pages, seq.consumed)

    def stow(self, pages: Seq[int], host_pages: Seq[int]) -> None:
        self.entries.stow(list(pages), list(host_pages))

    def fetched(self, host_pages: Seq[int], pages: Seq[int]) -> None:
        self._fetched.append((self._launched, list(pages), self.entries.stowed(list(host_pages))))
        self._put_fetched()

    def beside(self, host_page: int) -> memoryview:
        return self.entries.stowed_bytes(host_page)

    def _put_fetched(self) -> None:
        while self._fetched and self._fetched[0][0] <= self._committed:
            _, pages, entries = self._fetched.popleft()
            self.entries.put(pages, entries)

    def check(self) -> None:
        assert not self._fetched, "experts of restored pages wait for a commit"
        assert not self._unsent, "experts of a sequence that has ended are kept"

    def _of(self, seq: Sequence) -> SequenceExperts:
        if seq not in self._unsent:
            first = seq.group.request.routing_from
            assert first is not None
            self._unsent[seq] = SequenceExperts(first, self.entries.nothing())
        return self._unsent[seq]
