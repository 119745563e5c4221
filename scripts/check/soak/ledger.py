"""The ledger of a soak: checks and counts all completions (tokens, lengths, log-probs, texts, finish reasons).

The parity of a version gives its step (even: ones, odd: twos) on every worker. A version is right only if it was
published completely: a version whose publisher was killed half-way must never appear. The ledger keeps counts and the
first complaints only, so a long run needs no more memory than a short one.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.demo.counting import CountingError, check_completion
from trainer_bridge.client.results import Chunk, Completion

_WORST_LOGPROB = -1e-3  # the counting models are almost certain of every token
_KEPT_COMPLAINTS = 50
_EXCUSE_S = 1.0  # a fault that is older than the request by more does not excuse its loss


def step_of(version: int) -> int:
    """The step in which the weights of a version count."""
    return 1 + version % 2


@dataclass(slots=True)
class Place:
    """One worker: its endpoints, and the times (`time.monotonic`) of its last restart and of its proxy's last cut."""

    index: int
    direct: str
    proxied: str
    back_s: float = float("-inf")
    cut_s: float = float("-inf")
    down: bool = False

    def troubled_since(self, since_s: float, proxied: bool) -> bool:
        """True if a fault explains a lost connection of a request that began at `since_s`."""
        killed = self.down or self.back_s >= since_s - _EXCUSE_S
        return killed or (proxied and self.cut_s >= since_s - _EXCUSE_S)


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of a completion."""

    kind: str
    prompt: str
    max_tokens: int
    reasons: tuple[str, ...] = ("length",)
    stop: str | None = None
    one_worker: bool = False  # versions must grow


@dataclass
class Ledger:
    """Counts and complaints of a run; `say` prints complaints. `token_text` returns the text of a token id."""

    token_text: Callable[[int], str]
    say: Callable[[str], object] = lambda text: None
    requests: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # completions by finish reason
    faults: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)  # errors that a fault explains
    published: set[int] = field(default_factory=lambda: {0})
    tokens: int = 0
    resumes: int = 0
    swapped_while_running: int = 0  # completions of more than one version
    wrong: list[str] = field(default_factory=list)
    wrong_count: int = 0
    lost: list[str] = field(default_factory=list)
    lost_count: int = 0

    def complain(self, text: str) -> None:
        """Record a complaint."""
        self.wrong_count += 1
        if len(self.wrong) < _KEPT_COMPLAINTS:
            self.wrong.append(text)
            self.say(f"wrong: {text}")

    def lose(self, text: str) -> None:
        """Record a request without an answer."""
        self.lost_count += 1
        if len(self.lost) < _KEPT_COMPLAINTS:
            self.lost.append(text)
            self.say(f"lost: {text}")

    def excuse(self, place: Place, since_s: float, proxied: bool, error: Exception) -> None:
        """Count an error; complain if no fault explains it."""
        name = type(error).__name__
        if place.troubled_since(since_s, proxied):
            self.excused[name] += 1
        else:
            after_s = time.monotonic() - since_s
            self.complain(f"{name} of worker {place.index} after {after_s:.2f} s without a fault: {error}")

    def check(self, asked: Asked, completion: Completion) -> None:
        """Check a complete completion."""
        self.finished[str(completion.finish_reason)] += 1
        self.tokens += len(completion)
        self.swapped_while_running += len({version for version, _ in completion.versions}) > 1
        for complaint in (*self._token_faults(asked, completion), *self._end_faults(asked, completion)):
            self.complain(f"{asked.kind} {asked.prompt[-20:]!r} completion {completion.index}: {complaint}")

    def check_part(self, kind: str, prompt: str, part: Completion) -> None:
        """Check the tokens so far of a completion that lost its worker or its client."""
        for complaint in self._token_faults(Asked(kind, prompt, len(part)), part):
            self.complain(f"{kind} {prompt[-20:]!r} part {part.index}: {complaint}")

    def _token_faults(self, asked: Asked, completion: Completion) -> list[str]:
        faults = []
        versions = completion.versions
        strange = {version for version, _ in versions} - self.published
        if strange:
            faults.append(f"versions {sorted(strange)} were never published")
        steps = {version: step_of(version) for version, _ in versions}
        runs: Sequence[tuple[int, int]] = versions
        if not asked.one_worker:  # a restarted worker begins with version 0
            runs = [(i, count) for i, (_, count) in enumerate(versions)]
            steps = {i: step_of(version) for i, (version, _) in enumerate(versions)}
        try:
            check_completion(asked.prompt, completion.token_ids.tolist(), runs, steps, self.token_text)
        except CountingError as error:
            faults.append(str(error))
        for name in ("logprobs", "raw_logprobs"):
            values = getattr(completion, name)
            if len(values) and not (np.isfinite(values).all() and values.min() > _WORST_LOGPROB and values.max() <= 0):
                faults.append(f"{name} from {values.min()} to {values.max()}")
        return faults

    def _end_faults(self, asked: Asked, completion: Completion) -> list[str]:
        faults, length, reason = [], len(completion), completion.finish_reason
        if reason not in asked.reasons:
            faults.append(f"ended as {reason} ({completion.error}), not {' or '.join(asked.reasons)}")
        if length > asked.max_tokens or (reason == "length" and length != asked.max_tokens):
            faults.append(f"{length} tokens of {asked.max_tokens}, ended as {reason}")
        text = "".join(map(self.token_text, completion.token_ids.tolist()))
        if asked.stop is not None:
            found = text.find(asked.stop)
            right = found == length - len(asked.stop) if reason == "stop" else found < 0
            if not right:
                faults.append(f"{asked.stop!r} is at {found} of {length} characters, ended as {reason}")
            text = text[:found] if found >= 0 else text
        if completion.text is not None and completion.text != text:
            faults.append(f"its text {completion.text[-30:]!r} does not belong to its tokens {text[-30:]!r}")
        return faults


class Collector:
    """Joins the chunks of one stream and checks that each token arrives exactly once."""

    def __init__(self, ledger: Ledger, what: str) -> None:
        self._ledger = ledger
        self._what = what
        self._tokens: dict[int, list[int]] = {}

    def start(self, index: int, held: Sequence[int]) -> None:
        """Continue after the tokens that the client holds; they begin with those taken here."""
        taken = self._tokens.get(index, [])
        if list(held[: len(taken)]) != taken:
            self._ledger.complain(f"{self._what}: {len(taken)} tokens streamed, {len(held)} held, or others")
        self._tokens[index] = list(held)

    def take(self, chunk: Chunk) -> None:
        """Add a chunk."""
        tokens = self._tokens.setdefault(chunk.index, [])
        if chunk.offset != len(tokens):
            self._ledger.complain(f"{self._what}: a chunk at {chunk.offset} after {len(tokens)} tokens")
        tokens += chunk.token_ids.tolist()

    def compare(self, completion: Completion) -> None:
        """Check that the result equals the stream."""
        if self._tokens.get(completion.index, []) != completion.token_ids.tolist():
            streamed = len(self._tokens.get(completion.index, []))
            self._ledger.complain(
                f"{self._what}: {streamed} tokens streamed, {len(completion)} in the result, or others"
            )
