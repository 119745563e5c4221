"""Many requests through one client: a window of requests in flight; when one is done, the next is sent.

If a worker's queue is full, the request is sent again after the time that the worker names. Any other error is the
request's outcome.
"""

import heapq
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer_bridge.client.core import ClientCall, ClientCore
from trainer_bridge.client.generate_request import GenerateFields, Prompt, RequestPlan, plan_request
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.wire.errors import Overloaded, RolloutError

MAX_IN_FLIGHT = 1024
_RETRY_S = 1.0

#: A prompt, or a map of `generate`'s arguments with `prompt` or `messages` in it.
BatchItem = Prompt | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of the request at `index` of the input: exactly one of `result` and `error`."""

    index: int
    result: GenerateResult | None = None
    error: RolloutError | None = None

    def unwrap(self) -> GenerateResult:
        """The result, or raise the error."""
        if self.result is None:
            assert self.error is not None
            raise self.error
        return self.result


def plan_batch(items: Iterable[BatchItem], common: GenerateFields) -> list[RequestPlan]:
    """Plans of all requests; fields of an item replace the common fields.

    Raises the errors of `plan_request`; the error of an item begins with `request` and its index.
    """
    if isinstance(items, (str, Mapping)):
        raise ValueError("generate_many takes a list of prompts; use generate for a single one")
    plans = []
    for index, item in enumerate(items):
        if isinstance(item, (int, np.integer)):
            raise ValueError(
                "generate_many takes a list of prompts, not the tokens of one prompt; use generate(tokens)"
            )
        fields: dict[str, Any] = {**common, **(item if isinstance(item, Mapping) else {"prompt": item})}
        try:
            plans.append(plan_request(fields.pop("prompt", None), fields))
        except (TypeError, ValueError) as error:
            if index == 0 and not isinstance(item, Mapping):
                raise  # the common fields are as likely at fault
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"request {index}: {error}") from error
    return plans


def settle_all(
    core: ClientCore, wake: Callable[[], object], plans: list[RequestPlan], max_in_flight: int
) -> Generator[Settled | float | None, None, None]:
    """Send all requests. Yields each outcome as it comes, and in between how many seconds to wait at most.

    `wake` is called when something has come. Closing the generator abandons what is in flight.
    """
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}; use at least 1")
    waiting = deque(range(len(plans)))
    later: list[tuple[float, int]] = []  # (time.monotonic, index) of requests to send again
    flying: dict[int, ClientCall] = {}
    done: deque[int] = deque()

    def watch(index: int, call: ClientCall) -> None:
        def update() -> None:
            if call.done:
                done.append(index)
            wake()

        flying[index], call.on_update = call, update
        if call.done:  # a journal had it
            update()

    try:
        while waiting or later or flying:
            while later and later[0][0] <= time.monotonic():
                waiting.appendleft(heapq.heappop(later)[1])
            while waiting and len(flying) < max_in_flight:
                index = waiting.popleft()
                watch(index, core.generate(plans[index]))
            wait_s = _shortest_wait_s(core, flying, later)
            if not done:
                yield wait_s
            while done:
                index = done.popleft()
                call = flying.pop(index)
                if isinstance(call.error, Overloaded):
                    pause_s = call.error.retry_after_s
                    heapq.heappush(later, (time.monotonic() + (_RETRY_S if pause_s is None else pause_s), index))
                else:
                    yield Settled(index, call.result, call.error)
    finally:
        for call in flying.values():
            core.abandon(call)


def _shortest_wait_s(core: ClientCore, flying: dict[int, ClientCall], later: list[tuple[float, int]]) -> float | None:
    limits = [core.remaining_wait_s(call) for call in list(flying.values())]
    if later:
        limits.append(max(0.0, later[0][0] - time.monotonic()))
    return min((limit for limit in limits if limit is not None), default=None)


def tokens_of(settled: Settled) -> int:
    """Tokens of an outcome."""
    return 0 if settled.result is None else int(np.sum([len(item) for item in settled.result.completions]))


#: False, True, or a function of (finished requests, all requests, received tokens).
Progress = bool | Callable[[int, int, int], object]


@contextmanager
def show_progress(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function; call it with the number of tokens of each finished request."""
    if callable(progress):
        yield _counting(progress, total)
    elif not progress:
        yield lambda tokens: None
    else:
        with _bar(total) as show:
            yield _counting(show, total)


def _counting(show: Callable[[int, int, int], object], total: int) -> Callable[[int], None]:
    done = tokens_so_far = 0

    def advance(tokens: int) -> None:
        nonlocal done, tokens_so_far
        done += 1
        tokens_so_far += tokens
        show(done, total, tokens_so_far)

    return advance


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int, int], object]]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        yield _print_line
        print(file=sys.stderr)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("0 tokens", total=total)
        yield lambda done, total, tokens: bar.update(task, completed=done, description=f"{tokens:,} tokens")


def _print_line(done: int, total: int, tokens: int) -> None:
    print(f"\r{done}/{total} requests, {tokens:,} tokens", end="", file=sys.stderr, flush=True)
