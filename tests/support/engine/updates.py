"""Updates of an engine without a receiver: whole checkpoints, and the mailbox in which the loop finds them."""

from collections.abc import Callable

from rollout.models.cut import kept_values
from tests.support.engine.harness import Bench


class Update:
    """A whole checkpoint, staged: the copy is real."""

    nbytes = 0

    def __init__(self, version: int, source, target) -> None:
        self.version = version
        targets, sources = target.hf_views(), source.hf_views()
        self.names = tuple(sources)
        self._pairs = [(targets[name], kept_values(view)) for name, view in sources.items()]

    def copy_into(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)


class Mailbox:
    """A receiver with one update that becomes ready when the test says so."""

    def __init__(self) -> None:
        self.ready: Update | None = None
        self.done: list[tuple[int, float]] = []
        self.failures: list[tuple[int, str]] = []

    def take_ready(self) -> Update | None:
        update, self.ready = self.ready, None
        return update

    def applied(self, update: Update, pause_s: float) -> None:
        self.done.append((update.version, pause_s))

    def rest(self) -> None:
        """It keeps nothing."""

    def failed(self, update: Update, message: str) -> None:
        self.failures.append((update.version, message))


def swap_in_the_middle(bench: Bench, mailbox: Mailbox, update: Update, ticks: int) -> None:
    bench.ticks(ticks)
    mailbox.ready = update
    bench.run()


def beside_a_fresh_engine(
    bench: Bench, mailbox: Mailbox, update: Update, fresh_bench: Callable[[], Bench], prompt: list[int]
) -> tuple[list[int], list[int]]:
    """The greedy tokens of a completion after a swap in its middle, and the same tokens of an engine that began anew.

    The second engine has only the new weights; its prompt ends with the tokens from before the swap. Closes both.
    """
    bench.submit("a", prompt, 50)
    swap_in_the_middle(bench, mailbox, update, ticks=20)
    swapped = boundary(bench, "a")
    fresh = fresh_bench()
    fresh.complete("b", prompt + bench.tokens("a")[:swapped], 50 - swapped)
    bench.close(), fresh.close()
    return bench.tokens("a")[swapped:], fresh.tokens("b")


def boundary(bench: Bench, name: str, index: int = 0) -> int:
    versions = bench.completions[name, index].versions
    assert versions == sorted(versions) and set(versions) == {0, 1}
    return versions.index(1)


class InPlace:
    """What the receiver hands over once the parameters are written."""

    nbytes = 0
    names: tuple[str, ...] = ()

    def __init__(self, version: int) -> None:
        self.version = version

    def copy_into(self) -> None:
        pass


class Endless(Mailbox):
    """A receiver that has a newer update ready whenever there are requests.

    Version v is a copy of `sources[v % len(sources)]`.
    """

    def __init__(self, sources: list, target) -> None:
        super().__init__()
        self.version = 0
        self.bench: Bench | None = None
        self._sources, self._target = sources, target

    def take_ready(self) -> Update | None:
        if self.bench is None or self.bench.engine.roster.idle:
            return None
        self.version += 1
        return Update(self.version, self._sources[self.version % len(self._sources)], self._target)
