"""Control messages: orders to the engine's loop and to the weight receiver, and their replies.

    pause, resume, sleep, ...   Command with a token  ==> inbox ==> loop ==> Done or Failed with it --> reply
    load_adapter                folder --SlowAnswers--> PutAdapter with a token, as above
    weights                     header --> receiver --> any thread --post--> reply
    shutdown, now               Shutdown("now") ==> engine, and all drains end with it
    shutdown, drain             after the prompts in preparation: Shutdown("drain") ==> engine;  after `drain_s`:
                                Shutdown("now")

Each order gets one reply. The number of orders without a reply is bounded. Prompts in preparation and rows have
`drain_s` together, since a supervisor kills the worker later.
"""

import math
import time
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from typing import Any, Literal

from rollout.engine.messages.to_engine import Command, DropAdapter, Pause, PutAdapter, Resume, Shutdown, Sleep, WakeUp
from rollout.engine.messages.to_service import Done, Failed
from rollout.models.lora_slots import AdapterWeights
from rollout.service.adapter_loading import AdapterFolders
from rollout.service.capabilities import WeightControl
from rollout.service.connections import ReplyAddress
from rollout.service.delivery.replies import ok_reply
from rollout.service.requests import schema as requests
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.intake import PreparedPrompt
from rollout.service.slow_answers import SlowAnswers
from trainer_bridge.wire.codec import PROTOCOL_VERSION
from trainer_bridge.wire.errors import BadRequest, Overloaded, RolloutError

_MAX_WAITING = 1024  # control messages without a reply
_MAX_LOADS = 64  # messages about adapters in folders without a reply
_MAX_WEIGHTS_WAITING = 64  # weights messages without a reply; each may hold a manifest


class Controls:
    """Takes control messages on the service thread and answers them there.

    `answer` and `refuse` send replies; `post` runs a function on the service thread. Without `sleep`, `adapters` or
    `receiver` the messages about them are refused.
    """

    def __init__(
        self,
        inbox: SimpleQueue[Command],
        post: Callable[[Callable[[], None]], None],
        answer: Callable[[ReplyAddress, dict[str, Any]], None],
        refuse: Callable[[ReplyAddress, RolloutError], None],
        *,
        sleep: bool,
        adapters: AdapterFolders | None,
        receiver: WeightControl | None,
    ) -> None:
        self._inbox = inbox
        self._post = post
        self._answer = answer
        self._refuse = refuse
        self._sleep = sleep
        self._adapters = adapters
        self._loads = SlowAnswers("adapters", _MAX_LOADS, post, refuse)
        self._receiver = receiver
        self._tokens = count(1)
        self._waiting: dict[int, ReplyAddress] = {}
        self._ended: dict[int, Callable[[], None]] = {}  # token -> call after the answer to the command
        self._weights_waiting = 0

    def take(self, peer: ReplyAddress, message: requests.OrderMessage) -> None:
        """Give an order to the engine. Raises `RolloutError`."""
        match message:
            case requests.PauseMessage():
                self._inbox.put(Pause(message.mode, self.token(peer)))
            case requests.ResumeMessage():
                self._inbox.put(Resume(self.token(peer)))
            case requests.SleepMessage():
                self._check_sleeps("sleep")
                self._inbox.put(Sleep(message.level, self.token(peer), message.mode, message.requests))
            case requests.WakeMessage():
                self._check_sleeps("wake")
                self._inbox.put(WakeUp(self.token(peer)))
            case requests.LoadAdapterMessage():
                self._load_adapter(peer, message)
            case requests.UnloadAdapterMessage():
                self._adapter_folders()
                self._inbox.put(DropAdapter(message.name, self.token(peer)))

    def token(self, peer: ReplyAddress, ended: Callable[[], None] | None = None) -> int:
        """A token for a command, whose `Done` or `Failed` is sent to `peer`. Raises `RolloutError` if too many wait.

        `ended` is called after the answer.
        """
        if len(self._waiting) >= _MAX_WAITING:
            raise _too_many()
        token = next(self._tokens)
        self._waiting[token] = peer
        if ended is not None:
            self._ended[token] = ended
        return token

    def done(self, event: Done | Failed) -> None:
        """Answer a command that the loop has carried out or refused."""
        self._ended.pop(event.token, lambda: None)()
        peer = self._waiting.pop(event.token, None)
        if peer is None:
            return
        if isinstance(event, Failed):
            self._refuse(peer, RolloutError(event.message, code=event.code, field=event.field))
        else:
            self._answer(peer, ok_reply(peer.id) | dict(event.facts))

    def weights(self, peer: ReplyAddress, header: dict[str, Any]) -> None:
        """Hand a `weights` message to the receiver. Raises `RolloutError`."""
        if self._receiver is None:
            raise BadRequest("this worker accepts no weights; start it with a weight receiver", field="op")
        if self._weights_waiting >= _MAX_WEIGHTS_WAITING:
            raise _too_many()
        self._weights_waiting += 1

        def reply(answer: dict[str, Any]) -> None:
            self._post(lambda: self._answer_weights(peer, answer))

        self._receiver.control(header, reply)

    def waiting(self) -> list[ReplyAddress]:
        """Orders without a reply, except for weights messages, which the receiver answers itself."""
        return [*self._waiting.values(), *self._loads.waiting()]

    def close(self) -> None:
        """Drop orders that have not begun."""
        self._loads.close()

    def _check_sleeps(self, op: str) -> None:
        if not self._sleep:
            raise BadRequest(
                f"this worker does not offer '{op}'; start it with --sleep (engine.sleep). 'capabilities' in its "
                "status lists what it does",
                field="op",
            )

    def _load_adapter(self, peer: ReplyAddress, message: requests.LoadAdapterMessage) -> None:
        def put(weights: AdapterWeights) -> None:
            self._inbox.put(PutAdapter(message.name, weights, message.version, self.token(peer)))

        self._loads.begin(peer, self._adapter_folders().reading(message.path), put)

    def _adapter_folders(self) -> AdapterFolders:
        if self._adapters is None:
            raise BadRequest(
                "this worker does not offer adapters; start it with --adapter-slots N (engine.adapter_slots)",
                field="op",
            )
        return self._adapters

    def _answer_weights(self, peer: ReplyAddress, answer: dict[str, Any]) -> None:
        self._weights_waiting -= 1
        op = "error" if "code" in answer else "ok"
        self._answer(peer, {"op": op, **answer, "v": PROTOCOL_VERSION, "id": peer.id})


