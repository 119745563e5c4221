"""One request of a resuming client: its tokens from all workers that took part.

    ResumedCall  1 --- n  ResumedCompletion   with a worker (`leg`), waiting for one (`down_since`), or done
                 1 --- *  ClientCall          a leg: one request to one worker, for some of the completions

Every token is taken once: the legs' chunks go to one assembler, which refuses gaps and repetitions. Nothing in here
sends or waits.

The random numbers of a completion depend on its own seed and on positions only. A client that chose the request's seed
therefore knows the seeds of all its completions before the first token, and another worker can continue or begin any of
them.
"""

import math
import secrets
import time
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from trainer_bridge.client.assembly import Assembler, tail
from trainer_bridge.client.core import ClientCall
from trainer_bridge.client.generate_request import RequestPlan, prior_fields
from trainer_bridge.client.journal import JournaledRequest
from trainer_bridge.client.media import MediaPrompt
from trainer_bridge.client.results import Chunk, Completion, GenerateResult, Timing
from trainer_bridge.wire.errors import ProtocolError, RolloutError
from trainer_bridge.wire.finish_reasons import FinishReason
from trainer_bridge.wire.prompt_tops import PromptScores
from trainer_bridge.wire.request_fields import SCORE_FIELDS

_SEED_BITS = 63


