"""The trainer's side of the weight bridge: publish a model's tensors to running workers.

    with WeightPublisher(endpoints) as publisher:
        handle = publisher.publish(model.state_dict(), version=1)
        handle.held()       # the trainer may change its tensors
        handle.applied()    # every worker samples from them

`publish` returns at once; a thread of the publisher does the work, one update after the other:

    prepare -> begin (all workers) -> transfer -> commit (all workers) -> reports
                                         ^ held                             ^ applied

Invariants:

- Tensors are read until `held` and not later. Nothing is copied up front.
- A failed worker does not stop the others; `applied` raises its error.
- Every phase has a deadline, and its error names the phase and the worker.
- With `deltas` a worker that refuses changes, at any phase, gets the whole update by the same `publish`.
- If an update waits for recomputation at a worker (`waits_for` of its status) and a newer update is queued, the worker
  drops the waiting update, and `applied` raises `WeightsReplaced`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer_bridge.process_bound import Closing
from trainer_bridge.publish.control_link import ControlLink, ask_all
from trainer_bridge.publish.cut_plans import CutPlans
from trainer_bridge.publish.deltas import DeltaMemory, KeptDeltas
from trainer_bridge.publish.handle import PublishHandle, WorkerReport
from trainer_bridge.publish.kept_update import KeptUpdate
from trainer_bridge.publish.trainer_ranks import TrainerRanks
from trainer_bridge.publish.transport_choice import TransportChoice, transfer_all
from trainer_bridge.transports.base import GroupBroken, Recipient, TransferRules
from trainer_bridge.transports.payload import NamedTensors, Payload
from trainer_bridge.wire.address import endpoint_list
from trainer_bridge.wire.errors import (
    UNANSWERED,
    BadRequest,
    ProtocolError,
    RolloutError,
    WeightsRejected,
    WeightsReplaced,
)
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.manifest import check_bucket_bytes, usual_bucket_bytes
from trainer_bridge.wire.weight_messages import read_token
from trainer_bridge.wire.worker_connection import REFUSED_S

__all__ = ["PublishHandle", "WeightPublisher", "WorkerReport"]

#: Seconds for the answer of a worker whose group broke: without an answer the worker is not tried again.
_STILL_THERE_S = 5.0
_BEGIN_S = 30.0
_GRACE_S = 5.0  # time for the answer to `begin` after a close: its token is needed to abort the update
_OFFER_S = 0.1  # time between two offers to give way to a newer update

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Change:
    """A worker that joins, with the connection to it, or leaves (None)."""

    endpoint: str
    joins: ControlLink | None


class WeightPublisher(Closing):
    """Publishes weights to workers. Closing it ends unfinished updates: wait for `applied` first.

    Args:
        endpoints: The workers' request sockets.
        transport: `disk`, `cuda_ipc`, `nccl`, `shm` or `zmq`; `auto`: the first that works, without `disk`.
        folder: Where `disk` writes; the workers read this path.
        bucket_bytes: Bytes of a piece of a transfer, a multiple of 64. None: 64 to 256 MiB.
        begin_s: Seconds to connect and to check the manifest. None: 30, or 3 if refused.
        stall_s: Seconds without progress after which a transfer fails.
        apply_s: Seconds from commit until a worker uses the weights.
        curve: Keys for workers that use CURVE.
        keep: Keep the last update in host memory, for workers that restart or are stale.
        deltas: Keep the last update in the memory of `host` or `device`, and send only changes. `held` then returns
            before anything is sent.
        collective: Every rank of torch.distributed's default group makes a publisher, and calls `publish` with its part
            (FSDP2's DTensors) and `close`.
    """

    #: The layout and packing of updates.
    payload_type: ClassVar[type[Payload]] = Payload
    #: Seconds between two looks for restarted workers.
    watch_s: ClassVar[float] = 1.0
    #: Seconds for the answers when an update is aborted.
    abort_s: ClassVar[float] = 1.0

    _instead = "publish in its process, or pass its endpoints and make a publisher in each process"
    _readable_after_fork = frozenset({"endpoints", "transport"})

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        transport: str = "auto",
        folder: str | None = None,
        bucket_bytes: int | None = None,
        begin_s: float | None = None,
        stall_s: float = 30.0,
        apply_s: float = 120.0,
        curve: ClientCurve | None = None,
        keep: bool = False,
        deltas: DeltaMemory | None = None,
        collective: bool = False,
    ) -> None:
        self.endpoints = endpoint_list(endpoints)
        if bucket_bytes is not None:
            check_bucket_bytes(bucket_bytes)
        self._refused_s = REFUSED_S if begin_s is None else None
        begin_s = _BEGIN_S if begin_s is None else begin_s
        for name, seconds in {"begin_s": begin_s, "stall_s": stall_s, "apply_s": apply_s}.items():
            if not seconds > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {seconds!r}")
        if deltas not in (None, "host", "device"):
            raise ValueError(f"deltas must be 'host', 'device' or None, not {deltas!r}")
        self.transport = transport
        self._curve = curve
        self.choice = TransportChoice(transport, folder, curve, self.endpoints)
        if bucket_bytes is None and not self.choice.for_gpus:
            bucket_bytes = usual_bucket_bytes(0, gpus=False)
        self._bucket_bytes, self._begin_s, self._apply_s = bucket_bytes, begin_s, apply_s
        self.closing = threading.Event()
        self._rules = TransferRules(stall_s, self.closing)
        self.ranks = TrainerRanks(begin_s) if collective else None
        self._deltas = None if deltas is None else KeptDeltas(deltas)
        self._kept = self._deltas if self._deltas is not None else KeptUpdate() if keep else None
        self._cuts = CutPlans()
        self._client = f"publisher-{secrets.token_hex(4)}"
        self._links = {link.endpoint: link for link in self._connect()}
        self._jobs: queue.SimpleQueue[tuple[Payload, PublishHandle] | _Change | None] = queue.SimpleQueue()
        # A tensor with several names goes under one. `disk` writes for other readers, and before a worker can refuse.
        self._once = transport != "disk"
        self._newest: dict[str | None, int] = {}  # the last version that was published, by adapter; None: the model's
        self._jobs_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch aborts the process when Python ends

    def publish(
        self, named_tensors: NamedTensors, version: int, *, adapter: str | None = None, adapter_config: Any = None
    ) -> PublishHandle:
        """Start to publish all parameters, by Hugging Face names, as a newer `version`.

        Tensors are of 16 or 32 bits, or float8 codes, on the CPU or one CUDA device; they are read after the work on
        the current stream, and must not change before `held`.

        Tied embeddings may have both names. Correction biases of routers, and tensors of a draft model (`draft.NAME`,
        or a layer's own names) may be left out. Tensors that text does not need (`mtp.*`, `visual.*`) are dropped.

        With `adapter` the tensors are a LoRA adapter's, from PEFT's `get_peft_model_state_dict`, with PEFT's
        `LoraConfig` or its fields, and the version is its own. `keep` does not keep adapters.
        """
        if (adapter is None) != (adapter_config is None):
            raise ValueError("adapter and adapter_config go together: pass both, or none")
        once = self._once and adapter is None
        payload = self.payload_type(
            named_tensors, version, self._bucket_bytes, spread=self.ranks is not None, once=once
        )
        if adapter is not None:
            payload.adapter = {"name": adapter, "config": _config_map(adapter_config)}
        handle = PublishHandle(payload)
        with self._jobs_lock:
            self._check_not_closed()
            self._newest[adapter] = handle.version
            self._jobs.put((payload, handle))
        return handle

    def add(self, endpoint: str) -> None:
        """Publish to one more worker; with `keep` it gets the last update, too."""
        with self._jobs_lock:
            self._check_not_closed()
            if endpoint in self.endpoints:
                raise ValueError(f"{endpoint!r} is an endpoint of this publisher already")
            link = ControlLink(endpoint, self._client, self._curve, self._refused_s)
            self.endpoints = [*self.endpoints, endpoint]
            self._jobs.put(_Change(endpoint, link))

    def remove(self, endpoint: str) -> None:
        """Publish no more to a worker."""
        with self._jobs_lock:
            self._check_not_closed()
            left = [other for other in self.endpoints if other != endpoint]
            if len(left) == len(self.endpoints) or not left:
                raise ValueError(f"{endpoint!r} is not an endpoint of this publisher, or is its last endpoint")
            self.endpoints = left
            self._jobs.put(_Change(endpoint, None))

    def status(self, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Each worker's reply to the action `status` of `weights`."""
        links = self._connect()
        try:
            answers = ask_all([(link, {"action": "status"}) for link in links], "status", timeout_s, self.closing)
        finally:
            for link in links:
                link.close()
        for answer in answers:
            if isinstance(answer, RolloutError):
                raise answer
        return [{"endpoint": link.endpoint, **answer} for link, answer in zip(links, answers, strict=True)]  # type: ignore[dict-item]

    def close(self) -> None:
        """End the thread and the connections; unfinished handles fail. Idempotent."""
        with self._jobs_lock:
            self.closing.set()
            self._jobs.put(None)
        if self.ranks is not None:
            self._thread.join(self.ranks.timeout_s)  # the update in progress ends when rank 0 finishes it or closes
            self.ranks.stop()
        self._thread.join()
        atexit.unregister(self.close)

    def _leave_after_fork(self) -> None:
        """The forked process has nothing to close when it ends."""
        atexit.unregister(self.close)

    def _check_not_closed(self) -> None:
        if self.closing.is_set():
            raise ValueError("this publisher is closed; make a new one")

    def _connect(self) -> list[ControlLink]:
        links: list[ControlLink] = []
        try:
            for endpoint in self.endpoints:
                links.append(ControlLink(endpoint, self._client, self._curve, self._refused_s))
        except ValueError:
            for link in links:
                link.close()
            raise
        return links

    # --- the publisher's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            if isinstance(job, _Change):
                self._apply(job)
                continue
            payload, handle = job
            error: RolloutError | None = None
            try:
                if self.ranks is not None and self.ranks.rank > 0:
                    self.ranks.serve(payload, handle, handle.version)
                    continue
                kept = self._kept if payload.adapter is None else None
                if kept is not None:
                    kept.fill(payload)
                self._publish(payload, handle, list(self._links))
                if payload.tied and any(error.field == "tied" for error in handle.errors.values()):
                    self._once = False  # a worker takes them as several parameters
                    if not handle.begun:
                        payload = handle.use_every_name(None if kept is None else kept.every_name(payload.tied))
                        self._publish(payload, handle, list(self._links))
                if kept is not None:
                    kept.keep_finished(payload, handle, self.closing)
            except RolloutError as caught:
                error = caught
            except Exception as caught:  # the handle reports every error
                _log.exception("publishing version %d failed", handle.version)
                error = RolloutError(f"{handle.phase}: the publisher failed: {caught!r:.300}")
                error.__cause__ = caught
            handle.end(error)
            self._tell_ranks(handle)
        self.choice.close()
        for link in self._links.values():
            link.close()
        if self.ranks is not None:
            self.ranks.close()

    def _apply(self, change: _Change) -> None:
        """Have a worker join or leave, between two updates."""
        if change.joins is not None:
            self._links[change.endpoint] = change.joins
            self.choice.add(change.endpoint)
            return
        self._links.pop(change.endpoint).close()
        self._cuts.forget(change.endpoint)
        self.choice.remove(change.endpoint)
        if self._kept is not None:
            self._kept.forgive(change.endpoint)

    def _next_job(self) -> tuple[Payload, PublishHandle] | _Change | None:
        """Wait for the next update. Meanwhile, send the kept one to restarted workers with older weights."""
        while self._kept is not None:
            try:
                return self._jobs.get(timeout=self.watch_s)
            except queue.Empty:
                if (version := self._kept.version) is not None:
                    try:
                        self._bring_up_to_date(version)
                    except Exception:  # the thread must live on for the trainer's next update
                        _log.exception("version %d cannot be sent to restarted workers", version)
        return self._jobs.get()

    def _bring_up_to_date(self, version: int) -> None:
        assert self._kept is not None
        links = list(self._links.values())
        answers = ask_all([(link, {"action": "status"}) for link in links], "status", self.abort_s / 4, self.closing)
        outdated = []
        for link, answer in zip(links, answers, strict=True):
            if type(answer) is dict and self._kept.wanted_by(link.endpoint, answer):
                outdated.append(link.endpoint)
            elif isinstance(answer, UNANSWERED):
                self._kept.forgive(link.endpoint)
        if not outdated:
            return
        payload = self._kept.payload(self._bucket_bytes)
        handle = PublishHandle(payload)
        try:
            self._publish(payload, handle, outdated)
        except RolloutError as error:
            _log.warning("version %d cannot be sent to %s: %s", version, ", ".join(outdated), error)
        finally:
            handle.end(None)
        for endpoint in handle.reports:
            self._kept.forgive(endpoint)
            if self._deltas is not None:
                self._deltas.holds(endpoint)
            _log.info("%s had older weights and now has version %d", endpoint, version)
        for endpoint, problem in handle.errors.items():
            _log.warning("%s has older weights and did not take version %d: %s", endpoint, version, problem)
            if _refused(problem):
                self._kept.refused(endpoint)

    def _tell_ranks(self, handle: PublishHandle) -> None:
        if self.ranks is not None and self.ranks.rank == 0:
            with contextlib.suppress(RolloutError):  # the ranks and their group are gone
                self.ranks.finish(handle)

    def _publish(self, payload: Payload, handle: PublishHandle, endpoints: Sequence[str]) -> None:
        recipients = [Recipient(endpoint) for endpoint in endpoints]
        handle.phase = "prepare"
        self._check_open(handle)
        if self.ranks is not None and payload.shards is not None:
            self.ranks.exchange(payload.shards, handle.version, payload.device)
            payload.on_release = self.ranks.release
        deltas = self._deltas if payload.adapter is None and not payload.again else None
        if deltas is None:
            self._cut(payload, recipients)
            self._send_and_commit(payload, handle, recipients)
            return
        deltas.take(payload, self.closing)
        changes = deltas.changes
        having = [] if changes is None else [each for each in recipients if each.endpoint in deltas.base_holders]
        lacking = [recipient for recipient in recipients if recipient not in having]
        if changes is not None and having:
            self._send_and_commit(changes, handle, having)
            for each in having:
                if _refused(each.error) or isinstance(each.error, BadRequest):  # it may take the whole update
                    _log.info("%s gets the whole update: %s", each.endpoint, handle.errors.pop(each.endpoint))
                    lacking.append(Recipient(each.endpoint))
        if lacking:
            whole = deltas.payload(None)
            self._cut(whole, lacking)
            self._send_and_commit(whole, handle, lacking)
        handle.refused &= not handle.reports
        for endpoint in endpoints:
            if endpoint in handle.reports or isinstance(handle.errors.get(endpoint), WeightsReplaced):
                deltas.holds(endpoint)

    def _cut(self, payload: Payload, recipients: Sequence[Recipient]) -> None:
        """Cut an update for the ranks of its workers, if they have told their cuts and keep the same parts."""
        endpoints = [recipient.endpoint for recipient in recipients]
        if self._may_cut(payload, recipients) and (plan := self._cuts.common(payload.manifest, endpoints)) is not None:
            payload.use_sections(plan)
            if payload.spread and not payload.lends:
                payload.use_whole()  # rank 0 would fetch whole tensors for parts of them

    def _may_cut(self, payload: Payload, recipients: Sequence[Recipient]) -> bool:
        """Whether an update may be sent in sections; trainer ranks that are in a group with workers send whole ones."""
        in_group = payload.spread and self.choice.tries_group(payload, recipients)
        return self.transport != "disk" and payload.may_be_cut and not in_group  # files are for other readers, too

    def _send_and_commit(self, payload: Payload, handle: PublishHandle, recipients: list[Recipient]) -> None:
        try:
            self._deliver(payload, handle, recipients)
            again = [recipient for recipient in recipients if isinstance(recipient.error, GroupBroken)]
            another_way = self.choice.avoid(again)
            kept = any(isinstance(recipient.error, GroupBroken) and recipient.error.kept for recipient in again)
            again = self._still_there(again) if another_way or kept or len(again) > 1 else []
            if again:
                _log.warning("a group broke; retrying %d of its workers", len(again))
                self._deliver(payload, handle, again)
            self._check_open(handle)
            handle.phase = "commit"
            whole = [recipient for recipient in recipients if not recipient.error]
            give_way = self._give_way(payload, recipients)
            for recipient, reply in self._ask(recipients, _commit, "commit", self._apply_s, meanwhile=give_way):
                handle.report(recipient, reply)
            handle.refused = bool(whole) and all(_refused(recipient.error) for recipient in whole)
        finally:
            self._abort(recipients, handle)
            handle.errors |= {recipient.endpoint: recipient.error for recipient in recipients if recipient.error}
            self.choice.release(payload, applied=bool(handle.reports))

    def _deliver(self, payload: Payload, handle: PublishHandle, recipients: list[Recipient]) -> None:
        """Begin the update and transfer it to all recipients that accept it; note their options of `commit`."""
        self._begin(payload, handle, recipients)
        handle.phase = "transfer"
        self._check_open(handle)
        senders = self.choice.by_transport(recipient for recipient in recipients if not recipient.error)
        finished = transfer_all(payload, senders, self._rules)
        for recipient in recipients:
            recipient.options, recipient.sent_bytes = finished.get(recipient.route, {}), payload.manifest.tensor_bytes

    def _still_there(self, recipients: list[Recipient]) -> list[Recipient]:
        """The recipients of a broken group that still answer; they drop the update and can begin again."""
        answers = ask_all(self._aborts(recipients), "abort", _STILL_THERE_S, self.closing)
        alive = []
        for recipient, answer in zip(recipients, answers, strict=True):
            if not isinstance(answer, UNANSWERED):
                recipient.error, recipient.token = None, b""
                alive.append(recipient)
        return alive

    def _begin(self, payload: Payload, handle: PublishHandle, recipients: list[Recipient]) -> None:
        """Agree with each worker on a transport, and with all of them on sections or whole tensors."""
        while True:
            asks = payload.sections is None and self._may_cut(payload, recipients)
            self._offer_transports(payload, handle, recipients, asks)
            cut, refused = payload.sections is not None, False
            for recipient in recipients:
                told = cut or (asks and self._cuts.may_ask(recipient.endpoint))  # its `begin` had the field
                if told and recipient.error is not None and recipient.error.field == "sections":
                    self._cuts.refused(recipient.endpoint, recipient.error, asked=asks)
                    recipient.error, refused = None, True
            if not refused:
                break
            payload.use_whole()
            recipients = [recipient for recipient in recipients if not recipient.error]
        for recipient in recipients:
            if not recipient.error:
                handle.begun = True
                how = recipient.endpoint, payload.manifest.version, recipient.transport, recipient.why
                _log.info("%s takes version %d by %s: %s", *how)

    def _offer_transports(
        self, payload: Payload, handle: PublishHandle, recipients: list[Recipient], asks: bool
    ) -> None:
        """Begin the update with each worker by the first transport that it takes; with `asks` it tells its cuts."""
        manifest = payload.update or payload.manifest
        begin = {"action": "begin", **payload.begin_fields()}

        def message(recipient: Recipient) -> dict[str, Any]:
            asked = {"sections": ""} if asks and self._cuts.may_ask(recipient.endpoint) else {}
            return {**begin, **asked, "transport": recipient.transport, "options": options[recipient.route]}

        def note(recipient: Recipient, reply: dict[str, Any]) -> None:
            _note_grant(recipient, reply)
            if asks and "cuts" in reply and not recipient.error:
                self._cuts.note(recipient.endpoint, reply["cuts"], manifest)

        while recipients:
            handle.phase = "prepare"
            self._check_open(handle)
            options = self.choice.next_options(payload, recipients)
            handle.phase = "begin"
            self._ask(recipients, message, "begin", self._begin_s, note=note, grace_s=_GRACE_S)
            recipients = self.choice.refused(payload, recipients)

    def _ask(
        self,
        recipients: list[Recipient],
        message: Any,
        phase: str,
        timeout_s: float,
        note: Any = None,
        grace_s: float = 0.0,
        meanwhile: Callable[[Sequence[ControlLink]], None] | None = None,
    ) -> list[tuple[Recipient, dict[str, Any]]]:
        """Ask the recipients that have not failed; return the successful replies."""
        asked = [(recipient, self._links[recipient.endpoint]) for recipient in recipients if not recipient.error]
        questions = [(link, message(recipient)) for recipient, link in asked]
        answers = ask_all(questions, phase, timeout_s, self.closing, grace_s, meanwhile)
        replies = []
        for (recipient, link), answer in zip(asked, answers, strict=True):
            recipient.weight_socket = link.weight_socket
            if isinstance(answer, RolloutError):
                recipient.fail(answer)
                if isinstance(answer, UNANSWERED):
                    self._cuts.lost(recipient.endpoint)
                continue
            if note is not None:
                note(recipient, answer)
            replies.append((recipient, answer))
        return replies

    def _give_way(self, payload: Payload, recipients: list[Recipient]) -> Callable[[Sequence[ControlLink]], None]:
        """Called while commits are not answered: once a newer update is queued, let workers drop this one.

        A worker drops only an update that waits for recomputation; the answer to the commit says so.
        """
        adapter = None if payload.adapter is None else payload.adapter["name"]
        tokens = {self._links[recipient.endpoint]: recipient.token.hex() for recipient in recipients}
        offered_s = time.monotonic()

        def offer(unanswered: Sequence[ControlLink]) -> None:
            nonlocal offered_s
            newer = self._newest.get(adapter, 0)
            if newer <= payload.manifest.version or time.monotonic() < offered_s + _OFFER_S:
                return
            offered_s = time.monotonic()
            for link in unanswered:
                link.send_unanswered({"action": "abort", "token": tokens[link], "newer": newer})

        return offer

    def _abort(self, recipients: list[Recipient], handle: PublishHandle) -> None:
        """Abort the update at workers that began but did not apply it; a worker that is not reached has a deadline."""
        left = [each for each in recipients if each.token and each.endpoint not in handle.reports]
        if left:
            ask_all(self._aborts(left), "abort", self.abort_s, threading.Event())

    def _aborts(self, recipients: Iterable[Recipient]) -> list[tuple[ControlLink, dict[str, Any]]]:
        return [(self._links[each.endpoint], {"action": "abort", "token": each.token.hex()}) for each in recipients]

    def _check_open(self, handle: PublishHandle) -> None:
        if self.closing.is_set():
            raise RolloutError(
                f"{handle.phase}: the publisher was closed; the workers keep their weights", code="closed"
            )


def _commit(recipient: Recipient) -> dict[str, Any]:
    return {"action": "commit", "token": recipient.token.hex(), "options": recipient.options}


def _refused(error: RolloutError | None) -> bool:
    """Whether a worker refused the update, and would refuse it again."""
    return isinstance(error, WeightsRejected) and not isinstance(error, WeightsReplaced)


def _note_grant(recipient: Recipient, reply: dict[str, Any]) -> None:
    try:
        recipient.token, recipient.grant = read_token(reply.get("token")), reply.get("grant", {})
    except RolloutError:
        recipient.token = b""
    if len(recipient.token) != 16 or type(recipient.grant) is not dict:
        recipient.fail(ProtocolError(f"begin: {recipient.endpoint} answered without a token and a grant"))


def _config_map(config: Any) -> dict[str, Any]:
    """The fields of adapter_config.json, from a map or from PEFT's object with `to_dict`; PEFT itself is not needed."""
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise ValueError(f"adapter_config is a {type(config).__name__}; pass PEFT's LoraConfig, or its fields as a map")
    try:
        return json.loads(json.dumps(dict(fields), default=_plain))
    except (TypeError, ValueError) as error:
        raise ValueError(f"adapter_config cannot be sent: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} in it is not a plain value")
