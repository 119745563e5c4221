"""Requests that outlive their workers: `RolloutClient(resume=True)`.

Every request is sent as a stream, with a seed that the client knows. When a worker is lost, refuses, or hands its
completions back, each unfinished completion continues by itself with `continue_from` and its own seed, at any endpoint
that can be reached. A request without any received token is sent again as a whole.

    waiting --pump: an endpoint is there, its pause is over--> leg in flight --chunks--> ... --result--> done
       ^                                                          |
       +------- suspend: connection lost, unavailable, ... -------+

Replies never trigger a send directly: a lost leg only makes its completions wait. Every wait of a client calls
`remaining_wait_s`, which sends them. With a journal, tokens are written before the caller gets them.
"""

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainer_bridge.client.assembly import Assembler
from trainer_bridge.client.core import ClientCall, ClientCore, check_id
from trainer_bridge.client.generate_request import RequestPlan
from trainer_bridge.client.journal import Fsync, Journal, JournaledRequest, fingerprint
from trainer_bridge.client.known_tokens import KnownTokens, continued_prompt
from trainer_bridge.client.placement import CompletionAddress
from trainer_bridge.client.results import Chunk, Completion, GenerateResult
from trainer_bridge.client.resumed_call import (
    ResumedCall,
    ResumedCompletion,
    continued_plan,
    draw_seed,
    first_plan,
    request_seed,
    with_tokens,
)
from trainer_bridge.wire import codec as wire
from trainer_bridge.wire.errors import (
    ConnectionLost,
    Duplicate,
    InternalError,
    JournalFailed,
    NotFound,
    Overloaded,
    ProtocolError,
    ResumeFailed,
    RolloutError,
    RolloutTimeout,
    Unavailable,
)
from trainer_bridge.wire.finish_reasons import COMPLETE, FinishReason

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """The limits of resuming, and the journal.

    Both bounds are for one completion and start anew with each new token: `timeout_s` is the time that it may be
    without a worker, in seconds; `max_faults` how many workers may be lost with it, or fail at it, in a row.
    """

    timeout_s: float = 600.0
    max_faults: int = 8
    journal: str | os.PathLike[str] | None = None
    journal_fsync: Fsync = "never"

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.max_faults < 1:
            raise ValueError("resume_timeout_s must be more than 0 and resume_max_faults at least 1")


class Leg(Assembler):
    """The chunks of one leg."""

    def missing(self, result: GenerateResult) -> list[Chunk]:
        """No-op: the resumed call reads the rest from the result."""
        return []


