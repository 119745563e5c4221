"""A sequence: one completion in the making, and the group of completions that share its prompt.

Life of a sequence:

    WAITING --admit--> PREFILL --last chunk launched--> DECODE --finalize--> finalized
       ^                  |                                |
       |                  +---------- preempt -------------+
       +---- refs == 0 ---- LEAVING <----------------------+        (its KV may be offloaded meanwhile: `offload`)

Two fields make zombies harmless: `finalized` (its outcome is decided; nothing may be added) and `inflight_refs` (steps
in flight that still name its row). Row and pages go back only when it is finalized or LEAVING and its refs are 0.

Three counters, all in tokens:

    len(tokens)   committed: the host has seen them
    launched      committed plus in flight
    kv_len        positions whose KV is written once everything launched has run = prompt + launched - 1 while decoding
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

import numpy as np

from rollout.constraints.matcher import Matcher
from rollout.engine.adapter_table import Adapter, AdapterSlot
from rollout.engine.kv.offloaded import OffloadedKV
from rollout.engine.kv.pool import PrefixKeys
from rollout.engine.kv.sessions import Session
from rollout.engine.messages import Finish, Request, RequestKey
from rollout.engine.step.expert_trace import SequenceExperts
from rollout.engine.step.features import features_of
from rollout.engine.step.scores import TopTokens

SEED_MASK = (1 << 63) - 1


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    LEAVING = auto()  # preempted, tokens in flight still commit


def row_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: 63 bits, independent for every (seed, index)."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


@dataclass(slots=True)
class PromptShare:
    """The pages of a prefilled prompt, held for the members of a group that have not started yet."""

    pages: list[int]
    version: int
    keys: PrefixKeys | None


@dataclass(eq=False, slots=True)
class Group:
    """All sequences of one request."""

    request: Request
    arrived_s: float
    sequences: list[Sequence] = field(default_factory=list)
    leader: Sequence | None = None  # prefills the prompt for all, until its last chunk is launched
    followers: list[Sequence] = field(default_factory=list)  # not in the queue yet: they wait for the leader's prefill
    share: PromptShare | None = None
    session: Session | None = None  # whose next turn this is
    adapter: Adapter | None = None  # of its rows
    unstarted: int = 0  # members that may still want the share
    unfinished: int = 0
    complete: int = 0  # ended by a stop or by length
    cached_tokens: int = 0
    preemptions: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    prompt_logprobs: np.ndarray | None = None  # float32 [prompt tokens], NaN where not known yet; None if not asked for
    prompt_due: bool = False  # the leader has to compute them

    @property
    def key(self) -> RequestKey:
        """The request's key."""
        return self.request.key

    def expect_prompt_logprobs(self) -> None:
        """Make room for the log-probs of the prompt, if they are asked for."""
        if self.request.prompt_logprobs:
            self.prompt_due = True
            self.prompt_logprobs = np.full(len(self.request.prompt), np.nan, np.float32)


