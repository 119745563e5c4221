"""The roster: all sequences of an engine by state, and the only code that gives back a row and its pages.

    waiting     no row, in the queue, or waiting for its group's first member or for newer weights
    prefilling  has a row; its prompt is not all launched
    decoding    has a row; draws a token at every step
    leaving     preempted; its tokens in flight still commit, then it waits again

    start       waiting          --> prefilling
    finish      any state        --> finalized: no plan names it, its last delta is an event
    take_off    prefilling, decoding --> leaving --> waiting
    draw_again  decoding         --> prefilling, in its row
    settle      finalized or leaving, and no step in flight names it: row, pages and what features took are free again

`preemption` chooses the rows to take off. `inflight_refs` rises and falls in the scheduler. `settle` is the only code
that gives back what a sequence has.
"""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain

from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.kv.tier import Fetch
from rollout.engine.messages.requests import RequestKey
from rollout.engine.messages.to_service import Event, Finish
from rollout.engine.schedule.completion_events import Counters, make_delta, make_request_done
from rollout.engine.schedule.fair_queue import PromptOrder
from rollout.engine.schedule.queue_feed import QueueFeed
from rollout.engine.schedule.step_feature import RequestFeature, StepFeature, VariantFeature, of_kind
from rollout.engine.sequence.sequence import Group, Sequence, SequenceState
from trainer_bridge.wire.finish_reasons import FinishReason


