"""A sequence: one completion in the making, and the group of completions that share its prompt.

Life of a sequence:

    WAITING --admit--> PREFILL --last chunk launched--> DECODE --finalize--> finalized
       ^                  | <--------- draw_again -------- |
       |                  +---------- preempt -------------+
       +---- refs == 0 ---- LEAVING <----------------------+        (its KV may go to a tier meanwhile)

Two fields make zombies harmless: `finalized` (its outcome is decided; nothing may be added) and `inflight_refs` (steps
in flight that still name its row). Row and pages go back only when it is finalized or LEAVING and its refs are 0.

Three counters, all in tokens:

    len(tokens)   committed: the host has seen them
    launched      committed plus in flight
    kv.length     positions whose KV is written once everything launched has run = prompt + launched - 1 while decoding

The last two include tokens ahead in flight (`ahead_in_flight`). They count as accepted until their step is committed,
which takes the refused tokens back.

A sequence consists of a few objects of plain data:

    drawn         its tokens and their log-probs and versions           `drawn_tokens`
    kv            its KV: pages, length, versions, offloaded pages      `sequence_kv`
    variant_use   notes on its variant of the weights
    constraint    its position in its constraint                       `constraints/constraint_progress.py`
    queued        notes of the queue and of the order of prompts

KV belongs to a weights version and to an edition of a variant: the plain weights, unless a feature has others. The
queue has a line for each variant, so a variant that is not ready yet delays its own sequences only.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

import numpy as np

from rollout.constraints.constraint_progress import ConstraintProgress
from rollout.constraints.matcher import ANYTHING, NEVER
from rollout.engine.messages.requests import NOTHING_BEFORE, OF_FEATURES, Request, RequestKey
from rollout.engine.messages.to_engine import Prefetch
from rollout.engine.messages.to_service import Finish
from rollout.engine.sequence.drawn_tokens import DrawnTokens, repetition_of
from rollout.engine.sequence.sequence_kv import KeptSession, PrefixKeys, SequenceKV
from rollout.engine.upload import NEEDS, RowNeeds
from trainer_bridge.wire.request_fields import RequestField
from trainer_bridge.wire.sampling_rules import RULES


class VariantUse:
    """Notes of one sequence on its variant. This base class is for the plain weights."""

    __slots__ = ()

    def refused(self, count: int, after: int) -> None:
        """Note that a step whose tokens begin at `after` refused this many tokens ahead."""

    def dropped(self, token: int) -> None:
        """Note that the tokens from this one on are discarded, and drawn again."""


@dataclass(eq=False, slots=True)
class Variant:
    """One variant, which any number of requests may name."""

    edition: int  # a number that no other content of the weights has; 0: the plain weights

    def use(self) -> VariantUse:
        """The use of a new sequence."""
        return _NO_USE


_NO_USE = VariantUse()
PLAIN_WEIGHTS = Variant(0)


SEED_MASK = (1 << 63) - 1
_CONSTRAIN = RowNeeds.CONSTRAIN.value


class SequenceState(Enum):
    """The state of a sequence."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    LEAVING = auto()  # preempted, tokens in flight still commit


def row_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: 63 bits, independent for every (seed, index)."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


@dataclass(slots=True)
class SharedPrompt:
    """The pages of a prefilled prompt, held for the members of a group that have not started yet."""

    pages: list[int]
    oldest: int  # weights version of their KV
    keys: PrefixKeys
    place: int = 0  # models with states: place of the snapshot before the last token


