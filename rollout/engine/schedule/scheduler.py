"""Plans the next step, and takes the results of steps.

    submit(request)     a request enters the roster, or is refused
    plan()              the next step as plain data
    launched(plan)      the step is in flight: refs go up, positions advance
    commit(plan, out)   the step's tokens have arrived: refs go down, tokens are kept or, for zombies, dropped

The sequences are in the roster. Commands that end sequences go there directly; changes of the weights and sleep go to
`preemption`.

Rules that keep it right:
- `inflight_refs` rises in `launched` and falls in `commit`, nowhere else.
- `Roster.settle` is the one place where row and pages of a sequence go back: finalized or LEAVING, and refs 0.
- A row whose last allowed token is in flight is not planned again.
- When pages run out, a sequence is preempted (`preemption` says which) and starts again from its tokens, or from its KV
  where that is offloaded.
- Steps of prompts and of decode rows alternate while there are both, so that no decode waits longer than one chunk.
"""

import math
from bisect import insort
from collections.abc import Callable

from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_service import Finish, Rejected
from rollout.engine.schedule import preemption
from rollout.engine.schedule.admission import Deadlines, SchedulerLimits, admit, refusal, untaken
from rollout.engine.schedule.completion_events import NOT_FINITE, make_delta
from rollout.engine.schedule.plan import Plan, PromptPart, Span, decode_spans, make_plan
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import AheadPlanner, find_feature
from rollout.engine.sequence.sequence import Group, Sequence, SequenceState
from rollout.engine.sequence.sequence_kv import NO_TOKENS, Prefill
from rollout.engine.upload import RowNeeds, StepOutput

_CONSTRAIN = RowNeeds.CONSTRAIN.value  # flags of an enum are slow to test


