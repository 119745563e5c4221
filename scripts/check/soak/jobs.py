"""The jobs of a soak's clients: each requests completions in one way, and the ledger checks them.

A job ends when it has its completions, also after faults of workers and connections. Clients with `resume` recover by
themselves; other jobs use `attach` and `continue_from`.
"""

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq
import zmq.asyncio

from scripts.check.soak.ledger import Asked, Collector, Ledger, Place
from trainer_bridge.client.asynchronous import AsyncRolloutClient, AsyncStream
from trainer_bridge.client.results import Chunk, Completion, GenerateResult, read_chunk
from trainer_bridge.wire import codec as wire
from trainer_bridge.wire.errors import ConnectionLost, NotFound, RolloutError, Unavailable

TIMEOUT_S = 240.0
LONGEST = 16_384
_LARGEST = 40_000  # numbers in prompts; the models count to 99,999


@dataclass(slots=True)
class Scene:
    """The environment of a job: random numbers, the ledger, the workers, and a client that resumes."""

    rng: random.Random
    ledger: Ledger
    places: list[Place]
    client: AsyncRolloutClient
    name: str
    longest: int = LONGEST  # tokens
    count: int = 0

    def new_id(self) -> str:
        """A unique id, or name of a client."""
        self.count += 1
        return f"{self.name}-{self.count}"

    def prompt(self) -> str:
        """A prompt: often a repeated one, sometimes one of many numbers."""
        number, step = self.rng.choice([17, 980, self.rng.randrange(_LARGEST)]), self.rng.choice([1, 2])
        before = self.rng.choice([0, 0, 2, 100])
        return " ".join(str(number - step * i) for i in range(min(before, number // step), -1, -1)) + ":"

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Sampling settings and a priority."""
        sampling = self.rng.choice([{"temperature": 1.0}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 5}, {}])
        return {"sampling": sampling, "priority": self.rng.choice([-3, 0, 0, 0, 7]), "timeout_s": TIMEOUT_S, **fields}


async def group(scene: Scene) -> None:
    """Several completions of a prompt in one result."""
    asked = Asked("group", scene.prompt(), scene.rng.randrange(20, 500))
    n = scene.rng.randrange(2, 7)
    result = await scene.client.generate(asked.prompt, n=n, max_tokens=asked.max_tokens, **scene.fields())
    _check(scene, asked, result, n)


async def short(scene: Scene) -> None:
    """Many short requests at a time, with text."""
    asked = [Asked("short", scene.prompt(), scene.rng.randrange(1, 40)) for _ in range(scene.rng.randrange(4, 20))]
    requests = [{"prompt": one.prompt, "max_tokens": one.max_tokens, **scene.fields()} for one in asked]
    results = await scene.client.generate_many(requests, return_text=True)
    for one, result in zip(asked, results, strict=True):
        _check(scene, one, result, 1)


async def long(scene: Scene) -> None:
    """One completion of 4K to 16K tokens, if the run is long enough."""
    asked = Asked("long", scene.prompt(), scene.rng.randrange(scene.longest // 4, scene.longest + 1))
    await _stream(scene, asked, 1, scene.rng.choice([64, 256]))


async def tokens(scene: Scene) -> None:
    """A stream of tokens."""
    asked = Asked("tokens", scene.prompt(), scene.rng.randrange(100, 1500))
    await _stream(scene, asked, scene.rng.randrange(1, 4), scene.rng.choice([1, 8, 8, 64, 64]))


async def completions(scene: Scene) -> None:
    """A stream of whole completions."""
    asked, n = Asked("completions", scene.prompt(), scene.rng.randrange(50, 800)), scene.rng.randrange(2, 5)
    stream = await scene.client.generate(
        asked.prompt, n=n, max_tokens=asked.max_tokens, stream="completions", **scene.fields()
    )
    seen: dict[int, list[int]] = {}
    async for completion in stream:
        if completion.index in seen:
            scene.ledger.complain(f"completions: {completion.index} arrived twice")
        seen[completion.index] = completion.token_ids.tolist()
    result = await stream.wait()
    _check(scene, asked, result, n)
    if seen != {one.index: one.token_ids.tolist() for one in result.completions}:
        scene.ledger.complain("completions: the result is not what was streamed")


async def stop(scene: Scene) -> None:
    """Generate until a stop string, which may never occur if the step changes on the way."""
    number = scene.rng.randrange(1000)
    asked = Asked("stop", f"{number}:", 900, ("stop", "length"), f" {number + 2 * scene.rng.randrange(5, 60)} ")
    result = await scene.client.generate(
        asked.prompt, max_tokens=900, return_text=True, stop={"strings": [asked.stop, "\n"]}, **scene.fields()
    )
    _check(scene, asked, result, 1)


async def deadline(scene: Scene) -> None:
    """Generate until a deadline."""
    limit_s = scene.rng.uniform(0.05, 1.5)
    asked = Asked("deadline", scene.prompt(), LONGEST, ("deadline", "length"))
    began_s = time.monotonic()
    result = await scene.client.generate(
        asked.prompt, n=2, max_tokens=LONGEST, deadline_s=limit_s, **scene.fields(priority=7)
    )
    _check(scene, asked, result, 2)
    if time.monotonic() - began_s > limit_s + 60:
        scene.ledger.complain(f"deadline: {limit_s:.2f} s became {time.monotonic() - began_s:.2f} s")


async def cancel(scene: Scene) -> None:
    """Cancelled on the way by the client that reads it."""
    asked = Asked("cancel", scene.prompt(), LONGEST, ("cancelled", "length"))
    await _stream(scene, asked, 2, 8, cancel_after=scene.rng.randrange(1, 40))


async def by_hand(scene: Scene) -> None:
    """Without `resume`: sometimes cancelled, or lost with its worker, and continued with `continue_from`."""
    asked = Asked("by hand", scene.prompt(), scene.rng.randrange(200, 3000), ("cancelled", "length"))
    await _continue(scene, asked, None, breaks=scene.rng.randrange(4))


async def come_back(scene: Scene) -> None:
    """A detached request: its client disconnects, attaches for the rest of the stream, and acknowledges it."""
    asked, name, target = Asked("attach", scene.prompt(), scene.rng.randrange(300, 2500)), scene.new_id(), "the-request"
    place, proxied, since = scene.rng.choice(scene.places), scene.rng.random() < 0.5, time.monotonic()
    held: list[Completion] = []
    collector = Collector(scene.ledger, "attach")
    try:
        async with _plain(place, proxied, name) as client:
            stream = await client.generate(
                asked.prompt, max_tokens=asked.max_tokens, stream="tokens", stream_every=8, detached=True,
                request_id=target, **scene.fields(),
            )  # fmt: skip
            try:
                await _some(stream, collector, scene.rng.randrange(1, 60))
            finally:
                held = stream.partials()
        for part in held:  # also chunks that had arrived but were not taken
            collector.start(part.index, part.token_ids.tolist())
        async with _plain(place, proxied, name) as client:
            stream = await client.attach(target, stream="tokens", partials=held, timeout_s=TIMEOUT_S)
            try:
                await _some(stream, collector, None)
            finally:
                held = stream.partials() or held
            result = await stream.wait()
            await _acknowledge(scene, client, target)
        _unless_lost(result)
    except (ConnectionLost, NotFound, Unavailable) as error:
        scene.ledger.excuse(place, since, proxied, error)
        await _continue(scene, asked, held[0] if held else None, breaks=0)
        return
    collector.compare(result.completions[0])
    _check(scene, asked, result, 1)


async def cut_dealer(scene: Scene) -> None:
    """A raw socket of a named client is closed mid-stream; the client returns within its lease."""
    asked, name = Asked("cut dealer", scene.prompt(), scene.rng.randrange(300, 2500)), scene.new_id()
    place, since = scene.rng.choice(scene.places), time.monotonic()
    fields = {"prompt": asked.prompt, "max_tokens": asked.max_tokens, "stream": "tokens", "stream_every": 8}
    try:
        chunks = await read_and_vanish(place, {**fields, "client": name}, "cut", scene.rng.randrange(1, 30), TIMEOUT_S)
        if not chunks:
            raise TimeoutError("no chunk arrived")
        scene.ledger.faults["socket closed mid-stream"] += 1
        async with _plain(place, False, name) as client:
            result = await client.attach("cut", timeout_s=TIMEOUT_S)
            await _acknowledge(scene, client, "cut")
        _unless_lost(result)
    except (ConnectionLost, NotFound, TimeoutError, Unavailable) as error:
        scene.ledger.excuse(place, since, False, error)
        await _continue(scene, asked, None, breaks=0)
        return
    _check(scene, asked, result, 1)
    collector = Collector(scene.ledger, "cut dealer")
    for chunk in chunks:
        collector.take(chunk)
    streamed = [token for chunk in chunks for token in chunk.token_ids.tolist()]
    if result.completions[0].token_ids.tolist()[: len(streamed)] != streamed:
        scene.ledger.complain("cut dealer: the result does not begin with what was streamed")


async def read_and_vanish(
    place: Place, fields: dict[str, Any], request_id: str, chunks: int, limit_s: float
) -> list[Chunk]:
    """Send a `generate` from a raw DEALER, read some chunks for at most `limit_s`, and close the socket."""
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    taken: list[Chunk] = []
    try:
        socket.connect(place.direct)
        await socket.send_multipart(wire.encode({"v": 1, "op": "generate", "id": request_id, **fields}))
        while len(taken) < chunks and await socket.poll(int(limit_s * 1000)):
            header = wire.decode(await socket.recv_multipart(), wire.REPLY_LIMITS)
            if header["op"] != "chunk":
                break
            taken.append(read_chunk(header))
        return taken
    finally:
        socket.close()


async def _stream(scene: Scene, asked: Asked, n: int, every: int, cancel_after: int | None = None) -> None:
    collector = Collector(scene.ledger, asked.kind)
    stream = await scene.client.generate(
        asked.prompt, n=n, max_tokens=asked.max_tokens, stream="tokens", stream_every=every, **scene.fields()
    )
    if cancel_after is not None:
        await _some(stream, collector, cancel_after)
        await _cancel(stream)
    await _some(stream, collector, None)
    result = await stream.wait()
    for completion in result.completions:
        collector.compare(completion)
    _check(scene, asked, result, n)


async def _some(stream: AsyncStream[Chunk], collector: Collector, count: int | None) -> None:
    taken = 0
    while taken != count:
        try:
            collector.take(await anext(stream))
        except StopAsyncIteration:
            return
        taken += 1


async def _cancel(stream: AsyncStream[Chunk]) -> None:
    try:
        await stream.cancel()
    except NotFound:
        pass  # it had just ended


async def _continue(scene: Scene, asked: Asked, prior: Completion | None, breaks: int) -> None:
    """Continue a completion on any worker until it is complete; cancel it `breaks` times on the way."""
    for attempt in range(30):
        if prior is not None and len(prior) == asked.max_tokens:  # all tokens arrived before the connection was lost
            scene.ledger.requests[asked.kind] += 1
            scene.ledger.check(asked, replace(prior, finish_reason="length"))
            return
        place, proxied, since = scene.rng.choice(scene.places), scene.rng.random() < 0.5, time.monotonic()
        collector = Collector(scene.ledger, asked.kind)
        collector.start(0, () if prior is None else prior.token_ids.tolist())
        stream = None
        try:
            async with _plain(place, proxied, None) as client:
                stream = await client.generate(
                    asked.prompt, max_tokens=asked.max_tokens, stream="tokens", stream_every=16,
                    **scene.fields(continue_from=prior),
                )  # fmt: skip
                if attempt < breaks:
                    await _some(stream, collector, scene.rng.randrange(1, 30))
                    await _cancel(stream)
                await _some(stream, collector, None)
                result = await stream.wait()
            (prior,) = result.completions
            collector.compare(prior)
            if prior.finish_reason == "length" and len(prior) < asked.max_tokens:
                scene.ledger.complain(f"{asked.kind}: length at {len(prior)} of {asked.max_tokens} tokens")
        except (ConnectionLost, Unavailable) as error:
            scene.ledger.excuse(place, since, proxied, error)
            partials = [] if stream is None else stream.partials()
            if partials and partials[0].seed is not None:
                prior = partials[0]
                scene.ledger.check_part(asked.kind, asked.prompt, prior)
            continue
        scene.ledger.check_part(asked.kind, asked.prompt, prior)
    raise RolloutError("30 attempts were not enough")


def _unless_lost(result: GenerateResult) -> None:
    """Raise Unavailable if the worker handed its requests back because it lost a rank."""
    error = result.completions[0].error
    if error is not None and "tensor group is lost" in error:
        raise Unavailable(error)


async def _acknowledge(scene: Scene, client: AsyncRolloutClient, target: str) -> None:
    await client.ack([target])
    try:
        await client.attach(target, timeout_s=TIMEOUT_S)
    except NotFound:
        return
    scene.ledger.complain("a result was there after its ack")


def _plain(place: Place, proxied: bool, name: str | None) -> AsyncRolloutClient:
    endpoint = place.proxied if proxied else place.direct
    return AsyncRolloutClient(endpoint, client=name, timeout_s=TIMEOUT_S, connect_timeout_s=60.0)


def _check(scene: Scene, asked: Asked, result: GenerateResult, n: int) -> None:
    scene.ledger.requests[asked.kind] += 1
    scene.ledger.resumes += result.resumes
    if [completion.index for completion in result.completions] != list(range(n)):
        scene.ledger.complain(f"{asked.kind}: {len(result.completions)} completions of {n}")
    for completion in result.completions:
        scene.ledger.check(asked, completion)


#: Jobs and their weights in the choice.
JOBS: dict[Callable[[Scene], Awaitable[None]], float] = {
    group: 5,
    short: 4,
    long: 2,
    tokens: 4,
    completions: 3,
    stop: 4,
    deadline: 2,
    cancel: 3,
    by_hand: 3,
    come_back: 3,
    cut_dealer: 2,
}
