"""Who runs next, and what became of what ran.

    submit/cancel/...   commands change the host's state only
    plan()              the next step as plain data
    launched(plan)      the step is in flight: refs go up, positions advance
    commit(plan, out)   the step's tokens have arrived: refs go down, tokens are kept or, for zombies, dropped

Rules that keep it right (tests/engine/test_invariants.py breaks each):
- `inflight_refs` rises in `launched` and falls in `commit`, nowhere else.
- `Roster.settle` is the one place where row and pages of a sequence go back: finalized or LEAVING, and refs 0.
- A row whose last allowed token is in flight is not planned again.
- Admission takes the prompt's pages and one more, never those of `max_tokens`; when pages run out, the lowest
  priority, then the youngest, is preempted and starts again from its tokens, or from its KV where that is offloaded.
- Steps of prompts and of decode rows alternate while there are both, so that no decode waits longer than one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.kv.sequence_kv import Prefill
from rollout.engine.messages import Finish, Request, RequestKey
from rollout.engine.schedule import preemption
from rollout.engine.schedule.admission import Deadlines, SchedulerLimits, refusal
from rollout.engine.schedule.completion import NOT_FINITE, Counters, make_delta
from rollout.engine.schedule.plan import Plan, decode_spans, make_plan, prompt_spans
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.sequence import Group, Sequence, State
from rollout.engine.step.scores import Scores
from rollout.engine.step.slot import StepOutput
from rollout.models.lora_slots import AdapterWeights


class Scheduler(Roster):
    """The roster, with the commands that change it, the plans that it makes, and the steps that come back to it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: PageAllocator,
        version: int,
        clock: Callable[[], float],
        upload_words: Callable[[Sequence, int], int] = lambda seq, length: 0,
        counters: Counters | None = None,
    ) -> None:
        super().__init__(allocator, limits.max_rows, version, clock, counters)
        self.limits = limits
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._last_kind = "decode"
        self._upload_words = upload_words
        self._refused: Sequence | None = None  # did not fit, with the counts of `_refused_at`
        self._refused_at = (0, 0)  # (sequences running, pages available)

    # --- commands ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, or emit `Rejected`."""
        assert request.key not in self.groups, "the service keeps keys unique"
        pool_tokens = self.allocator.pool.total * self.allocator.page_size
        busy = self.allocator.sessions.turn_of(request) in self.groups
        known = {} if self.allocator.adapters is None else self.allocator.adapters.known
        if (rejected := refusal(request, self.limits, pool_tokens, self.waiting, known, busy)) is not None:
            self.events.append(rejected)
            return
        adapter = None if request.adapter is None else known[request.adapter]
        now = self.clock()
        session = self.allocator.sessions.begin(request)
        group = Group(request, arrived_s=now, unfinished=request.n, session=session, adapter=adapter)
        group.expect_prompt_logprobs()
        for index in range(request.n):
            self._arrivals += 1
            group.sequences.append(Sequence(group, index, self._arrivals))
        self.groups[request.key] = group
        self.waiting += request.n
        self.room.enter(group, self.version)
        if request.deadline_s is not None:
            self._deadlines.add(now + request.deadline_s, group)

    def stop_at(self, key: RequestKey, index: int, string: str) -> None:
        """A stop string was found in a completion's text."""
        group = self.groups.get(key)
        if group is not None and not group.sequences[index].finalized:
            self.finish(group.sequences[index], Finish("stop", string))

    def end_overdue(self) -> None:
        """End requests whose deadline has passed, and sessions whose lease is over."""
        now = self.clock()
        for group in self._deadlines.take_overdue(now):
            self.end(group.key, "deadline")
        self.allocator.sessions.expire(now)

    def weights_changed(self, version: int, recompute: bool) -> None:
        """Steps planned from now on run under `version`; with `recompute` running rows start again."""
        self._refused = None
        preemption.change_weights(self, version, recompute)

    def put_adapter(self, name: str, version: int | None, weights: AdapterWeights, recompute: bool) -> None:
        """Take an adapter; steps planned from now on run with it. Raises AdapterError where it cannot be taken."""
        self._refused = None
        preemption.put_adapter(self, name, version, weights, recompute)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Raises AdapterError if it is not loaded, or if a request names it."""
        preemption.drop_adapter(self, name)

    def forget_offloaded(self) -> None:
        """Offloaded KV is of no use: its sequences are computed again."""
        preemption.forget_offloaded(self)

    def leave_pool(self, keep: bool) -> None:
        """All KV leaves the pool: rows wait for a row again, with `keep` to go on with KV that the host holds."""
        self._refused = None
        preemption.leave_pool(self, keep)

    # --- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        self._admit()
        if self._last_kind == "decode":
            plan = self._plan_prompts() or self._plan_decode()
        else:
            plan = self._plan_decode() or self._plan_prompts()
        if plan is not None:
            self._last_kind = plan.kind
        return plan

    @property
    def resting(self) -> bool:
        """True when there is nothing to do before the weights change or a command comes."""
        return len(self.room.early) == len(self.groups)

    def _admit(self) -> None:
        queue, ready = self.room.queue, self.allocator.adapter_ready
        while self.free_rows and not self.leaving and (seq := queue.first(ready)) is not None:
            if seq.group.session is not None and seq.group.session.turns > 1:
                return  # the turn before is in flight as a zombie
            # A page for each row that runs stays free: otherwise the newcomer is preempted as soon as they grow.
            running, available = len(self.decoding) + len(self.prefilling), self.allocator.available
            if self._refused is seq and running >= self._refused_at[0] and available <= self._refused_at[1]:
                return  # nothing came free since it did not fit
            if not self.allocator.try_admit(seq, self.version, spare=running):
                self._refused = seq
                self._refused_at = running, self.allocator.available  # sessions may have lost their pages
                if running or not self.allocator.sharing:
                    return
                self.allocator.close_share(self.allocator.sharing[0])  # nothing runs that could give pages back
                self._refused = None
                continue
            self._refused = None
            queue.pop(seq)
            seq.row, seq.row_ready, seq.state = self.free_rows.pop(), False, State.PREFILL
            self.prefilling.append(seq)
            self.waiting -= 1
            self._note_admitted(seq)

    def _note_admitted(self, seq: Sequence) -> None:
        group = seq.group
        seq.adapter_use.note_version(seq.launched)
        if seq.kv.offloaded is None:
            seq.kv.begin_prefill(len(seq.tokens))
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_tokens += min(seq.kv.length, seq.prompt_len)
        if group.admitted_s is None:
            group.admitted_s, group.cached_tokens = self.clock(), min(seq.kv.length, seq.prompt_len)
        self.room.started(seq)

    def _plan_prompts(self) -> Plan | None:
        if not self.prefilling:
            return None
        most = self.limits.chunk_tokens, self.limits.upload_words
        spans = prompt_spans(self.prefilling, *most, self._upload_words, self.allocator.page_size)
        return make_plan(spans, self.version, self.allocator.page_size) if spans else None

    def _plan_decode(self) -> Plan | None:
        seqs = [seq for seq in self.decoding if seq.launched < seq.max_tokens]
        full = [seq for seq in seqs if seq.kv.length == seq.kv.capacity]
        if full:
            preemption.grow(self, full)
            seqs = [seq for seq in seqs if seq.state is State.DECODE and seq.kv.length < seq.kv.capacity]
        return make_plan(decode_spans(seqs), self.version, self.allocator.page_size) if seqs else None

    # --- launch and commit -------------------------------------------------------------------------------------------

    def launched(self, plan: Plan) -> None:
        """The step is in flight."""
        version = plan.version
        for seq, start, tokens_in, draws, prompt in plan.spans:
            end = start + tokens_in
            seq.inflight_refs += 1
            seq.launched += draws
            kv = seq.kv
            if start == kv.uniform and version == kv.version:
                kv.uniform = end
            kv.length = end
            if prompt is not None:
                self._prompt_launched(seq, start, end, draws, version)

    def _prompt_launched(self, seq: Sequence, start: int, end: int, draws: int, version: int) -> None:
        seq.row_ready = True
        seq.kv.note_prefill(start, end, Prefill(len(seq.tokens), version, seq.adapter_use.edition), seq.consumed)
        self.allocator.chunk_launched(seq, version)
        if not draws:
            return
        seq.kv.prefill_tokens = None
        seq.state = State.DECODE
        seq.check_at = 0
        self.prefilling.remove(seq)
        self.decoding.append(seq)
        if seq is seq.group.leader:
            seq.group.prompt_due = False
            self.room.leader_launched(seq, self.version)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Take a step's tokens; steps are committed in the order of their launch."""
        if output.scores is not None:
            note_scores(plan, output.scores)
        if output.experts is not None:
            self.allocator.note_experts(plan, output.experts)
        tokens, logprobs, raw_logprobs = output.tokens, output.logprobs, output.raw_logprobs
        version, counters, leaving = plan.version, self.counters, State.LEAVING
        at = -1  # place of a row's token in the output
        for seq, _, _, draws, _ in plan.spans:
            at += draws
            seq.inflight_refs -= 1
            if seq.finalized:
                counters.zombie_rows += draws
                self.settle(seq)
                continue
            if not draws:
                pass
            elif (logprob := logprobs[at]) != logprob:
                self.fail(seq, NOT_FINITE)
            else:
                token, drawn = tokens[at], seq.drawn
                so_far, runs = drawn.tokens, drawn.versions
                run = runs[-1] if runs else None
                if run is None or run[0] != version:  # the token begins a run
                    if drawn.too_old_for(version):
                        self.finish(seq, Finish("stale"))
                        continue
                    run = None
                so_far.append(token)
                drawn.logprobs.append(logprob)
                drawn.raw_logprobs.append(raw_logprobs[at])
                if drawn.drawn_logprobs is not None:
                    drawn.drawn_logprobs.append(output.drawn_logprobs[at])
                if run is not None:  # last: `rescue` tells by the runs whether a token is whole
                    run[1] += 1
                else:
                    runs.append([version, 1])
                    drawn.note_version(version)
                counters.tokens += 1
                if token in seq.stop_ids or len(so_far) >= seq.check_at:
                    self._examine(seq, token)
            if seq.state is leaving:
                self.settle(seq)
        if plan.kind == "decode":
            counters.decode_rows += plan.rows
        else:
            self._note_first_tokens(plan)

    def _examine(self, seq: Sequence, token: int) -> None:
        """A token that may end its sequence, or after which something is due."""
        drawn, request = seq.drawn, seq.group.request
        count = len(drawn.tokens)
        if token in seq.stop_ids and count > request.stop.min_tokens:
            self.finish(seq, Finish("stop", token))
        elif count >= seq.max_tokens:
            self.finish(seq, Finish("length"))
        else:
            if request.stream_every and count - drawn.flushed >= request.stream_every:
                self.events.append(make_delta(seq, self.allocator.experts))
            known = seq.prompt_len + count - 1  # the KV of the newest token is not written yet
            self.allocator.remember(seq, known, self.version)
            next_page = count + self.allocator.page_size - known % self.allocator.page_size
            next_delta = drawn.flushed + request.stream_every if request.stream_every else seq.max_tokens
            seq.check_at = min(seq.max_tokens, next_delta, next_page)

    def _note_first_tokens(self, plan: Plan) -> None:
        now = self.clock()
        for seq in plan.sampled:
            if seq.group.first_token_s is None:
                seq.group.first_token_s = now


def note_scores(plan: Plan, scores: Scores) -> None:
    """Give a step's scores to completions and groups; before its tokens are taken."""
    sampled = plan.sampled if scores.places else []
    for place, ids_K, logprobs_K in zip(scores.places, scores.top_ids_CK, scores.top_logprobs_CK, strict=True):
        seq = sampled[place]
        if not seq.finalized:
            tops = seq.drawn.tops
            assert tops is not None and len(tops) == len(seq.tokens), "a position has one entry"
            tops.add(ids_K, logprobs_K)
    taken = 0
    for seq, start, _, _, prompt in plan.spans if len(scores.prompt_N) else ():
        logprobs = seq.group.prompt_logprobs
        if prompt is not None and prompt.scored and logprobs is not None:
            if start == 0:
                logprobs[:] = np.nan  # an earlier prefill may have left values of other weights
            logprobs[start + 1 : start + 1 + prompt.scored] = scores.prompt_N[taken : taken + prompt.scored]
            taken += prompt.scored
