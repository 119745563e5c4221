"""Who runs next, and what became of what ran.

    submit/cancel/...   commands change the host's state only
    plan()              the next step as plain data
    launched(plan)      the step is in flight: refs go up, positions advance
    commit(plan, out)   the step's tokens are here: refs go down, tokens are kept or, for zombies, dropped

Rules that keep it right (tests/engine/test_invariants.py breaks each):
- `inflight_refs` rises in `launched` and falls in `_landed`, nowhere else.
- `_settle` is the one place where row and pages of a sequence go back: finalized or LEAVING, and refs 0.
- A row whose last allowed token is in flight is not planned again.
- Admission takes the prompt's pages and one more, never those of `max_tokens`; when pages run out, the lowest
  priority, then the youngest, is preempted and starts again from its tokens, or from its KV where that is parked.
- Prefill and decode steps alternate while there is both, so that no decode waits longer than one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.engine.kv.memory import SequenceMemory
from rollout.engine.messages import Event, Finish, FinishReason, Request, RequestKey
from rollout.engine.schedule.admission import Deadlines, SchedulerLimits, refusal
from rollout.engine.schedule.completion import NOT_FINITE, Counters, make_delta, make_request_done
from rollout.engine.schedule.plan import Plan, PromptChunk, StepOutput, decode_plan, next_chunks, prefill_plan
from rollout.engine.schedule.preemption import Changes
from rollout.engine.schedule.queue import WaitingRoom
from rollout.engine.schedule.sequence import Group, Sequence, State
from rollout.engine.schedule.shortage import Shortage
from rollout.engine.step.top_logprobs import note_scores
from rollout.models.adapters import AdapterWeights


class Scheduler:
    """The host's state of all sequences."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: SequenceMemory,
        version: int,
        clock: Callable[[], float],
        upload_words: Callable[[Sequence, int], int] = lambda seq, length: 0,
        counters: Counters | None = None,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.version = version
        self.clock = clock
        self.counters = counters or Counters()
        self.events: list[Event] = []  # what the service has not been told yet
        self.groups: dict[RequestKey, Group] = {}
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.waiting = 0  # sequences with no row, those that wait for their leader included
        self._room = room = WaitingRoom(memory)
        self._free_rows = list(range(limits.max_rows, 0, -1))
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._last_kind = "decode"
        self._upload_words = upload_words
        decoding, prefilling = self.decoding, self.prefilling
        self._shortage = Shortage(memory, decoding, prefilling, self.leaving, lambda seq: self._preempt(seq))
        self._changes = Changes(memory, room, self.groups, decoding, prefilling, self._take_off, self._finish)
        self._refused: Sequence | None = None  # did not fit, with so many running and so many pages available
        self._refused_at = (0, 0)

    # --- commands ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, or emit `Rejected`."""
        assert request.key not in self.groups, "the service keeps keys unique"
        pool_tokens = self.memory.pool.total * self.memory.page_size
        busy = self.memory.sessions.turn_of(request) in self.groups
        known = {} if self.memory.adapters is None else self.memory.adapters.known
        if (rejected := refusal(request, self.limits, pool_tokens, self.waiting, known, busy)) is not None:
            self.events.append(rejected)
            return
        adapter = None if request.adapter is None else known[request.adapter]
        now = self.clock()
        session = self.memory.sessions.begin(request)
        group = Group(request, arrived_s=now, unfinished=request.n, session=session, adapter=adapter)
        group.expect_prompt_logprobs()
        for index in range(request.n):
            self._arrivals += 1
            group.sequences.append(Sequence(group, index, self._arrivals))
        self.groups[request.key] = group
        self.waiting += request.n
        self._room.enter(group, self.version)
        if request.deadline_s is not None:
            self._deadlines.add(now + request.deadline_s, group)

    def end(self, key: RequestKey, reason: FinishReason, error: str | None = None) -> None:
        """End what is unfinished of a request; unknown keys are ignored (it ended by itself)."""
        group = self.groups.get(key)
        for seq in list(group.sequences) if group else ():
            if not seq.finalized:
                self._finish(seq, Finish(reason, error=error))

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request."""
        for key in list(self.groups):
            self.end(key, reason, error)

    def end_early(self, reason: FinishReason, error: str | None = None) -> None:
        """End the requests that wait for a newer weights version."""
        for key in list(self._room.early):
            self.end(key, reason, error)

    def stop_at(self, key: RequestKey, index: int, string: str) -> None:
        """A stop string was found in a completion's text."""
        group = self.groups.get(key)
        if group is not None and not group.sequences[index].finalized:
            self._finish(group.sequences[index], Finish("stop", string))

    def fail(self, seq: Sequence, error: str) -> None:
        """End one completion as an error, with what it has."""
        self._finish(seq, Finish("error", error=error))

    def end_overdue(self) -> None:
        """End requests whose deadline has passed, and sessions whose lease is over."""
        now = self.clock()
        for group in self._deadlines.take_overdue(now):
            self.end(group.key, "deadline")
        self.memory.sessions.expire(now)

    def weights_changed(self, version: int, recompute: bool) -> None:
        """Steps planned from now on run under `version`; with `recompute` running rows start again."""
        self.version = version
        self._refused = None
        self._changes.weights(version, recompute)

    def put_adapter(self, name: str, version: int | None, weights: AdapterWeights, recompute: bool) -> None:
        """Have an adapter; steps planned from now on run with it. Raises AdapterError where it cannot be taken."""
        self._refused = None
        self._changes.put_adapter(name, version, weights, recompute)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Raises AdapterError where there is none, or a request names it."""
        self._changes.drop_adapter(name)

    def forget_parked(self) -> None:
        """KV that was kept of preempted sequences is of no use: they are computed again."""
        self._changes.forget_parked()

    def leave_pool(self, keep: bool) -> None:
        """All KV leaves the pool: rows wait for a row again, with `keep` to go on with what the host has room for."""
        self._refused = None
        self._changes.leave_pool(keep)

    def came_back(self, seqs: list[Sequence]) -> None:
        """No copy writes to the pages of these sequences any more."""
        for seq in seqs:
            if seq.finalized or seq.state is State.LEAVING:
                self._settle(seq)

    # --- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        self._admit()
        if self._last_kind == "decode":
            plan = self._plan_prefill() or self._plan_decode()
        else:
            plan = self._plan_decode() or self._plan_prefill()
        if plan is not None:
            self._last_kind = plan.kind
        return plan

    @property
    def idle(self) -> bool:
        """True when no request is unfinished."""
        return not self.groups

    @property
    def resting(self) -> bool:
        """True when there is nothing to do before the weights change or a command comes."""
        return len(self._room.early) == len(self.groups)

    @property
    def running(self) -> int:
        """Sequences that hold a row."""
        return self.limits.max_rows - len(self._free_rows)

    def _admit(self) -> None:
        queue, ready = self._room.queue, self.memory.adapter_ready
        while self._free_rows and not self.leaving and (seq := queue.first(ready)) is not None:
            if seq.group.session is not None and seq.group.session.turns > 1:
                return  # the turn before is in flight as a zombie
            # A page for each row that runs stays free: otherwise the newcomer is preempted as soon as they grow.
            running, available = len(self.decoding) + len(self.prefilling), self.memory.available
            if self._refused is seq and running >= self._refused_at[0] and available <= self._refused_at[1]:
                return  # nothing came free since it did not fit
            if not self.memory.try_admit(seq, self.version, spare=running):
                self._refused, self._refused_at = seq, (running, self.memory.available)  # sessions may have lost theirs
                if running or not self.memory.sharing:
                    return
                self.memory.close_share(self.memory.sharing[0])  # nothing runs that could give pages back
                self._refused = None
                continue
            self._refused = None
            queue.pop(seq)
            seq.row, seq.row_ready, seq.state = self._free_rows.pop(), False, State.PREFILL
            self.prefilling.append(seq)
            self.waiting -= 1
            self._note_admitted(seq)

    def _note_admitted(self, seq: Sequence) -> None:
        group = seq.group
        seq.note_adapter()
        if seq.parked is None:
            seq.begin_prefill()
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_tokens += min(seq.kv_len, seq.prompt_len)
        if group.admitted_s is None:
            group.admitted_s, group.cached_tokens = self.clock(), min(seq.kv_len, seq.prompt_len)
        self._room.started(seq)

    def _plan_prefill(self) -> Plan | None:
        most = self.limits.chunk_tokens, self.limits.upload_words
        chunks = next_chunks(self.prefilling, *most, self._upload_words, self.memory.page_size)
        return prefill_plan(chunks, self.version) if chunks else None

    def _plan_decode(self) -> Plan | None:
        seqs = [seq for seq in self.decoding if seq.launched < seq.max_tokens]
        full = [seq for seq in seqs if seq.kv_len == seq.kv_capacity]
        if full:
            self._shortage.grow(full)
            seqs = [seq for seq in seqs if seq.state is State.DECODE and seq.kv_len < seq.kv_capacity]
        return decode_plan(seqs, self.version, self.memory.page_size) if seqs else None

    # --- launch and commit -------------------------------------------------------------------------------------------

    def launched(self, plan: Plan) -> None:
        """The step is in flight."""
        version = plan.version
        if plan.kind == "decode":
            for seq in plan.seqs:
                seq.inflight_refs += 1
                seq.launched += 1
                position = seq.kv_len
                if position == seq.kv_uniform and version == seq.kv_version:
                    seq.kv_uniform = position + 1
                seq.kv_len = position + 1
        else:
            for chunk in plan.chunks:
                self._chunk_launched(chunk, version)

    def _chunk_launched(self, chunk: PromptChunk, version: int) -> None:
        seq = chunk.seq
        seq.inflight_refs += 1
        seq.row_ready = True
        seq.note_kv(chunk.start, chunk.start + chunk.length, version)
        seq.kv_len += chunk.length
        self.memory.chunk_launched(seq, version)
        if not chunk.final:
            return
        seq.launched += 1
        seq.prefill_tokens = None
        seq.state = State.DECODE
        seq.check_at = 0
        self.prefilling.remove(seq)
        self.decoding.append(seq)
        if seq is seq.group.leader:
            seq.group.prompt_due = False
            self._room.leader_launched(seq, self.version)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Take a step's tokens; steps are committed in the order of their launch."""
        if output.scores is not None:
            note_scores(plan, output.scores)
        if output.record is not None:
            self.memory.note_experts(plan, output.record)
        if plan.kind == "decode":
            self._landed(plan.seqs, output, plan.version)
            self.counters.decode_rows += len(plan.seqs)
            return
        sampled = [chunk.seq for chunk in plan.chunks if chunk.final]
        self._landed([chunk.seq for chunk in plan.chunks if not chunk.final], None, plan.version)
        self._landed(sampled, output, plan.version)
        now = self.clock()
        for seq in sampled:
            if seq.group.first_token_s is None:
                seq.group.first_token_s = now

    def _landed(self, seqs: list[Sequence], output: StepOutput | None, version: int) -> None:
        for i, seq in enumerate(seqs):
            seq.inflight_refs -= 1
            if seq.finalized:
                self.counters.zombie_rows += output is not None
                self._settle(seq)
                continue
            if output is not None and output.logprobs[i] != output.logprobs[i]:
                self._finish(seq, Finish("error", error=NOT_FINITE))
            elif output is not None:
                token, versions = output.tokens[i], seq.versions
                same_version = bool(versions) and versions[-1][0] == version
                if not same_version and seq.too_old_for(version):
                    self._finish(seq, Finish("stale"))
                    continue
                seq.tokens.append(token)
                seq.logprobs.append(output.logprobs[i])
                seq.raw_logprobs.append(output.raw_logprobs[i])
                if seq.drawn_logprobs is not None:
                    seq.drawn_logprobs.append(output.drawn_logprobs[i])
                if same_version:  # last: `rescue` tells by them whether a token is whole
                    versions[-1][1] += 1
                else:
                    versions.append([version, 1])
                    seq.note_version(version)
                self.counters.tokens += 1
                if token in seq.stop_ids or len(seq.tokens) >= seq.check_at:
                    self._examine(seq, token)
            if seq.state is State.LEAVING:
                self._settle(seq)

    def _examine(self, seq: Sequence, token: int) -> None:
        """A token that may end its sequence, or after which something is due."""
        count, request = len(seq.tokens), seq.group.request
        if token in seq.stop_ids and count > request.stop.min_tokens:
            self._finish(seq, Finish("stop", token))
        elif count >= seq.max_tokens:
            self._finish(seq, Finish("length"))
        else:
            if request.stream_every and count - seq.flushed >= request.stream_every:
                self.events.append(make_delta(seq, self.memory.experts))
            known = seq.prompt_len + count - 1  # the KV of the newest token is not written yet
            self.memory.remember(seq, known, self.version)
            next_page = count + self.memory.page_size - known % self.memory.page_size
            next_delta = seq.flushed + request.stream_every if request.stream_every else seq.max_tokens
            seq.check_at = min(seq.max_tokens, next_delta, next_page)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, seq: Sequence, finish: Finish) -> None:
        assert not seq.finalized
        if seq.state is State.WAITING:
            self.waiting -= 1
        elif seq.state is not State.LEAVING:
            self._running_list(seq).remove(seq)
        seq.finish = finish
        self.events.append(make_delta(seq, self.memory.experts))
        seq.finalized = True  # after its last delta: `rescue` relies on it
        seq.tops = None  # told; its group may go on for long
        group = seq.group
        group.unfinished -= 1
        group.complete += finish.complete
        self._room.ended(seq)
        if group.unfinished == 0:
            self.events.append(make_request_done(group, self.clock()))
            del self.groups[group.key]
            self._room.early.pop(group.key, None)
        self._settle(seq)
        if finish.complete and group.complete == group.request.min_complete:
            self.end(group.key, "cancelled")

    def _preempt(self, seq: Sequence) -> None:
        self.counters.preemptions += 1
        seq.group.preemptions += 1
        seq.keeps_kv = seq.row_ready or seq.parked is not None
        self._take_off(seq)

    def _take_off(self, seq: Sequence) -> None:
        """No plan names the sequence any more; it starts again once its tokens in flight are committed."""
        self._running_list(seq).remove(seq)
        seq.state = State.LEAVING
        self.leaving.append(seq)
        self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Give row and pages back if nothing needs them; the only place that does."""
        assert 0 <= seq.inflight_refs <= 2
        if seq.inflight_refs > 0 or (seq.parked is not None and self.memory.still_arriving(seq)):
            return
        if seq.row:
            self._free_rows.append(seq.row)
            seq.row = 0
        if seq.finalized and seq.group.session is not None:
            self.memory.keep_turn(seq, self.version, self.clock())
        self.memory.release(seq)
        if seq.state is State.LEAVING:
            self.leaving.remove(seq)
            seq.state = State.WAITING
            if not seq.finalized:
                self.waiting += 1
                self._room.queue.push(seq)

    def _running_list(self, seq: Sequence) -> list[Sequence]:
        return self.decoding if seq.state is State.DECODE else self.prefilling

    def check_integrity(self) -> None:
        """Assert that nothing leaked. Call it when no step is in flight and no request is left."""
        self.memory.check()
        assert self.idle and not (self.prefilling or self.decoding or self.leaving), "sequences are left"
        assert sorted(self._free_rows) == list(range(1, self.limits.max_rows + 1)), "a row is in use"
        assert self.waiting == 0 and not self.memory.sharing, "a queue or a share is left"