class Roster:
    """The host's state of all sequences."""

    def __init__(
        self,
        allocator: PageAllocator,
        max_rows: int,
        version: int,
        clock: Callable[[], float],
        counters: Counters | None = None,
        features: Seq[StepFeature] = (),
    ) -> None:
        self.allocator = allocator
        self.features = features  # optional capabilities
        self.of_requests, self.variants = of_kind(features, RequestFeature), of_kind(features, VariantFeature)
        self._asked = Counter[str]()  # unfinished groups that ask for a feature, by its name
        self.in_step: list[StepFeature] = []  # the features of a step, now
        self._note_asked()
        self.version = version  # weights version
        self.clock = clock
        self.counters = counters or Counters()
        self.events: list[Event] = []  # events not sent to the service yet
        self.groups: dict[RequestKey, Group] = {}
        self.prefilling: list[Sequence] = []  # ordered as their prompts are computed
        self.prompt_order = PromptOrder(self.prefilling)
        self.decoding: list[Sequence] = []
        self.ending: list[Sequence] = []
        self.waiting = 0  # sequences without a row, also while their group's first member is prefilled
        self.feed = QueueFeed(allocator)
        self.free_rows = list(range(max_rows, 0, -1))
        self.max_rows = max_rows

    @property
    def idle(self) -> bool:
        """True when no request is unfinished."""
        return not self.groups

    @property
    def resting(self) -> bool:
        """True when there is nothing to do before the weights change or a command comes."""
        return len(self.feed.early) == len(self.groups)

    @property
    def running(self) -> int:
        """Sequences that hold a row."""
        return self.max_rows - len(self.free_rows)

    def rows_by_rank(self) -> list[int]:
        """Rows that run, by the rank that they are dealt to."""
        ranks = self.allocator.pool.ranks
        if ranks == 1:
            return [len(self.decoding) + len(self.prefilling)]
        counts = Counter(seq.kv.rank for seq in chain(self.decoding, self.prefilling))
        return [counts[rank] for rank in range(ranks)]

    def unfinished(self) -> list[Sequence]:
        """All sequences that are not finalized."""
        return [seq for group in self.groups.values() for seq in group.sequences if not seq.finalized]

    # --- beginnings --------------------------------------------------------------------------------------------------

    def enter(self, group: Group) -> None:
        """Take a request: its sequences wait."""
        self.groups[group.key] = group
        self.waiting += len(group.sequences)
        self.feed.enter(group, self.version)
        self._asked.update(group.asks)
        self._note_asked()

    def asked_by(self, group: Group) -> list[RequestFeature]:
        """The features of a request."""
        return [feature for feature in self.of_requests if feature.in_every_step or feature.name in group.asks]

    def _note_asked(self) -> None:
        self.in_step[:] = [each for each in self.features if each.in_every_step or self._asked[each.name]]

    def first_waiting(self) -> Sequence | None:
        """The first sequence of the queue that every feature lets have a row; it stays in the queue."""
        heads = self.feed.queue.heads()
        for feature in self.variants:
            heads = feature.ready(heads)
        return heads[0] if heads else None

    def start(self, seq: Sequence) -> None:
        """Give a row to the first sequence of the queue, which has got pages."""
        self.feed.take(seq)
        for feature in self.variants:
            feature.admitted(seq)
        seq.row, seq.row_ready, seq.state = self.free_rows.pop(), False, SequenceState.PREFILL
        self.waiting -= 1
        self.allocator.tier.started(seq)
        self.counters.snapshot_loads += seq.kv.snapshots.load_from > 0
        tokens = len(seq.kv.prefill_tokens) - seq.kv.length
        self.prompt_order.admit(seq, tokens)
        if not seq.begun:
            seq.queued.computed = tokens
        group, cached_tokens = seq.group, min(seq.kv.length, seq.prompt_len)
        if not seq.kv.is_offloaded:
            seq.kv.begin_prefill(len(seq.tokens))
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_tokens += cached_tokens
            self.counters.older_tokens += seq.kv.found_older(len(seq.tokens), self.version)
            if seq.kv.hit is not None:
                self.counters.prefix_hits[seq.kv.hit] += 1
        if math.isinf(group.admitted_s):
            group.admitted_s, group.cached_tokens = self.clock(), cached_tokens

    # --- ends --------------------------------------------------------------------------------------------------------

    def end(self, key: RequestKey, reason: FinishReason, error: str | None = None) -> None:
        """End the unfinished completions of a request; unknown keys are ignored (it ended by itself)."""
        group = self.groups.get(key)
        for seq in list(group.sequences) if group else ():
            if not seq.finalized:
                self.finish(seq, Finish(reason, error=error))

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for key in list(self.groups):
            self.end(key, reason, error)

    def end_early(self, reason: FinishReason, error: str | None = None) -> None:
        """End the requests that wait for a newer weights version."""
        for key in list(self.feed.early):
            self.end(key, reason, error)

    def stop_at(self, key: RequestKey, index: int, string: str) -> None:
        """End a completion in whose text the service found a stop string."""
        group = self.groups.get(key)
        if group is not None and not group.sequences[index].finalized:
            self.finish(group.sequences[index], Finish("stop", string))

    def flush(self, key: RequestKey) -> None:
        """Send the present tokens of a request; unknown keys are ignored (it ended by itself)."""
        group = self.groups.get(key)
        for seq in group.sequences if group else ():
            if not seq.finalized and len(seq.tokens) > seq.drawn.flushed:
                self.events.append(make_delta(seq, self.asked_by(seq.group)))

    def fail(self, seq: Sequence, error: str) -> None:
        """End one completion as an error, with its present tokens."""
        self.finish(seq, Finish("error", error=error))

    def finish(self, seq: Sequence, finish: Finish) -> None:
        """Decide the outcome of a sequence: nothing is added to it any more."""
        assert not seq.finalized
        if seq.state is SequenceState.WAITING:
            self.waiting -= 1
        elif seq.state is not SequenceState.LEAVING:
            self._stop_running(seq)
        seq.finish = finish
        self.events.append(make_delta(seq, self.asked_by(seq.group)))
        seq.finalized = True  # set after the last delta: `rescue` relies on it
        group = seq.group
        group.unfinished -= 1
        group.complete += finish.complete
        self.feed.ended(seq)
        if group.unfinished == 0:
            self.events.append(make_request_done(group, self.clock(), self.asked_by(group)))
            del self.groups[group.key]
            self._asked.subtract(group.asks)
            self._note_asked()
            self.feed.early.pop(group.key, None)
        self.settle(seq)
        if finish.complete and group.complete == group.request.min_complete:
            self.end(group.key, "cancelled")

    def rescue(self, message: str) -> list[Event]:
        """After a fault: the events that were due, and the events that end every request as `error` with its tokens.

        A fault may come anywhere, so the books may be half-way: this reads the sequences' tokens, and their experts
        where they are asked for, and gives no row or page back. The roster is thrown away afterwards; a second call
        gives no events. Two rules make the tokens trustworthy: a commit writes a token's version run last, so tokens
        beyond the runs are not whole; and `finalized` is set after the last delta was made, so no client was sent the
        end of a sequence that is not finalized.
        """
        events, self.events = self.events, []
        groups, self.groups = self.groups, {}
        now_s = self.clock()
        for group in groups.values():
            for seq in group.sequences:
                if not seq.finalized:
                    seq.drawn.drop_torn_token()
                    seq.finish = Finish("error", error=message)
                    events.append(make_delta(seq, self.asked_by(seq.group)))
                    seq.finalized = True
            events.append(make_request_done(group, now_s, self.asked_by(group)))
        return events

    # --- rows --------------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's row because pages are short; it continues later, with its KV if that can be kept."""
        self.counters.preemptions += 1
        seq.group.preemptions += 1
        self.take_off(seq, offload=True)

    def take_off(self, seq: Sequence, offload: bool = False) -> None:
        """Take a sequence out of its row; it waits for a new row once its tokens in flight are committed."""
        if offload:
            self.allocator.tier.preempted(seq)
        self._stop_running(seq)
        seq.state = SequenceState.LEAVING
        self.ending.append(seq)
        self.settle(seq)

    def draw_again(self, seq: Sequence) -> None:
        """The row draws the token after the committed ones again: the KV stays, and the state is set up anew."""
        seq.drop_launched()
        if seq.state is not SequenceState.DECODE:
            return  # the sequence leaves its row and will be set up anew in any case
        self.decoding.remove(seq)
        seq.kv.prefill_tokens, seq.kv.drawn_again = seq.history(), True
        seq.row_ready, seq.state = False, SequenceState.PREFILL
        self.prefilling.insert(0, seq)  # first of all prompts, as it is one token

    def settle(self, seq: Sequence) -> None:
        """Give row and pages back if nothing needs them; the only place that does."""
        assert 0 <= seq.inflight_refs <= 2
        if seq.inflight_refs > 0 or self.allocator.tier.holds_back(seq):
            return
        if seq.finalized:
            self.allocator.keep_turn(seq, self.version, self.clock())
        if seq.row:
            self.free_rows.append(seq.row)
            seq.row = 0
        for feature in self.features:
            if feature.in_every_step or feature.name in seq.group.asks:
                feature.left(seq)
        self.allocator.release(seq)
        if seq.state is SequenceState.LEAVING:
            self.ending.remove(seq)
            seq.state = SequenceState.WAITING
            if not seq.finalized:
                self.waiting += 1
                self.feed.queue.push(seq)

    def restores_ended(self, seqs: list[Sequence]) -> None:
        """Settle these sequences, if possible: no copy writes to their pages any more."""
        for seq in seqs:
            if seq.finalized or seq.state is SequenceState.LEAVING:
                self.settle(seq)

    def fetches_ended(self, fetches: Seq[Fetch]) -> None:
        """End the wait of sequences: their KV is in the pool, or will not come."""
        for fetch in fetches:
            self.feed.fetch_ended(fetch)

    def forget_offloaded(self) -> None:
        """Discard offloaded KV: its sequences are computed again."""
        for seq in self.unfinished():
            self.allocator.tier.drop(seq)
        for seq in [seq for seq in self.prefilling if seq.kv.is_offloaded]:
            self.take_off(seq)

    def _stop_running(self, seq: Sequence) -> None:
        (self.decoding if seq.state is SequenceState.DECODE else self.prefilling).remove(seq)
        self.feed.prefill_stopped(seq)

    def check_integrity(self) -> None:
        """Assert that nothing leaked. Call it when no step is in flight and no request is left."""
        self.allocator.check()
        for feature in self.features:
            feature.check()
        assert self.idle and not (self.prefilling or self.decoding or self.ending), "sequences are left"
        assert sorted(self.free_rows) == list(range(1, self.max_rows + 1)), "a row is in use"
        assert self.waiting == 0 and not self.allocator.sharing, "a queue or a shared prompt is left"
        assert not self.feed.joined and not self.feed.has_room_waiters, "a sequence waits for a prefill, or for room"
        assert self.feed.queue.clients == 0, "the queue remembers a client"
