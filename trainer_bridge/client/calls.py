"""The calls of both clients: their messages, their waits, and the reading of answers.

A call is a generator. It yields the seconds to wait at most (None: no limit), looks again after each wait, and returns
its value. It calls `wake` when something has come. The clients wait:

    blocking:  poll the sockets, wait_s at most, then absorb
    asyncio:   await an event that `wake` sets, wait_s at most

A call that is closed or fails is given up: what it has in flight is cancelled at the workers.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from trainer_bridge.client.batch import Progress, Settled, settle_all, show_progress, tokens_of
from trainer_bridge.client.core import ClientCall, ClientCore
from trainer_bridge.client.generate_request import RequestPlan, token_array
from trainer_bridge.client.mismatch import Mismatch, TrainerLogprobs, read_mismatch, report_messages
from trainer_bridge.client.results import Chunk, GenerateResult, Status
from trainer_bridge.wire.errors import NotFound

_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")

WakeCall = Callable[[], object]
Waits = Generator[float | None, None, _Value]
Call = Callable[Concatenate[ClientCore, WakeCall, _Params], Waits[_Value]]


def finish(core: ClientCore, wake: WakeCall, call: ClientCall) -> Waits[GenerateResult]:
    """The result of a `generate` or `attach`."""
    with _watched(core, wake, [call]):
        yield from _until_done(core, call)
    assert call.result is not None
    return call.result


def next_chunk(core: ClientCore, wake: WakeCall, call: ClientCall, keep: bool = False) -> Waits[Chunk | None]:
    """The next chunk of a stream, or None at its end. With `keep` the stream survives if this call is abandoned."""
    with _watched(core, wake, [call], keep):
        while not call.chunks:
            if call.done:
                yield from _until_done(core, call)
                return None
            yield core.remaining_wait_s(call)
    return call.chunks.popleft()


def generate_many(
    core: ClientCore, wake: WakeCall, plans: list[RequestPlan], max_in_flight: int, progress: Progress
) -> Waits[list[GenerateResult]]:
    """The results of many requests, in their order. Raises the first error."""
    results: dict[int, GenerateResult] = {}
    with (
        show_progress(progress, len(plans)) as advance,
        closing(settle_all(core, wake, plans, max_in_flight)) as steps,
    ):
        for step in steps:
            if isinstance(step, Settled):
                if step.error is not None and len(plans) > 1:
                    step.error.add_note(f"It is the error of request {step.index} of {len(plans)}.")
                results[step.index] = step.unwrap()
                advance(tokens_of(step))
            else:
                yield step
    return [results[index] for index in range(len(plans))]


def report(
    core: ClientCore,
    wake: WakeCall,
    target: GenerateResult | str,
    logprobs: TrainerLogprobs,
    endpoint: str | None,
    timeout_s: float | None,
) -> Waits[Mismatch]:
    """Send the trainer's log-probs in messages of a size that workers accept, and add up the answers."""
    found = Mismatch()
    for place, fields in report_messages(core, target, logprobs, endpoint):
        (reply,) = yield from control(core, wake, "report", place, timeout_s, **fields)
        found += read_mismatch(reply)
    return found


def cancel(core: ClientCore, wake: WakeCall, target: str, endpoint: str | None) -> Waits[None]:
    """End a request. Succeeds if one of the endpoints knows it."""
    calls = core.cancel(target, endpoint)
    missing: list[NotFound] = []
    with _watched(core, wake, calls):
        for call in calls:
            try:
                yield from _until_done(core, call)
            except NotFound as error:
                missing.append(error)
        if missing and len(missing) == len(calls):
            raise missing[0]


def prefetch(
    core: ClientCore,
    wake: WakeCall,
    prompt: Sequence[int] | np.ndarray | None,
    endpoint: str | None,
    timeout_s: float | None,
    fields: Mapping[str, Any],
) -> Waits[int]:
    """Prefetch KV to the device. Returns the largest number of tokens that a worker has there or on the way."""
    sent = {name: value for name, value in fields.items() if value is not None}
    if prompt is not None:
        sent["prompt"] = token_array(prompt, "prompt")
    calls = core.prefetch(sent, endpoint, timeout_s)
    with _watched(core, wake, calls):
        for call in calls:
            yield from _until_done(core, call)
    return max(int((call.reply or {}).get("tokens", 0)) for call in calls)


def end_stream(core: ClientCore, wake: WakeCall, call: ClientCall) -> Waits[None]:
    """End the request of a stream, which may be over before the `cancel` comes."""
    if call.done:
        return
    try:
        yield from cancel(core, wake, call.target or call.id, call.endpoint)
    except NotFound:
        if not call.done:  # the result comes before the answer to the cancel
            raise


def status(core: ClientCore, wake: WakeCall, endpoint: str | None) -> Waits[Status]:
    """The status of one worker."""
    (reply,) = yield from control(core, wake, "status", core.only_endpoint(endpoint), None)
    return Status(reply)


def statuses(core: ClientCore, wake: WakeCall) -> Waits[dict[str, Status]]:
    """The status of every worker, by endpoint."""
    replies = yield from control(core, wake, "status", None, None)
    return dict(zip(core.endpoints, map(Status, replies), strict=True))


def control(
    core: ClientCore, wake: WakeCall, op: str, endpoint: str | None, timeout_s: float | None, /, **fields: Any
) -> Waits[list[dict[str, Any]]]:
    """Send a control message to one endpoint or to all; the replies are in the order of the endpoints."""
    calls = core.control(op, endpoint, timeout_s, **fields)
    with _watched(core, wake, calls):
        for call in calls:
            yield from _until_done(core, call)
    return [call.reply or {} for call in calls]


def _until_done(core: ClientCore, call: ClientCall) -> Waits[None]:
    """Wait until a request is done; then raise its error, if any."""
    while not call.done:
        yield core.remaining_wait_s(call)
    if call.error is not None:
        raise call.error


@contextmanager
def _watched(core: ClientCore, wake: WakeCall, calls: list[ClientCall], keep: bool = False) -> Iterator[None]:
    """Call `wake` when something comes. If the block fails or ends early, abandon the requests, unless `keep`."""
    for call in calls:
        call.on_update = wake
    try:
        yield
    except BaseException:
        for call in () if keep else calls:
            core.abandon(call)
        raise
