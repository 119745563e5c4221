"""`report`: compares a trainer's log-probs of a kept result with the log-probs that the worker sent.

    message --check--> executor --compare--> service thread --> reply, and into the box that the loop empties

The comparison runs on a background thread; neither the loop nor the service thread waits for it. If one
completion of a report is wrong, the whole report is refused.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from rollout.config import ServiceConstants
from rollout.metrics.logprob_mismatch import MismatchBox, MismatchSums, compare_by_version
from rollout.service.connections import ReplyAddress
from rollout.service.delivery.replies import ok_reply
from rollout.service.delivery.store import Stored
from rollout.service.requests.fields import HIGHEST_LOGPROB
from rollout.service.requests.schema import ReportMessage
from trainer_bridge.wire.codec import REPLY_LIMITS, decode
from trainer_bridge.wire.errors import BadRequest, InternalError, Overloaded, RolloutError

logger = logging.getLogger(__name__)

UNKNOWN_VERSION = -1  # tokens of `continue_from` without versions
#: Maps a result's frames and log-probs by index to the mismatch by weights version; see `compare_result`.
Compare = Callable[[list[bytes], dict[str, np.ndarray]], dict[int, MismatchSums]]


class MismatchReports:
    """Takes reports on the service thread and answers them there. `box`: comparisons that the loop has not taken."""

    def __init__(
        self,
        limits: ServiceConstants,
        post: Callable[[Callable[[], None]], None],
        answer: Callable[[ReplyAddress, dict], None],
        compare: Compare,
    ) -> None:
        self._limits = limits
        self._compare = compare
        self.box = MismatchBox()
        self._post = post
        self._answer = answer
        self._serial = count()
        self._waiting: dict[int, tuple[ReplyAddress, int]] = {}  # reply address, and bytes of the report
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="service-report")

    def take(
        self,
        peer: ReplyAddress,
        message: ReportMessage,
        stored: Stored,
        refuse: Callable[[ReplyAddress, RolloutError], None],
    ) -> None:
        """Compare, then reply; `refuse` sends an error. Raises `RolloutError` if too many reports wait."""
        size = sum(values.nbytes for values in message.logprobs.values())
        waiting_bytes = sum(waiting for _, waiting in self._waiting.values())
        too_large = self._waiting and waiting_bytes + size > self._limits.max_report_bytes
        if too_large or len(self._waiting) >= self._limits.max_reports:
            raise Overloaded("too many reports are waiting; try again later", retry_after_s=1.0)
        number = next(self._serial)
        self._waiting[number] = peer, size
        then = partial(self._finish, number, refuse)
        compared = self._executor.submit(self._compare, stored.frames, message.logprobs)
        compared.add_done_callback(lambda future: self._post(partial(then, future)))

    def waiting(self) -> list[ReplyAddress]:
        return [peer for peer, _ in self._waiting.values()]

    def close(self) -> None:
        """Drop work that has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _finish(self, number: int, refuse: Callable[[ReplyAddress, RolloutError], None], future: Future) -> None:
        peer, _ = self._waiting.pop(number)
        try:
            versions: dict[int, MismatchSums] = future.result()
        except RolloutError as error:
            refuse(peer, error)
            return
        # A fault of ours must not end the service for other clients.
        except Exception:
            logger.exception("a report could not be compared", extra=peer.request_fields)
            refuse(peer, InternalError("a fault in the worker; its log has the trace"))
            return
        total = sum(versions.values(), MismatchSums())
        self.box.add(total)
        self._answer(peer, ok_reply(peer.id) | report_fields(total, versions))


def compare_result(frames: list[bytes], logprobs: dict[str, np.ndarray]) -> dict[int, MismatchSums]:
    """The mismatch by weights version of a sent `result`; `logprobs` by index, float32 [tokens].

    Raises `RolloutError` (`bad_request`) naming the entry that does not fit the result.
    """
    completions = {str(fields["index"]): fields for fields in decode(frames, REPLY_LIMITS)["completions"]}
    for index, values in logprobs.items():
        _check(completions, index, values)
    found: dict[int, MismatchSums] = {}
    for index, values in logprobs.items():
        sent = completions[index]
        for version, part in compare_by_version(sent["logprobs"], values, sent["versions"]).items():
            found[version] = found.get(version, MismatchSums()) + part
    return found


def _check(completions: dict[str, Any], index: str, values: np.ndarray) -> None:
    where = f"logprobs.{index}"
    if index not in completions:
        raise BadRequest(f"the result has {len(completions)} completions, none with index {index}", field=where)
    tokens = len(completions[index]["logprobs"])
    if len(values) != tokens:
        raise BadRequest(
            f"completion {index} has {tokens} tokens and the report {len(values)} log-probs; send one for each of its "
            "token_ids, NaN where it is not known",
            field=where,
        )
    if np.isinf(values).any() or (values > HIGHEST_LOGPROB).any():
        raise BadRequest(
            "log-probs must be finite and at most 0, or NaN where unknown: send log-softmax of logits / temperature at "
            "the sampled tokens",
            field=where,
        )


def report_fields(total: MismatchSums, versions: dict[int, MismatchSums]) -> dict[str, Any]:
    known = {version: part for version, part in sorted(versions.items()) if version != UNKNOWN_VERSION}
    return _fields(total) | {"versions": [{"version": version} | _fields(part) for version, part in known.items()]}


def _fields(part: MismatchSums) -> dict[str, Any]:
    return {"tokens": part.tokens, "k3_kl": part.k3_kl, "mean_abs": part.mean_abs, "max_abs": part.max_abs}
