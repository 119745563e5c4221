"""The calls of both clients: their messages, their waits, and the reading of answers. `face` makes methods of them.

A call is a generator. It yields the seconds to wait at most (None: no limit), looks again after each wait, and returns
its value. It calls `wake` when something has come. The clients wait:

    blocking:  poll the sockets, wait_s at most, then absorb
    asyncio:   await an event that `wake` sets, wait_s at most

A call that is closed or fails is given up: its requests in flight are cancelled at the workers.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack

import numpy as np

from trainer_bridge.client.batch import (
    MAX_IN_FLIGHT,
    BatchItem,
    Progress,
    Settled,
    plan_batch,
    settle_all,
    show_progress,
    tokens_of,
)
from trainer_bridge.client.core import ClientCall, ClientCore
from trainer_bridge.client.generate_request import GenerateFields, given, token_array
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
    core: ClientCore,
    wake: WakeCall,
    /,
    requests: Iterable[BatchItem],
    *,
    progress: Progress = False,
    max_in_flight: int = MAX_IN_FLIGHT,
    **common: Unpack[GenerateFields],
) -> Waits[list[GenerateResult]]:
    """Results of many requests, in their order.

    A request is a prompt, or a map of `generate`'s arguments; `common` are for all. The first error cancels the rest
    and is raised. A full queue delays requests.
    """
    plans = plan_batch(requests, common)
    results: dict[int, GenerateResult] = {}
    with show_progress(progress, len(plans)) as advance, closing(settle_all(core, wake, plans, max_in_flight)) as steps:
        for step in steps:
            if isinstance(step, Settled):
                if step.error is not None and len(plans) > 1:
                    step.error.add_note(f"It is the error of request {step.index} of {len(plans)}.")
                results[step.index] = step.unwrap()
                advance(tokens_of(step))
            else:
                yield step
    return [results[index] for index in range(len(plans))]


def ack(core: ClientCore, wake: WakeCall, /, targets: Iterable[str], *, endpoint: str | None = None) -> Waits[None]:
    """Drop results at the workers; unknown ids are ignored.

    Raises `BadRequest`, and drops none, if a request is in flight.
    """
    yield from control(core, wake, "ack", endpoint=endpoint, targets=list(targets))


def report(
    core: ClientCore,
    wake: WakeCall,
    /,
    target: GenerateResult | str,
    logprobs: TrainerLogprobs,
    *,
    endpoint: str | None = None,
    timeout_s: float | None = None,
) -> Waits[Mismatch]:
    """Compare a trainer's own log-probs of a result (or its id) with the worker's.

    `logprobs` has a row for each completion, in order or by index: float32 [tokens]; None and NaN: not known. The
    worker must still have the result: `ack` it afterwards.
    """
    found = Mismatch()
    for worker, fields in report_messages(core, target, logprobs, endpoint):
        (reply,) = yield from control(core, wake, "report", endpoint=worker, timeout_s=timeout_s, **fields)
        found += read_mismatch(reply)
    return found


def cancel(core: ClientCore, wake: WakeCall, /, target: str, *, endpoint: str | None = None) -> Waits[None]:
    """End a request of this `client` name with the tokens it has. Raises `NotFound` for an unknown one."""
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
    /,
    prompt: Sequence[int] | np.ndarray | None = None,
    *,
    session: str | None = None,
    adapter: str | None = None,
    cache_salt: str | None = None,
    endpoint: str | None = None,
    timeout_s: float | None = None,
) -> Waits[int]:
    """Bring KV of these tokens, or of a session's last turn, to the device.

    A hint. Returns the number of tokens whose KV is on the device or on its way.
    """
    sent = given(session=session, adapter=adapter, cache_salt=cache_salt)
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
        yield from cancel(core, wake, call.target or call.id, endpoint=call.endpoint)
    except NotFound:
        if not call.done:  # the result comes before the answer to the cancel
            raise


def status(core: ClientCore, wake: WakeCall, /, endpoint: str | None = None) -> Waits[Status]:
    """A worker's `status`, a map."""
    (reply,) = yield from control(core, wake, "status", endpoint=core.only_endpoint(endpoint))
    return Status(reply)


def statuses(core: ClientCore, wake: WakeCall, /) -> Waits[dict[str, Status]]:
    """The status of every endpoint."""
    replies = yield from control(core, wake, "status")
    return dict(zip(core.endpoints, map(Status, replies), strict=True))


def ping(
    core: ClientCore, wake: WakeCall, /, *, endpoint: str | None = None, timeout_s: float | None = None
) -> Waits[None]:
    """Return when the workers have answered."""
    yield from control(core, wake, "ping", endpoint=endpoint, timeout_s=timeout_s)


def pause(
    core: ClientCore, wake: WakeCall, /, mode: Literal["keep", "abort"] = "keep", *, endpoint: str | None = None
) -> Waits[None]:
    """Generate nothing until `resume`; `abort` also ends every request as cancelled."""
    yield from control(core, wake, "pause", endpoint=endpoint, mode=mode)


def resume(core: ClientCore, wake: WakeCall, /, *, endpoint: str | None = None) -> Waits[None]:
    """Generate again after `pause`."""
    yield from control(core, wake, "resume", endpoint=endpoint)


def sleep(
    core: ClientCore,
    wake: WakeCall,
    /,
    level: Literal[1, 2] = 1,
    *,
    mode: Literal["keep", "abort"] | None = None,
    requests: Literal["wait", "refuse"] | None = None,
    endpoint: str | None = None,
    timeout_s: float | None = None,
) -> Waits[list[dict[str, Any]]]:
    """Release the device's memory until `wake`; returns the replies."""
    fields = given(level=level, mode=mode, requests=requests)
    return (yield from control(core, wake, "sleep", endpoint=endpoint, timeout_s=timeout_s, **fields))


def wake(
    core: ClientCore, wake: WakeCall, /, *, endpoint: str | None = None, timeout_s: float | None = None
) -> Waits[list[dict[str, Any]]]:
    """End `sleep`. Raises `Unavailable` if memory is missing; the worker then stays asleep."""
    return (yield from control(core, wake, "wake", endpoint=endpoint, timeout_s=timeout_s))


def load_adapter(
    core: ClientCore,
    wake: WakeCall,
    /,
    name: str,
    path: str,
    version: int | None = None,
    *,
    endpoint: str | None = None,
) -> Waits[None]:
    """Load or replace a LoRA adapter, from a PEFT folder below the worker's `adapter_root`.

    `version` must grow; None: the last one plus 1.
    """
    fields = given(name=name, path=path, version=version)
    yield from control(core, wake, "load_adapter", endpoint=endpoint, **fields)


def unload_adapter(core: ClientCore, wake: WakeCall, /, name: str, *, endpoint: str | None = None) -> Waits[None]:
    """Unload an adapter that no unfinished request names."""
    yield from control(core, wake, "unload_adapter", endpoint=endpoint, name=name)


def shutdown(
    core: ClientCore, wake: WakeCall, /, mode: Literal["drain", "now"] = "drain", *, endpoint: str | None = None
) -> Waits[None]:
    """End workers: `drain` finishes running requests, `now` ends them with their tokens."""
    yield from control(core, wake, "shutdown", endpoint=endpoint, mode=mode)


def control(
    core: ClientCore,
    wake: WakeCall,
    /,
    op: str,
    *,
    endpoint: str | None = None,
    timeout_s: float | None = None,
    **fields: Any,
) -> Waits[list[dict[str, Any]]]:
    """Send a control message of the protocol; returns the replies in order."""
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