def _too_many() -> RolloutError:
    return Overloaded("too many control messages wait for an answer; retry later")


class Shutdowns:
    """Has the engine end. Everything here runs on the service thread."""

    def __init__(
        self, drain_s: float, inbox: SimpleQueue[Command], background: BackgroundWork[PreparedPrompt | None]
    ) -> None:
        self._drain_s = drain_s
        self._inbox = inbox
        self._background = background
        self._places = count()
        self._drains: dict[int, tuple[float, int | None]] = {}  # (time limit, token not yet sent to the loop)

    def begin(self, mode: Literal["drain", "now"], token: int | None) -> None:
        """Have the engine end. A drain begins after the requests in tokenization, since these were accepted."""
        if mode == "drain":
            place = next(self._places)
            self._drains[place] = (time.monotonic() + self._drain_s, token)
            self._background.after_all(lambda: self._begin_drain(place))
        else:
            self._inbox.put(Shutdown("now", token))
            self._end_drains(by_s=math.inf)

    def tick(self) -> None:
        """End the drains that have lasted too long."""
        self._end_drains(by_s=time.monotonic())

    def wait_s(self) -> float | None:
        """Seconds until `tick` has something to do, None if nothing is due by time."""
        limits_s = [limit_s for limit_s, _ in self._drains.values()]
        return max(0.0, min(limits_s) - time.monotonic()) if limits_s else None

    def _begin_drain(self, place: int) -> None:
        if place in self._drains:
            limit_s, token = self._drains[place]
            self._inbox.put(Shutdown("drain", token))
            self._drains[place] = (limit_s, None)

    def _end_drains(self, by_s: float) -> None:
        for place, (limit_s, token) in list(self._drains.items()):
            if by_s >= limit_s:
                del self._drains[place]
                self._inbox.put(Shutdown("now", token))