class ResumingCore(ClientCore):
    """A `ClientCore` whose `generate` requests outlive their workers."""

    def __init__(self, policy: ResumePolicy, *given: Any) -> None:
        self._policy = policy
        self._running: dict[str, ResumedCall] = {}
        self._journal = None if policy.journal is None else Journal(policy.journal, policy.journal_fsync)
        self._known = KnownTokens(self._running, self._saved)
        super().__init__(*given)

    def generate(self, plan: RequestPlan) -> ClientCall:
        """Begin a request, or continue one from the journal. Raises ValueError and `RolloutError`."""
        self._check_open()
        if plan.endpoint is not None:
            self.check_known(plan.endpoint)
        if self._journal is not None and plan.request_id is None:
            raise ValueError("with a journal every request needs a request_id, so that a restart finds it")
        request_id = self.next_id() if plan.request_id is None else plan.request_id
        check_id(request_id, self._running)
        mark = fingerprint(plan.fields)
        saved = None if self._journal is None else self._journal.read(request_id)
        if saved is not None and saved.mark != mark:
            raise Duplicate(
                f"the journal has another request with the id {request_id!r}; forget it, or use a new id",
                request_id=request_id,
            )
        if saved is not None and "fork" in saved.fields:
            plan = replace(plan, fields=plan.fields | {"fork": saved.fields["fork"]})
        source = self._known.source(plan)
        if source is not None:
            plan = replace(plan, fields=plan.fields | {"fork": source.fork})
        call = self._new_call(request_id, plan, saved)
        call.source, call.prompt = source, continued_prompt(plan, source)
        if call.done:
            self._known.keep(call)
            return call
        self._running[request_id] = call
        try:
            if self._journal is not None and saved is None:
                self._journal.begin(request_id, mark, call.seed, call.started_unix_s, plan.fields)
            # Workers may still keep requests that a journal has forgotten, or a lost journal had: no id is used twice.
            self._pump(call, request_id if self._journal is None else None)
            self._conclude(call)
        except BaseException:
            self.abandon(call)
            raise
        return call

    def remaining_wait_s(self, call: ClientCall) -> float | None:
        """Seconds that a call may still wait; None: without limit. Sends what is due; ends a call whose time is up."""
        if not isinstance(call, ResumedCall):
            return super().remaining_wait_s(call)
        if call.done:
            return 0.0
        if time.monotonic() >= call.deadline:
            waited_s = call.deadline - call.started
            self._fail(call, RolloutTimeout(f"generate had no answer within {waited_s:.3g} s"))
            return 0.0
        if call.waiting:
            self._pump(call)
        limits = [self.remaining_wait_s(leg) for leg in list(call.legs)]
        if call.done:
            return 0.0
        now = time.monotonic()
        limits += [self._due(call, part, now) - now for part in call.waiting]
        limits.append(call.deadline - now)
        least = min(limit for limit in limits if limit is not None)
        return None if least == math.inf else max(0.0, least)

    def cancel(self, target: str, endpoint: str | None) -> list[ClientCall]:
        """End a request: a resumed request with its present tokens, any other as `ClientCore` does."""
        self._absorb_all()
        if target not in self._running:
            return super().cancel(target, endpoint)
        self._cancel(self._running[target])
        return []

    def _cancel(self, call: ResumedCall) -> None:
        """Cancel the legs of a request at their workers, end waiting completions here."""
        call.cancelled = True
        for leg in list(call.legs):
            if self.connections[leg.endpoint].connected:
                self.drop_request(leg.endpoint, leg.id)
            else:
                self.abandon(leg)
                self._leg_lost(call, leg, ConnectionLost("it had not been sent yet"))
        self._end_waiting(call, "cancelled")

    def abandon(self, call: ClientCall) -> None:
        """End a call that its caller abandoned. The journal keeps its tokens."""
        if not isinstance(call, ResumedCall):
            super().abandon(call)
        elif self._running.pop(call.id, None) is not None:
            self._drop_legs(call)
            call.error = RolloutError("the request was abandoned by its client", code="abandoned", request_id=call.id)

    def end_session(self, session: str) -> None:
        """End a session at its worker, or at all workers if its worker is unknown."""
        self._known.end_session(session)
        super().end_session(session)

    def endpoint_came(self) -> None:
        """Wake the calls that wait for an endpoint: one can be reached."""
        for call in list(self._running.values()):
            if call.waiting:
                call.on_update()

    def forget(self, ids: Iterable[str]) -> None:
        """Drop requests from the journal. Raises ValueError for one that is in flight, or if there is no journal."""
        if self._journal is None:
            super().forget(ids)
            return
        ids = list(ids)
        flying = next((request_id for request_id in ids if request_id in self._running), None)
        if flying is not None:
            raise ValueError(f"the request {flying!r} is in flight; cancel it or wait for it first")
        self._journal.forget(ids)

    def journaled(self) -> dict[str, bool]:
        """The requests in the journal, and whether they are finished. Raises ValueError if there is no journal."""
        return super().journaled() if self._journal is None else self._journal.ids()

    def end_requests(self) -> None:
        """End everything that is in flight; the journal keeps its records."""
        for call in list(self._running.values()):
            self._fail(call, ConnectionLost("the client was closed"))
        if self._journal is not None:
            self._journal.close()

    def _saved(self, request_id: str) -> JournaledRequest | None:
        """The journal's records of a request that is not running."""
        return None if self._journal is None or request_id in self._running else self._journal.read(request_id)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _new_call(self, request_id: str, plan: RequestPlan, saved: JournaledRequest | None) -> ResumedCall:
        deadline = self.deadline(plan.timeout_s)
        if saved is None:
            seed = request_seed(plan)
            return ResumedCall(request_id, plan, draw_seed() if seed is None else seed, deadline)
        call = ResumedCall(request_id, plan, saved.seed, deadline, saved.started_unix_s)
        call.restore(saved)
        for endpoint, leg_id in () if call.done else saved.legs:
            if endpoint in self.endpoints:
                self._disown(endpoint, leg_id)
        return call

    def _pump(self, call: ResumedCall, first_id: str | None = None) -> None:
        """Send due requests if there is an endpoint; end requests that have waited too long."""
        now = time.monotonic()
        if now >= call.ends_at:
            self._end_waiting(call, "deadline")
            return
        for part in call.waiting:
            if part.faults > self._policy.max_faults:
                why = f"completion {part.index} lost {part.faults} workers in a row without a new token"
            elif self._time_left(part, now) <= 0:
                why = f"no worker went on with completion {part.index} for {self._policy.timeout_s:g} s"
            else:
                continue
            last = "" if part.error is None else f"; the last error: {part.error}"
            self._fail(call, ResumeFailed(why + last), part.error)
            return
        self._end_full(call)
        if call.done or not self.reachable(call.plan):
            return
        due = [part for part in call.waiting if part.due <= now]
        remaining_s = None if call.ends_at == math.inf else call.ends_at - now
        if len(due) == len(call.parts) and not any(call.new_tokens(part) for part in due):
            plan = first_plan(call.plan, call.seed, remaining_s)
            self._send_leg(call, due, replace(self._with_source(call, plan, due), request_id=first_id))
            return
        if due and call.source is None and "offset" not in call.plan.fields.get("fork", ("offset",)):
            self._fail(call, _lost_source(), due[0].error)  # a running source has more tokens by now
            return
        for part in due:
            if part.leg is None and not part.done:  # sending takes in messages, which may change the call
                plan = continued_plan(call.plan, call.known_part(part), remaining_s, call.scored)
                self._send_leg(call, [part], self._with_source(call, plan, [part]))

    def _with_source(self, call: ResumedCall, plan: RequestPlan, parts: list[ResumedCompletion]) -> RequestPlan:
        """The plan of a fork: it names the source if a worker has the tokens, and contains them otherwise."""
        source = call.source
        if source is None:
            return plan
        home, _ = self.fleet.locate_fork(source.fork)
        usable = home is not None and self.serves(home) and plan.endpoint in (None, home)
        if not usable or call.by_tokens or home in (part.avoid for part in parts):
            return with_tokens(plan, source)
        return plan

    def _send_leg(self, call: ResumedCall, parts: list[ResumedCompletion], plan: RequestPlan) -> None:
        avoid = frozenset(part.avoid for part in parts if part.avoid is not None)
        plan = plan if plan.request_id is not None else replace(plan, request_id=self._leg_id(call))
        leg = self.launch(plan, math.inf, avoid)
        if call.done or any(part.done for part in parts):  # new messages have ended it meanwhile
            self.abandon(leg)
            return
        leg.assembler, leg.acknowledged_with_result = Leg(plan.n, plan.prior), False
        leg.on_update = partial(self._take_in, call, leg)
        call.resumes += call.begun or any(part.error is not None for part in parts)
        call.add_leg(leg, parts, time.monotonic(), bool(plan.fields.get("prompt_logprobs")))
        for index, part in enumerate(parts):
            self.fleet.note_moved(call.id, part.index, CompletionAddress(leg.endpoint, leg.id, index))
        if self._journal is not None:
            self._journal.sent(call.id, leg.endpoint, leg.id)
        if leg.done:  # it was too large to be sent
            leg.on_update()

    def _leg_id(self, call: ResumedCall) -> str:
        """A fresh id for a leg; it begins with the request's id, for readers of the worker's log."""
        fresh = self.next_id()
        return f"{call.id[: wire.MAX_ID_CHARS - len(fresh) - 1]}/{fresh}"

    def _disown(self, endpoint: str, leg_id: str) -> None:
        """End requests that a lost connection may have left running: workers keep them for a client with a name."""
        if self.client is not None:
            self.drop_request(endpoint, leg_id)

    def _due(self, call: ResumedCall, part: ResumedCompletion, now: float) -> float:
        """When to check a waiting completion again. `endpoint_came` reports an endpoint that is back earlier."""
        limit = min(call.ends_at, now + self._time_left(part, now))
        return min(limit, part.due) if self.reachable(call.plan) else limit

    def _time_left(self, part: ResumedCompletion, now: float) -> float:
        assert part.down_since is not None, "it has a worker"
        return self._policy.timeout_s - part.down_s - (now - part.down_since)

    # --- what a leg brings --------------------------------------------------------------------------------------------

    def _take_in(self, call: ResumedCall, leg: ClientCall) -> None:
        if call.done or leg not in call.legs:
            return
        try:
            while leg.chunks:
                chunk = leg.chunks.popleft()
                part = call.part_of(leg, chunk.index)
                if part is not None:
                    self._add(call, part, chunk)
            if leg.result is not None:
                self._leg_done(call, leg, leg.result)
            elif leg.error is not None:
                self._leg_lost(call, leg, leg.error)
            self._conclude(call)
        except (ProtocolError, JournalFailed) as error:
            self._fail(call, error)
        if not call.done and (call.chunks or call.waiting):
            call.on_update()

    def _add(self, call: ResumedCall, part: ResumedCompletion, chunk: Chunk) -> None:
        """Take new tokens, record them, and check whether the worker has returned the completion."""
        handed_back = _handed_back(chunk.part)
        if handed_back is not None:
            reason: FinishReason | None = "cancelled" if call.cancelled else None
            chunk = replace(chunk, part=replace(chunk.part, finish_reason=reason, stop=None, error=None))
        endpoint = None if part.leg is None else part.leg.endpoint
        chunk = call.take(part, chunk)
        if self._journal is not None:
            self._journal.add(call.id, chunk)
        if handed_back is not None and not call.cancelled:
            self._suspend(call, part, handed_back, endpoint)

    def _leg_done(self, call: ResumedCall, leg: ClientCall, result: GenerateResult) -> None:
        for completion in result.completions:
            part = call.part_of(leg, completion.index)
            if part is None:
                continue  # it was handed back: another leg has it, or will
            missing = call.missing(part, completion, result)
            part.text = completion.text
            if missing is not None:
                self._add(call, part, missing)
        call.learn_prompt(result)
        del call.legs[leg]
        call.results[leg] = result
        if self.acknowledges or leg.id != call.id:  # no other client can ask for the ids of legs
            self.acknowledge(leg)

    def _leg_lost(self, call: ResumedCall, leg: ClientCall, error: RolloutError) -> None:
        mine = [call.parts[index] for index in call.legs.pop(leg)]
        parts = [part for part in mine if part.leg is leg and not part.done]
        if isinstance(error, ConnectionLost):
            self._disown(leg.endpoint, leg.id)
        if not parts:
            return
        unknown = call.source is not None and not call.by_tokens and (error.field or "").startswith("fork")
        call.by_tokens |= unknown
        lost = isinstance(error, (ConnectionLost, Unavailable, InternalError)) or _full_later(call, error)
        if not (lost or unknown):
            self._fail(call, error)
            return
        endpoint = None if unknown or isinstance(error, ConnectionLost) else leg.endpoint
        for part in parts:
            self._suspend(call, part, error, endpoint)
        if call.cancelled:
            self._end_waiting(call, "cancelled")

    def _suspend(self, call: ResumedCall, part: ResumedCompletion, error: RolloutError, avoid: str | None) -> None:
        """Have a completion wait for another worker."""
        now = time.monotonic()
        part.suspend(error, now)
        part.avoid = avoid
        call.waiting.append(part)
        pause_s = 0.0 if part.tries == 1 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (part.tries - 2))
        part.due = now + (pause_s if error.retry_after_s is None else error.retry_after_s)
        if not isinstance(error, (Unavailable, Overloaded)):
            part.faults += 1

    # --- ending -------------------------------------------------------------------------------------------------------

    def _end_full(self, call: ResumedCall) -> None:
        """End the completions whose last token has arrived, but not their finish reason."""
        limit = call.plan.fields.get("max_tokens", math.inf)
        full = [part for part in call.waiting if call.new_tokens(part) and call.assembler.length(part.index) >= limit]
        if full:
            self._end(call, full, "length")

    def _end_waiting(self, call: ResumedCall, reason: FinishReason) -> None:
        """End the completions without a worker, with their present tokens."""
        if not call.done:
            self._end(call, list(call.waiting), reason)

    def _end(self, call: ResumedCall, parts: list[ResumedCompletion], reason: FinishReason) -> None:
        try:
            for part in parts:
                self._add(call, part, call.ending(part, reason))
            self._conclude(call)
        except JournalFailed as error:
            self._fail(call, error)

    def _end_if_enough(self, call: ResumedCall) -> None:
        """Apply `min_complete` when completions of a request run on several workers."""
        least = call.plan.fields.get("min_complete")
        if least is None or call.cancelled or call.done or not (call.resumes or call.waiting):
            return
        reasons = [call.known_part(part).finish_reason for part in call.parts if part.done]
        if len(reasons) < len(call.parts) and sum(reason in COMPLETE for reason in reasons) >= least:
            self._cancel(call)

    def _conclude(self, call: ResumedCall) -> None:
        self._end_if_enough(call)
        if call.done or call.legs or not all(part.done for part in call.parts):
            return
        result = call.build_result()
        if self._journal is not None:
            self._journal.finish(call.id, result)
        self._running.pop(call.id, None)
        call.result = result
        self._known.keep(call)
        call.on_update()

    def _fail(self, call: ResumedCall, error: RolloutError, cause: RolloutError | None = None) -> None:
        if call.done:
            return
        self._running.pop(call.id, None)
        self._drop_legs(call)
        error.partials = [call.known_part(part) for part in call.parts]
        error.__cause__ = cause
        call.fail(error)

    def _drop_legs(self, call: ResumedCall) -> None:
        legs, call.legs = list(call.legs), {}
        for leg in legs:
            self.abandon(leg)


def _handed_back(part: Completion) -> RolloutError | None:
    """The reason why a worker returned a completion unfinished: a failure, or its end. None for a finished one."""
    if part.finish_reason == "error":
        return InternalError(part.error or "the worker failed")
    if part.finish_reason == "cancelled" and part.error is not None:
        return Unavailable(part.error)
    return None


def _lost_source() -> NotFound:
    return NotFound(
        "the worker of this fork is lost, and this client does not know the token ids of what it continues: send the "
        "tokens as a prompt, with 'continue_from' for those in 'partials'. A client knows them if the prompts of its "
        "requests are token ids, or if these asked for 'return_prompt_ids'",
        field="fork",
    )


def _full_later(call: ResumedCall, error: RolloutError) -> bool:
    """True if a worker is full and the request has begun; otherwise the caller gets the error."""
    return isinstance(error, Overloaded) and call.begun