@dataclass(slots=True, eq=False)
class ResumedCompletion:
    """One completion in flight. Times are by `time.monotonic`."""

    index: int
    seed: int
    leg: ClientCall | None = None
    done: bool = False
    text: str | None = None  # text of the whole completion; None before a result
    due: float = 0.0  # time of the next search for a worker
    tries: int = 0  # workers lost since the last new token
    faults: int = 0  # lost workers for which this request may be to blame
    down_since: float | None = None
    down_s: float = 0.0  # time without a worker since the last new token, up to `down_since`
    avoid: str | None = None  # the endpoint that refused it last
    error: RolloutError | None = None  # the last one

    def suspend(self, error: RolloutError, now: float) -> None:
        """Note that the completion lost its worker, or found none."""
        self.leg, self.error, self.down_since = None, error, now
        self.tries += 1

    def progress(self) -> None:
        """Note a new token."""
        self.tries = self.faults = 0
        self.down_s = 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a request with a `fork`, as this client knows it."""

    fork: dict[str, Any]  # names the request; `offset` is there, so that every worker takes the same tokens
    prompt: MediaPrompt  # the whole prompt of the request: these tokens and its own
    salt: str | None


class ResumedCall(ClientCall):
    """A request that outlives its workers. `started_unix_s` is the Unix time at which it was first sent."""

    def __init__(
        self, request_id: str, plan: RequestPlan, seed: int, deadline: float, started_unix_s: float | None = None
    ) -> None:
        super().__init__(request_id, "generate", "", 0, deadline)
        self.plan = plan
        self.source: Source | None = None  # the tokens that it continues; None if they are not known here
        self.prompt: MediaPrompt | None = None  # prompt with continued tokens; None if its token ids are not known here
        self.by_tokens = False  # a worker did not know the continued tokens, so they are sent
        self.seed = seed
        unix_s = time.time()
        self.started_unix_s = unix_s if started_unix_s is None else started_unix_s
        # Monotonic time: the wall clock may jump, and may have been set back since a journal was written.
        self._asked_at = time.monotonic() - max(0.0, unix_s - self.started_unix_s)
        self.assembler: Assembler = Assembler(plan.n, plan.prior)
        seeds = [seed] if plan.prior is not None else [completion_seed(seed, index) for index in range(plan.n)]
        self.parts = [ResumedCompletion(index, each, down_since=self.started) for index, each in enumerate(seeds)]
        self.waiting: list[ResumedCompletion] = list(self.parts)
        self.legs: dict[ClientCall, list[int]] = {}  # each leg's completions, ordered by the leg's own index
        self.results: dict[ClientCall, GenerateResult] = {}  # results of legs
        self.scoring: ClientCall | None = None  # the leg that was asked last for the prompt's log-probs
        self.resumes = 0
        self.cancelled = False
        limit_s = plan.fields.get("deadline_s")
        self.ends_at = math.inf  # the request's own deadline, at which completions end with their present tokens
        if limit_s is not None:
            self.ends_at = self._asked_at + limit_s

    @property
    def salt(self) -> str | None:
        """Its `cache_salt`, or its source's."""
        salt: str | None = self.plan.fields.get("cache_salt", None if self.source is None else self.source.salt)
        return salt

    @property
    def begun(self) -> bool:
        """True if any token has come, or a worker was lost."""
        return self.resumes > 0 or any(self.new_tokens(part) or part.done for part in self.parts)

    def new_tokens(self, part: ResumedCompletion) -> int:
        """Tokens of a completion, without the tokens of `continue_from`."""
        prior = 0 if self.plan.prior is None else len(self.plan.prior)
        return self.assembler.length(part.index) - prior

    @property
    def scored(self) -> bool:
        """True if no leg has to ask for the prompt's log-probs: they are here, on their way, or not wanted."""
        return (
            self.assembler.prompt.all_known or self.scoring in self.legs or not self.plan.fields.get("prompt_logprobs")
        )

    def known_part(self, part: ResumedCompletion) -> Completion:
        """The present part of a completion, with its seed."""
        if not self.assembler.has(part.index):
            return empty_part(part.index, part.seed)
        return replace(self.assembler.joined(part.index), seed=part.seed)

    def restore(self, saved: JournaledRequest) -> None:
        """Take the records of this request from a journal: all, or the first ones."""
        self.resumes = max(0, len(saved.legs) - 1)
        for chunk in saved.chunks:
            if not 0 <= chunk.index < len(self.parts):
                raise ProtocolError(f"the journal has completion {chunk.index} of {self.id!r}, which has no such index")
            self.take(self.parts[chunk.index], chunk)
        if saved.result is not None:
            for part, text in zip(self.parts, saved.texts, strict=True):
                part.text = text
            self.result = replace(saved.result, completions=self.completions())

    def add_leg(self, leg: ClientCall, parts: list[ResumedCompletion], now: float, scores: bool = False) -> None:
        """Note that a worker has these completions now; with `scores` it also returns the prompt's log-probs."""
        self.legs[leg] = [part.index for part in parts]
        self.scoring = leg if scores else self.scoring
        self.endpoint = leg.endpoint
        for part in parts:
            assert part.down_since is not None, "it has a worker"
            part.leg = leg
            part.down_s, part.down_since = part.down_s + now - part.down_since, None
            self.waiting.remove(part)

    def part_of(self, leg: ClientCall, index: int) -> ResumedCompletion | None:
        """The completion that a leg calls `index`; None if it was taken from it."""
        indexes = self.legs[leg]
        if not 0 <= index < len(indexes):
            raise ProtocolError(f"the worker sent completion {index}, but the request has {len(indexes)}")
        part = self.parts[indexes[index]]
        return part if part.leg is leg else None

    def take(self, part: ResumedCompletion, chunk: Chunk) -> Chunk:
        """Add new tokens to a completion; returns the chunk as it is of this request. Raises `ProtocolError`."""
        if chunk.part.seed not in (None, part.seed):
            raise ProtocolError(
                f"the worker draws completion {part.index} from seed {chunk.part.seed}, not from {part.seed}, the one "
                "that the protocol derives; it could not be continued"
            )
        chunk = replace(chunk, part=replace(chunk.part, index=part.index, seed=part.seed))
        self.assembler.add(chunk)
        if len(chunk.token_ids):
            part.progress()
        if chunk.finish_reason is not None:
            part.done, part.down_since = True, None
            if part in self.waiting:
                self.waiting.remove(part)
        if part.done and self.plan.stream is not None or self.plan.stream == "tokens" and len(chunk.token_ids):
            self.keep(chunk)
        return chunk

    def missing(self, part: ResumedCompletion, whole: Completion, result: GenerateResult) -> Chunk | None:
        """The part of a completion that a result has beyond its chunks. Raises `ProtocolError` if it has less."""
        have = self.assembler.length(part.index)
        if len(whole) < have or not np.array_equal(whole.token_ids[:have], self.assembler.tokens(part.index)):
            raise ProtocolError(f"the result of completion {part.index} differs from its stream")
        if part.done:
            return None
        if self.assembler.prompt.prompt_logprobs is not None:
            return Chunk(have, tail(whole, have))
        return Chunk(have, tail(whole, have), **result.scores())

    def learn_prompt(self, result: GenerateResult) -> None:
        """Take the log-probs of the prompt from a leg's result: its first chunk may have come too early for them."""
        if result.all_known and not self.assembler.prompt.all_known:
            self.assembler.prompt = PromptScores(**result.scores())

    def ending(self, part: ResumedCompletion, reason: FinishReason) -> Chunk:
        """The chunk that ends a completion here, without a worker."""
        return Chunk(self.assembler.length(part.index), empty_part(part.index, part.seed, reason))

    def build_result(self) -> GenerateResult:
        """The result, once every completion is done."""
        results, completions = list(self.results.values()), self.completions()
        # The completions of a worker that gave them back may have ended here: by a cancel, or by their deadline.
        if self.resumes == 0 and len(results) == 1 and _ends(results[0].completions) == _ends(completions):
            return replace(results[0], id=self.id)
        # A worker that gave a completion back may send its last message after the continued completion has ended.
        newest = max(self.results, key=lambda leg: leg.started, default=None)
        last = None if newest is None else self.results[newest]
        known = 0 if self.prompt is None else len(self.prompt.token_ids)
        return GenerateResult(
            id=self.id,
            completions=completions,
            prompt_tokens=max([known, *(result.prompt_tokens for result in results)]),
            cached_tokens=max([0, *(result.cached_tokens for result in results)]),
            timing=self._timing(),
            preemptions=sum(result.preemptions for result in results),
            worker=None if last is None else last.worker,
            metadata=self.plan.fields.get("metadata"),
            prompt_token_ids=next((ids for each in results if (ids := each.prompt_token_ids) is not None), None),
            **self.assembler.prompt.scores(),
            endpoint=None if last is None else last.endpoint,
            resumes=self.resumes,
            extra={**({} if last is None else last.extra), "seed": self.seed},
        )

    def completions(self) -> list[Completion]:
        """Every completion, with its text where a result has brought it."""
        return [
            replace(self.known_part(part), text=part.text) if part.text is not None else self.known_part(part)
            for part in self.parts
        ]

    def _timing(self) -> Timing:
        timings = [result.timing for result in self.results.values()]
        longest = {
            name: max((getattr(timing, name) for timing in timings), default=0.0)
            for name in ("queued_s", "prefill_s", "decode_s")
        }
        return Timing(**longest, total_s=time.monotonic() - self._asked_at)


