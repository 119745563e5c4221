"""The clients of the load benchmark, in their own process: streams, long results, long chats."""

import multiprocessing
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

PROMPT = np.arange(16, dtype=np.int32)
TOKEN = 7  # the only one that the benchmark's model draws
_CHAT_REST_S = 0.1  # between the answer to a chat and the next one
_FEWEST_CHATS = 10  # of a load with chats; with fewer the results mean nothing


@dataclass(frozen=True, slots=True)
class Load:
    """The requests. Result i continues `known` tokens with `first_end + i * spacing` more.

    The streams continue for `tail` steps after the last result. A chat has `messages` messages of `chars` tokens. It is
    longer than the context, so it is refused after it was rendered and tokenized.
    """

    streams: int = 8
    stream_every: int = 16
    text: bool = True  # of the streams
    results: int = 100
    known: int = 16_384
    first_end: int = 400
    spacing: int = 15
    tail: int = 400
    messages: int = 250
    chars: int = 400

    @property
    def steps(self) -> int:
        """Decode steps of the longest completion."""
        return self.first_end + self.results * self.spacing + self.tail

    def new_tokens(self, i: int) -> int:
        """Number of tokens of result `i`."""
        return self.first_end + i * self.spacing


class ClientProcess:
    """Runs the whole load once for each `begin`."""

    def __init__(self, endpoint: str, load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(endpoint, load, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()  # it has imported everything

    def begin(self, *, chats: bool) -> None:
        """Send all requests; with `chats` also one long chat after the other until they are done."""
        self._pipe.send("begin with chats" if chats else "begin")

    def finished(self) -> bool:
        """True once all results of `begin` have arrived and are right. Raises RuntimeError if one is wrong."""
        if not self._pipe.poll():
            return False
        if (answer := self._pipe.recv()) != "done":
            raise RuntimeError(f"a client failed: {answer}")
        return True

    def close(self) -> None:
        """End the process, even during its work."""
        self._pipe.send("end")
        self._process.join(1.0)
        self._process.terminate()
        self._process.join()


def _serve(endpoint: str, load: Load, pipe: Connection) -> None:
    from trainer_bridge.client.blocking import RolloutClient  # noqa: F401 -- now, not while time is taken

    pipe.send("ready")
    turn = 0
    while (told := pipe.recv()) != "end":
        problems: list[str] = []
        over = threading.Event()
        chats = threading.Thread(target=_guarded, args=(problems, _chats, endpoint, load, turn, over))
        if told == "begin with chats":
            chats.start()
        jobs = [(_stream, (i,)) for i in range(load.streams)] + [(_results, ())]
        threads = [
            threading.Thread(target=_guarded, args=(problems, job, endpoint, load, turn, *more)) for job, more in jobs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        if chats.ident is not None:
            chats.join()
        pipe.send("; ".join(problems) or "done")
        turn += 1


def _guarded(problems: list[str], job: object, *args: object) -> None:
    try:
        job(*args)  # type: ignore[operator]
    # After any error the results mean nothing.
    except Exception as error:
        problems.append(repr(error))


def _stream(endpoint: str, load: Load, turn: int, i: int) -> None:
    from trainer_bridge.client.blocking import RolloutClient

    with RolloutClient(endpoint, client=f"stream-{turn}-{i}", timeout_s=600.0) as client:
        stream = client.generate(
            PROMPT, max_tokens=load.steps, stream="tokens", stream_every=load.stream_every, return_text=load.text
        )
        count = sum(len(chunk.token_ids) for chunk in stream)
        assert count == load.steps, f"a stream of {count} tokens"


def _results(endpoint: str, load: Load, turn: int) -> None:
    from trainer_bridge.client.blocking import RolloutClient

    known = np.full(load.known, TOKEN, np.int32)
    logprobs = np.zeros(load.known, np.float32)
    prior = {"token_ids": known, "seed": 1, "logprobs": logprobs, "raw_logprobs": logprobs}
    requests = [
        {"prompt": PROMPT, "max_tokens": load.known + load.new_tokens(i), "continue_from": prior}
        for i in range(load.results)
    ]
    with RolloutClient(endpoint, client=f"results-{turn}", timeout_s=600.0) as client:
        done = client.generate_many(requests)
    lengths = [len(result.completions[0].token_ids) for result in done]
    assert lengths == [load.known + load.new_tokens(i) for i in range(load.results)], "a result of another length"


def _chats(endpoint: str, load: Load, turn: int, over: threading.Event) -> None:
    from trainer_bridge.client.blocking import RolloutClient
    from trainer_bridge.wire.errors import TooLong

    chat = [{"role": "user", "content": f"{i} " * (load.chars // 2)} for i in range(10)] * (load.messages // 10)
    count = 0
    with RolloutClient(endpoint, client=f"chats-{turn}", timeout_s=600.0) as client:
        while not over.wait(_CHAT_REST_S):
            try:
                client.generate(messages=chat, max_tokens=1)
            except TooLong:
                count += 1
    assert count >= _FEWEST_CHATS, f"{count} chats were answered"
