"""A conversation with an engine: the prompt of a turn is the whole conversation so far and new tokens."""

from collections.abc import Callable

from rollout.engine.kv.allocator import Reusable
from rollout.engine.sequence.sequence import Sequence
from tests.support.engine.harness import Bench

LEASE_S = 1e6


class Conversation:
    """`said` has all tokens so far. With `session` false the turns name no session."""

    def __init__(self, bench: Bench, name: str, prompt_of: Callable[..., list[int]], session: bool = True) -> None:
        self.bench, self.name, self.said, self.turns = bench, name, [], 0
        self._prompt_of = prompt_of
        self._fields = {"session": ("c", name), "session_lease_s": LEASE_S} if session else {}

    @property
    def turn(self) -> str:
        """The name of the last turn."""
        return f"{self.name}{self.turns}"

    def submit(self, new: int, max_tokens: int = 9, prompt: list[int] | None = None, **fields: object) -> None:
        """Begin a turn: `new` tokens after what was said, or another prompt."""
        self.turns += 1
        seed = 1000 * self.turns + len(self.name)
        self.said = self.said + self._prompt_of(new, seed) if prompt is None else list(prompt)
        self.bench.submit(self.turn, self.said, max_tokens, **self._fields, **fields)

    def ended(self) -> list[int]:
        """The tokens of the turn, which has ended; they are said from now on."""
        tokens = self.bench.tokens(self.turn)
        self.said = self.said + tokens
        return tokens

    def say(self, new: int, max_tokens: int = 9, **fields: object) -> list[int]:
        """A whole turn."""
        self.submit(new, max_tokens, **fields)
        self.bench.run()
        return self.ended()

    @property
    def reused(self) -> int:
        """Tokens of the last turn's prompt whose KV was there."""
        return self.bench.done[self.turn].cached_tokens


def admissions(bench: Bench) -> list[tuple[str, int]]:
    """A list that gets (request, zombies in flight) at every admission from now on."""
    allocator = bench.engine.roster.allocator
    seen, admit = [], allocator.try_admit
    known: list[Sequence] = []

    def watched(seq: Sequence, reusable: Reusable, version: int, spare: int) -> bool:
        taken = admit(seq, reusable, version, spare)
        if taken:
            zombies = [other for other in known if other.finalized and other.inflight_refs]
            seen.append((seq.group.key[1], len(zombies)))
            known.append(seq)
        return taken

    allocator.try_admit = watched
    return seen