class Sequence:
    """One completion in the making."""

    __slots__ = (
        "adapter_marks",
        "adapter_slot",
        "arrival",
        "check_at",
        "copy_source",
        "drawn_logprobs",
        "feature_bits",
        "features",
        "finalized",
        "finish",
        "flushed",
        "group",
        "index",
        "inflight_refs",
        "keys",
        "kv_capacity",
        "kv_edition",
        "kv_len",
        "kv_uniform",
        "kv_version",
        "launched",
        "logprobs",
        "matched",
        "matcher",
        "max_tokens",
        "may_share",
        "newest_version",
        "offloaded",
        "oldest_version",
        "pages",
        "prefill_tokens",
        "prefills",
        "priority",
        "prompt_len",
        "raw_logprobs",
        "routing",
        "row",
        "row_ready",
        "seed",
        "state",
        "stop_ids",
        "tokens",
        "tops",
        "versions",
        "wants_offload",
    )

    def __init__(self, group: Group, index: int, arrival: int) -> None:
        request = group.request
        self.group = group
        self.index = index
        self.arrival = arrival
        self.priority = request.priority
        self.seed = request.sampling.seed if request.prior is not None else row_seed(request.sampling.seed, index)
        self.features = features_of(request)
        self.feature_bits = self.features.value  # as an int, which is faster in a loop
        self.stop_ids = frozenset(request.stop.token_ids)
        self.max_tokens = request.max_tokens
        self.prompt_len = len(request.prompt)

        self.tokens = array(
            "i", request.prior.token_ids.astype(np.int32).tobytes() if request.prior is not None else b""
        )
        known = len(self.tokens)
        self.logprobs = array("f", bytes(4 * known))
        self.raw_logprobs = array("f", bytes(4 * known))
        self.drawn_logprobs = array("f", bytes(4 * known)) if self.features.reshapes else None
        self.tops = TopTokens(request.top_logprobs, known) if request.top_logprobs else None
        self.routing = SequenceExperts(request.routing_from) if request.routing_from is not None else None
        self.versions: list[list[int]] = []  # runs of [version, tokens], of the tokens generated here
        self.oldest_version = request.prior.oldest_version if request.prior is not None else None
        self.newest_version = request.prior.newest_version if request.prior is not None else None
        self.flushed = known

        self.matcher: Matcher | None = None  # begun with the first mask, by the thread that writes it
        self.matched = known  # tokens that the matcher has seen

        self.state = State.WAITING
        self.finalized = False
        self.finish: Finish | None = None
        self.inflight_refs = 0
        self.launched = known
        self.check_at = 0

        self.row = 0
        self.row_ready = False  # a launched step has set up the row's device state
        self.may_share = False  # counted in group.unstarted
        self.copy_source: int | None = None  # page to copy in the first chunk; referenced until that is launched
        self.pages: list[int] = []
        self.kv_capacity = 0  # tokens that fit in `pages`
        self.kv_len = 0
        self.prefill_tokens: np.ndarray | None = None
        self.adapter_slot: AdapterSlot | None = None
        self.adapter_marks: list[tuple[int, int]] = []  # (token, version): that token is the first by this version
        self.keys: PrefixKeys | None = None
        self.kv_version = -1
        self.kv_edition = 0  # edition of its adapter's weights at admission
        self.kv_uniform = 0  # leading positions whose KV is all of kv_version
        self.wants_offload = False  # preempted, with KV that is worth keeping
        self.offloaded: OffloadedKV | None = None  # its KV before it was preempted, until its next step is launched
        #: (tokens, version, adapter edition) of each prefill: it computed the KV of the prompt and of these tokens.
        self.prefills: list[tuple[int, int, int]] = []

    @property
    def known(self) -> int:
        """Tokens of `prior`, which another worker drew."""
        prior = self.group.request.prior
        return 0 if prior is None else len(prior.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Admission order; the largest rank is preempted first."""
        return (-self.priority, self.arrival)

    @property
    def adapter_edition(self) -> int:
        """Edition of its adapter's weights, 0 without an adapter; KV depends on it."""
        return 0 if self.group.adapter is None else self.group.adapter.edition

    def note_adapter(self) -> None:
        """Steps launched from now on run with its adapter's present version."""
        if self.group.adapter is None:
            return
        marks, version = self.adapter_marks, self.group.adapter.version
        if marks and marks[-1][0] == self.launched:
            marks.pop()
        if not marks or marks[-1][1] != version:
            marks.append((self.launched, version))

    @property
    def scores_prompt(self) -> bool:
        """True while its prefill is to compute the log-probs of its group's prompt."""
        return self.group.prompt_due and self.group.leader is self

    def too_old_for(self, version: int) -> bool:
        """True if a token of this weights version would make its span larger than asked for.

        The version may also be older than those of a completion that another worker began.
        """
        most = self.group.request.max_version_span
        if most is None or self.oldest_version is None:
            return False
        newest = self.oldest_version if self.newest_version is None else self.newest_version
        return max(newest, version) - min(self.oldest_version, version) > most

    def note_version(self, version: int) -> None:
        """Note that a token of this weights version was added."""
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)
        self.newest_version = version if self.newest_version is None else max(self.newest_version, version)

    @property
    def consumed(self) -> int:
        """Positions whose KV the tokens generated here depend on; 0 before the first such token."""
        return self.prompt_len + len(self.tokens) - 1 if self.versions else 0

    def history(self) -> np.ndarray:
        """Prompt and all committed tokens, int32."""
        prompt = self.group.request.prompt.token_ids
        if not self.tokens:
            return prompt
        return np.concatenate([prompt, np.frombuffer(self.tokens, dtype=np.int32)])

    def content_between(self, start: int, end: int) -> bytes:
        """The content of positions start..end-1 (prompt first), for prefix keys: see `Prompt.content`."""
        prompt_len = self.prompt_len
        if end <= prompt_len:
            return self.group.request.prompt.content(start, end)
        tokens = np.array(self.tokens[max(start - prompt_len, 0) : end - prompt_len], dtype="<i4")
        generated = tokens.tobytes()
        return self.group.request.prompt.content(start, prompt_len) + generated if start < prompt_len else generated

    def begin_prefill(self) -> None:
        """The prompt and tokens are computed from the start: drop the marks of a prefill that was broken off."""
        while self.prefills and self.prefills[-1][0] == len(self.tokens):
            self.prefills.pop()

    @property
    def recomputed(self) -> tuple[tuple[int, int], ...]:
        """(tokens, version) of each prefill of more than the prompt, and of the prompt if it had several."""
        one_of_prompt = [tokens for tokens, *_ in self.prefills].count(0) == 1
        return tuple((tokens, version) for tokens, version, _ in self.prefills[one_of_prompt:])

    def note_prefill(self, start: int, end: int, version: int) -> None:
        """A prefill under `version` is writing the KV of positions start..end-1."""
        mark = (len(self.tokens), version, self.adapter_edition)
        whole = self.offloaded is not None and start == self.consumed  # the restored KV lacks its last token only
        if not whole and mark not in self.prefills[-1:]:
            self.prefills.append(mark)
        if start == 0:
            self.kv_version, self.kv_uniform = version, end

    def drop_torn_token(self) -> None:
        """Cut the columns to the tokens that all of them have: a fault may come between two of them."""
        whole = self.known + sum(count for _, count in self.versions)
        for column in (self.tokens, self.logprobs, self.raw_logprobs, self.drawn_logprobs):
            if column is not None:
                del column[whole:]

    def add_pages(self, pages: Iterable[int], page_size: int) -> None:
        """Append pages to the sequence's table."""
        self.pages.extend(pages)
        self.kv_capacity = len(self.pages) * page_size