class Scheduler:
    """Takes requests into the roster, makes the plans, and takes the steps that come back."""

    def __init__(
        self,
        limits: SchedulerLimits,
        roster: Roster,
        upload_words: Callable[[Sequence, int], int] = lambda seq, length: 0,
    ) -> None:
        self.limits = limits
        self.roster = roster
        self._page_size = roster.allocator.page_size
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._last_kind = "decode"
        self.admission_over = True  # sequences that still wait after the last plan wait for rows, pages or variants
        self._upload_words = upload_words
        self._planner = find_feature(roster.features, AheadPlanner)  # type: ignore[type-abstract]

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, or emit `Rejected`."""
        roster, allocator = self.roster, self.roster.allocator
        assert request.key not in roster.groups, "the service keeps keys unique"
        pool_tokens = allocator.pool.total_of_rank * self._page_size
        busy = allocator.sessions.turn_of(request) in roster.groups
        now = roster.clock()
        group = Group(request, arrived_s=now, client=request.key[0], unfinished=request.n)
        rejected = refusal(request, self.limits, pool_tokens, roster.waiting, busy)
        for name, reason in untaken(request, roster.of_requests):
            rejected = rejected or Rejected(request.key, "bad_request", reason, name)
        for feature in roster.asked_by(group):
            rejected = rejected or feature.enter(group)
        if rejected is not None:
            roster.events.append(rejected)
            return
        group.session = allocator.sessions.begin(request)
        for index in range(request.n):
            self._arrivals += 1
            seq = Sequence(group, index, self._arrivals)
            seq.begin_free(rewinds=not allocator.prefixes.has_states)  # a state cannot go back by a token
            group.sequences.append(seq)
        roster.enter(group)
        if request.deadline_s is not None:
            self._deadlines.add(now + request.deadline_s, group)

    def end_overdue(self) -> None:
        """End requests whose deadline has passed, and sessions whose lease is over."""
        now = self.roster.clock()
        for group in self._deadlines.take_overdue(now):
            self.roster.end(group.key, "deadline")
        self.roster.allocator.sessions.expire(now)

    # --- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        self.admission_over = admit(self.roster)
        if self._last_kind == "decode":
            plan = self._plan_prompts() or self._plan_decode()
        else:
            plan = self._plan_decode() or self._plan_prompts()
        if plan is not None:
            self._last_kind = plan.kind
        return plan

    def _plan_prompts(self) -> Plan | None:
        roster, limits = self.roster, self.limits
        if not roster.prefilling:
            return None
        spans = prompt_spans(roster, limits, self._upload_words)
        if not spans:
            return None
        saves = roster.allocator.prefixes.take_saves()
        return make_plan(spans, roster.version, self._page_size, saves)

    def _plan_decode(self) -> Plan | None:
        roster = self.roster
        seqs = [seq for seq in roster.decoding if seq.launched < seq.max_tokens]
        full = [seq for seq in seqs if (kv := seq.kv).length == kv.capacity]
        if full:
            preemption.grow_rows(roster, full)
            seqs = [seq for seq in seqs if seq.state is SequenceState.DECODE and seq.kv.length < seq.kv.capacity]
        if not seqs:
            return None
        version, allocator = roster.version, roster.allocator
        running = len(roster.decoding) + len(roster.prefilling)
        # One page stays free for each running row.
        if self._planner and (plan := self._planner.plan_decode(seqs, version, allocator, running)) is not None:
            return plan
        return make_plan(decode_spans(seqs), version, self._page_size, allocator.prefixes.take_saves())

    # --- launch and commit -------------------------------------------------------------------------------------------

    def launched(self, plan: Plan) -> None:
        """Note that the step is in flight."""
        version, of_prompts = plan.version, plan.kind == "prefill"
        for seq, start, tokens_in, draws, _ in plan.spans:
            end = start + tokens_in
            seq.inflight_refs += 1
            seq.launched += draws
            seq.kv.length = end
            if of_prompts:
                self._prompt_launched(seq, start, end, version)
        for feature in self.roster.in_step:
            feature.launched(plan)

    def _prompt_launched(self, seq: Sequence, start: int, end: int, version: int) -> None:
        roster, kv = self.roster, seq.kv
        if not seq.row_ready:
            roster.prompt_order.begin(seq)
        seq.row_ready = True
        roster.counters.prefilled_tokens += end - start
        kv.note_prefill(start, end, Prefill(len(seq.tokens), version, seq.group.variant.edition), seq.consumed)
        kv.drawn_again = False
        roster.allocator.chunk_launched(seq, version)
        roster.feed.prefill_launched(seq)
        if end < len(kv.prefill_tokens):
            return
        kv.prefill_tokens = NO_TOKENS
        seq.state = SequenceState.DECODE
        seq.check_at = 0
        roster.prefilling.remove(seq)
        insort(roster.decoding, seq, key=_pages_of)  # next to rows that share its first pages
        if seq is seq.group.first:
            roster.feed.first_launched(seq, roster.version)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Take a step's tokens; steps are committed in the order of their launch."""
        roster = self.roster
        for feature in roster.in_step:
            feature.commit(plan, output)
        tokens, logprobs, raw_logprobs = output.tokens, output.logprobs, output.raw_logprobs
        version, counters, leaving = plan.version, roster.counters, SequenceState.LEAVING
        taken = end = 0  # `end`: index in the output after a row's tokens
        for span in plan.spans:
            seq, _, _, draws, _ = span
            at, end = end, end + draws
            kept, ended = end, seq.finalized
            seq.inflight_refs -= 1
            if draws != 1 or ended or seq.void:
                kept = at + self._count_kept(span, output.accepted[at:end])
            while at < kept:
                token, logprob, drawn = tokens[at], logprobs[at], seq.drawn
                if (drawn.run[0] == version and logprob == logprob) or self._begin_run(seq, logprob, version):
                    so_far = drawn.tokens
                    so_far.append(token)
                    drawn.logprobs.append(logprob)
                    drawn.raw_logprobs.append(raw_logprobs[at])
                    if drawn.drawn_logprobs is not None:
                        drawn.drawn_logprobs.append(output.drawn_logprobs[at])
                    drawn.run[1] += 1  # updated last: `rescue` tells by the runs whether a token is whole
                    taken += 1
                    at += 1
                    if (token in seq.watched or len(so_far) >= seq.check_at) and self._examine(seq, token):
                        kept = at  # later tokens do not count
                else:
                    kept = at
            if ended or (seq.state is leaving and not seq.finalized):
                roster.settle(seq)
        counters.tokens += taken
        if plan.kind == "decode":
            counters.decode_rows += plan.rows
        else:
            self._note_first_tokens(plan)

    def _count_kept(self, span: Span, accepted: list[int]) -> int:
        """The number of drawn tokens to keep. Called if the step drew none or several, or the row has ended."""
        seq, start, tokens_in, draws, _ = span
        void = seq.void > 0
        if void:
            seq.void -= 1
        elif draws > 1:
            seq.settle_ahead(draws - 1, accepted[0])
        if void or seq.finalized:
            self.roster.counters.zombie_rows += draws > 0
            return 0
        if not draws:
            self._chunk_committed(seq, start + tokens_in)
        return 1 + accepted[0] if draws > 1 else draws

    def _begin_run(self, seq: Sequence, logprob: float, version: int) -> bool:
        """Begin a run of tokens of this weights version; False if that ends the sequence: it may not have the token."""
        if math.isnan(logprob):
            self.roster.fail(seq, NOT_FINITE)
        elif seq.drawn.too_old_for(version):
            self.roster.finish(seq, Finish("stale"))
        else:
            seq.drawn.begin_run(version)
        return not seq.finalized

    def committed(self, plan: Plan, output: StepOutput, tokens: int, seconds: float) -> None:
        """Note a committed step: `seconds` on the device, waits for masks included, and `tokens` kept tokens."""
        if plan.kind == "prefill":
            self.roster.allocator.tier.prefilled(plan.tokens, seconds)
        if self._planner:
            self._planner.committed(plan, output, tokens, seconds)

    def _examine(self, seq: Sequence, token: int) -> bool:
        """Handle a token that may end its sequence or needs a check; True if later tokens do not count."""
        roster, drawn, request = self.roster, seq.drawn, seq.group.request
        count = len(drawn.tokens)
        # Before `min_tokens` only the mask of a constraint lets a stop token be drawn: where nothing else may follow.
        if token in seq.group.stop_ids and (count > request.stop.min_tokens or seq.need_bits & _CONSTRAIN):
            roster.finish(seq, Finish("stop", token))
        elif count >= seq.max_tokens:
            roster.finish(seq, Finish("length"))
        elif seq.repetition.found(drawn.tokens):
            roster.finish(seq, Finish("repetition"))
        else:
            if request.stream_every and count - drawn.flushed >= request.stream_every:
                roster.events.append(make_delta(seq, roster.asked_by(seq.group)))
            known = seq.prompt_len + count - 1  # the KV of the newest token is not written yet
            roster.allocator.prefixes.remember(seq, known, roster.version)
            next_page = count + self._page_size - known % self._page_size
            next_delta = drawn.flushed + request.stream_every if request.stream_every else seq.max_tokens
            unmasked = seq.note_constraint()
            seq.check_at = min(seq.max_tokens, next_delta, next_page, seq.look_at)
            if unmasked:
                roster.draw_again(seq)
            return unmasked
        return True

    def _chunk_committed(self, seq: Sequence, end: int) -> None:
        """Commit a span that draws nothing: the last span, if the sequence may have no further token."""
        tokens = len(seq.tokens)
        if tokens >= seq.max_tokens and end == seq.prompt_len + tokens:
            self.roster.finish(seq, Finish("length"))

    def _note_first_tokens(self, plan: Plan) -> None:
        now = self.roster.clock()
        for seq in plan.sampled:
            seq.group.first_token_s = min(seq.group.first_token_s, now)