@dataclass(eq=False, slots=True)
class Group:
    """All sequences of one request."""

    request: Request
    arrived_s: float
    client: str = ""  # client whose tokens the queue counts; "" if the queue does not tell clients apart
    sequences: list[Sequence] = field(default_factory=list)
    first: Sequence | None = None  # prefills the prompt for all, until its last chunk is launched
    others: list[Sequence] = field(default_factory=list)  # wait for this prefill, not yet in the queue
    shared_prompt: SharedPrompt | None = None
    session: KeptSession | None = None  # the session that this turn belongs to
    variant: Variant = PLAIN_WEIGHTS  # what its rows run with
    unstarted: int = 0  # members that may still want the shared prompt
    unfinished: int = 0
    complete: int = 0  # ended by a stop or by length
    cached_tokens: int = 0
    preemptions: int = 0
    admitted_s: float = math.inf  # infinite before the admission
    first_token_s: float = math.inf  # infinite before the first token
    #: The first one must compute the prompt's KV from this token on, all under one weights version. None: it may reuse
    #: all, or this KV is launched.
    fresh_from: int | None = None
    needs: RowNeeds = field(init=False)  # what its rows need of a step
    asks: set[str] = field(init=False)  # the features that its request asks for
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.needs, self.stop_ids = needs_of(self.request), frozenset(self.request.stop.token_ids)
        self.asks = {entry.feature for entry in asked_fields(self.request) if entry.feature}

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def waits_for_turn(self) -> bool:
        """True while the turn before in its session is in flight as a zombie."""
        return self.session is not None and self.session.turns > 1


def asked_fields(asked: Request | Prefetch) -> list[RequestField]:
    """The fields that ask for features of steps."""
    return [entry for entry in OF_FEATURES if getattr(asked, entry.name, entry.default) != entry.default]


def needs_of(request: Request) -> RowNeeds:
    """The needs of a request's rows; features add theirs (`RequestFeature.enter`)."""
    sampling = request.sampling
    needs = RowNeeds.GREEDY if sampling.temperature == 0 else RowNeeds.DRAW
    for rule in RULES:
        if rule.changes(sampling):
            needs |= NEEDS[rule.part]
    if sampling.logit_bias:
        needs |= RowNeeds.BIAS
    if request.stop.min_tokens > 0 and request.stop.token_ids:
        needs |= RowNeeds.MIN_TOKENS
    if request.constraint is not ANYTHING:
        needs |= RowNeeds.CONSTRAIN
    return needs


@dataclass(eq=False, slots=True)
class QueueEntry:
    """Notes of the queue and of `PromptOrder` on a sequence."""

    may_share: bool = False  # counted in `Group.unstarted`
    computed: int = 0  # tokens whose KV its first prefill computes; 0 before its first row
    due: int = 0  # when its prompt is computed, on the clock of `PromptOrder`