def _ends(completions: list[Completion]) -> list[tuple[FinishReason | None, str | None]]:
    return [(completion.finish_reason, completion.error) for completion in completions]


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with this `seed`, as `docs/reference/protocol.md` defines it."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _SEED_BITS) - 1)


def draw_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def request_seed(plan: RequestPlan) -> int | None:
    """The seed of a request, or of the completion that it continues. Raises ValueError."""
    seed = plan.fields.get("sampling", {}).get("seed") if plan.prior is None else plan.prior.seed
    if seed is None:
        return None
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << _SEED_BITS:
        raise ValueError(f"the seed is {seed!r:.40}; use an integer from 0 to 2**63 - 1")
    return int(seed)


def first_plan(plan: RequestPlan, seed: int, remaining_s: float | None) -> RequestPlan:
    """The request as a whole, streamed and with a seed of the client's choice. `remaining_s` of its deadline are left.

    The text of a completion that continues one without text is asked for from its start, unless the caller sees the
    pieces: put together they are then the whole.
    """
    fields = {**plan.fields, "stream": "tokens"}
    if remaining_s is not None:
        fields["deadline_s"] = remaining_s
    if plan.prior is None:
        fields["sampling"] = {**fields.get("sampling", {}), "seed": seed}
    elif fields.get("return_text") and plan.prior.text is None and plan.stream != "tokens":
        fields["continue_from"] = {**fields["continue_from"], "text_chars": 0}
    return replace(plan, fields=fields, stream="tokens")


def continued_plan(
    plan: RequestPlan, partial: Completion, remaining_s: float | None, scored: bool = True
) -> RequestPlan:
    """The request that continues one completion: `partial` is its present part, with its seed.

    With `scored` the log-probs of the prompt are known, or another request brings them: they are not asked for. Routing
    stays here, since it may be large: chunks bring additions.
    """
    left_out = {"n", "min_complete", *((*SCORE_FIELDS, "prompt_logprobs_last") if scored else ())}
    fields = {name: value for name, value in plan.fields.items() if name not in left_out}
    if "sampling" in fields:
        fields["sampling"] = {name: value for name, value in fields["sampling"].items() if name != "seed"}
    if fields.get("return_text") and partial.text is None and (plan.prior is None or plan.stream != "tokens"):
        partial = replace(partial, text="")
    fields |= {"stream": "tokens", "continue_from": prior_fields(replace(partial, routing=None))}
    if remaining_s is not None:
        fields["deadline_s"] = remaining_s
    prior = replace(partial, index=0)
    return replace(plan, fields=fields, n=1, prior=prior, request_id=None, stream="tokens")


def with_tokens(plan: RequestPlan, source: Source) -> RequestPlan:
    """A request with the tokens that it continues, in place of their name."""
    fields = {name: value for name, value in plan.fields.items() if name != "fork"}
    fields["prompt"] = source.prompt.token_ids
    if source.prompt.media:
        fields["media"] = [item.fields() for item in source.prompt.media]
    if source.salt is not None:
        fields["cache_salt"] = source.salt
    return replace(plan, fields=fields)


def empty_part(index: int, seed: int, finish_reason: FinishReason | None = None) -> Completion:
    """A completion, or a part of one, without tokens."""
    none = np.zeros(0, np.float32)
    return Completion(index, np.zeros(0, np.int32), none, none, [], finish_reason=finish_reason, seed=seed)