def _pages_of(seq: Sequence) -> list[int]:
    return seq.kv.pages


def prompt_spans(roster: Roster, limits: SchedulerLimits, upload_words: Callable[[Sequence, int], int]) -> list[Span]:
    """The spans of prompts for one step, in their order, within `limits`; `upload_words` bounds the words of a span.

    A sequence whose KV is still being copied back waits; no other sequence waits for it. If rows are dealt to ranks,
    each rank with prompts gets an equal part of the tokens. The step also ends where a feature has no room for more.
    """
    spans: list[Span] = []
    tokens, words, page_size = limits.chunk_tokens, limits.upload_words, roster.allocator.page_size
    ranks = {seq.kv.rank for seq in roster.prefilling}
    room = dict.fromkeys(ranks, -(-tokens // max(1, len(ranks))))
    for seq in roster.prefilling:
        kv = seq.kv
        if kv.restoring or (tokens and not room[kv.rank]):
            continue
        length = min(kv.chunk_end - kv.length, tokens, room[kv.rank])
        needed = upload_words(seq, length)
        if length == 0 or (spans and needed > words):
            break
        wanted = length
        for feature in roster.in_step:
            length = feature.fit(seq, kv.length, length, first=not spans)
        if length:
            tokens, words = tokens - length, words - needed
            room[kv.rank] -= length
            spans.append(prompt_span(seq, length, page_size))
        if length < wanted:
            break
    return spans


def prompt_span(seq: Sequence, length: int, page_size: int) -> Span:
    """The next `length` tokens of a sequence that is being prefilled."""
    kv = seq.kv
    start, end = kv.length, kv.length + length
    draws = int(end == len(kv.prefill_tokens) and seq.launched < seq.max_tokens)
    part = PromptPart(
        kv.prefill_tokens[start:end],
        copies=kv.copies_to(kv.pages[start // page_size]),
        saves=kv.saves_of(seq.row),
        loads=kv.loads_of(seq.row),
        decodes=seq.group.request.prompt.follows_row(start, end),
    )
    return Span(seq, start, length, draws, part)
