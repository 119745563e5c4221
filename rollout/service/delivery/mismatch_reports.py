"""`report`: compares a trainer's log-probs of a kept result with the log-probs that the worker sent.

    message --check--> `SlowAnswers` compares --> reply, and into the box that the loop empties

If one completion of a report is wrong, the whole report is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rollout.config import ServiceConstants
from rollout.metrics.logprob_mismatch import MismatchBox, MismatchSums, compare_by_version
from rollout.service.connections import ReplyAddress
from rollout.service.delivery.replies import ok_reply
from rollout.service.delivery.store import Stored
from rollout.service.requests.fields import HIGHEST_LOGPROB
from rollout.service.requests.schema import ReportMessage
from rollout.service.slow_answers import SlowAnswers
from trainer_bridge.wire.codec import REPLY_LIMITS, decode
from trainer_bridge.wire.errors import BadRequest, RolloutError

UNKNOWN_VERSION = -1  # tokens of `continue_from` without versions
#: Maps a result's frames and log-probs by index to the mismatch by weights version; see `compare_result`.
Compare = Callable[[list[bytes], dict[str, np.ndarray]], dict[int, MismatchSums]]


class MismatchReports(SlowAnswers):
    """Takes reports on the service thread and answers them there. `box`: comparisons that the loop has not taken."""

    def __init__(
        self,
        limits: ServiceConstants,
        post: Callable[[Callable[[], None]], None],
        answer: Callable[[ReplyAddress, dict], None],
        refuse: Callable[[ReplyAddress, RolloutError], None],
        compare: Compare,
    ) -> None:
        super().__init__("reports", limits.max_reports, post, refuse, limits.max_report_bytes)
        self._compare = compare
        self._answer = answer
        self.box = MismatchBox()

    def take(self, peer: ReplyAddress, message: ReportMessage, stored: Stored) -> None:
        """Compare, then reply. Raises `RolloutError` if too many reports wait."""
        size = sum(values.nbytes for values in message.logprobs.values())
        self.begin(peer, partial(self._compare, stored.frames, message.logprobs), partial(self._add, peer), nbytes=size)

    def _add(self, peer: ReplyAddress, versions: dict[int, MismatchSums]) -> None:
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