class Sequence:
    """One completion in the making."""

    __slots__ = (
        "ahead_in_flight",
        "arrival",
        "check_at",
        "constraint",
        "drawn",
        "finalized",
        "finish",
        "group",
        "index",
        "inflight_refs",
        "kv",
        "launched",
        "max_tokens",
        "need_bits",
        "prompt_len",
        "queued",
        "repetition",
        "row",
        "row_ready",
        "state",
        "variant_use",
        "void",
        "watched",
    )

    def __init__(self, group: Group, index: int, arrival: int) -> None:
        request = group.request
        self.group = group
        self.index = index
        self.arrival = arrival
        self.need_bits = group.needs.value  # needs of the next step; no CONSTRAIN while that step needs no mask
        self.watched = group.stop_ids  # tokens that a commit examines
        self.max_tokens = request.max_tokens
        self.prompt_len = len(request.prompt)

        self.drawn = DrawnTokens(request, group.needs.reshapes)
        self.repetition = repetition_of(request, self.drawn.tokens)
        self.kv = SequenceKV()
        self.variant_use = group.variant.use()
        self.constraint = ConstraintProgress(self.drawn.known)

        self.state = SequenceState.WAITING
        self.finalized = False
        self.finish: Finish | None = None
        self.inflight_refs = 0
        self.void = 0  # the first steps of `inflight_refs`: their commits drop its tokens
        self.launched = self.drawn.known
        self.ahead_in_flight = 0  # tokens in flight that a step may refuse (`plan.TokensAhead`)
        self.check_at = 0  # tokens at which something is due again, if none of them stops it
        self.row = 0
        self.row_ready = False  # a launched step has set up the row's device state
        self.queued = QueueEntry()

    @property
    def tokens(self) -> array:
        """The committed tokens. A loop over all rows reads `drawn.tokens`, which is faster."""
        return self.drawn.tokens

    @property
    def seed(self) -> int:
        """The seed of its random numbers; a continued completion keeps its first seed."""
        request = self.group.request
        begins = request.prior is NOTHING_BEFORE
        return row_seed(request.sampling.seed, self.index) if begins else request.sampling.seed

    @property
    def priority(self) -> int:
        return self.group.request.priority

    @property
    def order(self) -> tuple[int, int]:
        """Priority, then arrival: the order of one client's sequences."""
        return (-self.priority, self.arrival)

    @property
    def begun(self) -> bool:
        """True once it has had a row."""
        return self.queued.computed > 0

    @property
    def cost(self) -> int:
        """Tokens that it computed and generated, except tokens that a preemption made it compute again."""
        return self.queued.computed + len(self.tokens) - self.drawn.known

    @property
    def fresh_from(self) -> int | None:
        """Like `Group.fresh_from`, for the first member; None for other members, which may reuse all KV."""
        return self.group.fresh_from if self.group.first is self else None

    @property
    def consumed(self) -> int:
        """Positions whose KV the tokens generated here depend on; 0 before the first such token.

        A completion that ends by `max_tokens` without such a token has the positions on which a prompt's logits depend:
        all but the last.
        """
        ended = self.finish is not None and self.finish.reason == "length"
        return self.prompt_len + len(self.tokens) - 1 if self.drawn.versions or ended else 0

    def settle_ahead(self, count: int, accepted: int) -> None:
        """Take back the refused tokens among a step's `count` tokens ahead, before the step's tokens are taken."""
        self.ahead_in_flight -= count
        self.launched -= count - accepted
        self.kv.take_back(count - accepted)
        self.variant_use.refused(count - accepted, len(self.tokens))

    def drop_launched(self) -> None:
        """Drop all tokens after the committed ones: tokens of steps in flight, and accepted ones of the last."""
        count = len(self.tokens)
        self.kv.take_back(self.launched - count)
        self.void, self.ahead_in_flight, self.launched = self.inflight_refs, 0, count
        self.constraint.unmasked_end = count
        self.variant_use.dropped(count)

    def begin_free(self, rewinds: bool) -> None:
        """Run without masks until the constraint holds, if it does not hold from the first token.

        `rewinds`: the row can draw a token again.
        """
        if not self.group.needs & _CONSTRAIN:
            return
        free = self.constraint.begin_free(self.group.request.constraint, rewinds)
        if free is not None:
            self.watched = self.group.stop_ids | free.ends
            self.need_bits &= ~_CONSTRAIN
            self.note_constraint()

    def note_constraint(self) -> bool:
        """Note whether the next token needs a mask; True if it needs a mask and was launched without."""
        constraint, masked = self.constraint, self.need_bits & _CONSTRAIN
        if constraint.free is None:
            return False
        needed, missed = constraint.note(self.tokens, self.launched, masked != 0)
        self.need_bits = self.need_bits | _CONSTRAIN if needed else self.need_bits & ~_CONSTRAIN
        if constraint.free is None:
            self.watched = self.group.stop_ids
        return missed

    @property
    def look_at(self) -> int:
        """The number of tokens at which its constraint or repetitions are looked at next, whatever the token is."""
        count, free = len(self.tokens), self.constraint.free
        constraint = NEVER if free is None else count + 1 if self.need_bits & _CONSTRAIN else free.look_at
        return min(constraint, count + self.repetition.every)

    def history(self) -> np.ndarray:
        """Prompt and all committed tokens, int32."""
        prompt = self.group.request.prompt.token_ids
        if not self.tokens:
            return prompt
        return np.concatenate([prompt, np.frombuffer(self.tokens, dtype=np.int32)])

    def content_between(self, start: int, end: int) -> bytes:
        """The content of positions start..end-1 (prompt first), for prefix keys: see `Prompt.content`."""
        prompt_len, prompt = self.prompt_len, self.group.request.prompt
        if end <= prompt_len:
            return prompt.content(start, end)
        tokens = np.array(self.tokens[max(start - prompt_len, 0) : end - prompt_len], dtype="<i4")
        generated = tokens.tobytes()
        if prompt.rope_jump:
            generated += prompt.rope_jump.to_bytes(8, "little", signed=True)
        return prompt.content(start, prompt_len) + generated if start < prompt_len else generated

    def identity(self, tokens: np.ndarray) -> np.ndarray:
        """A number for each of `tokens`, a prefix of its history; where numbers are equal, KV may be equal."""
        return self.group.request.prompt.identity(tokens)
