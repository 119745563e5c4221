"""A scripted worker whose tokens are a function of seed and position, as a real one's are; it fails on demand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.bridge.scripted_worker import ScriptedWorker, counting
from trainer_bridge.client.resumed_call import completion_seed
from trainer_bridge.wire.prompt_tops import PromptTops


def token(seed: int, position: int) -> int:
    return (seed * 31 + int(position) * 977 + int(position) // 3) % 50_000


def letters(seed: int, start: int, end: int) -> str:
    return "".join(chr(97 + token(seed, position) % 26) for position in range(start, end))


def columns(seed: int, start: int, end: int, version: int, drawn: bool = False, tops: int = 0) -> dict[str, Any]:
    """The fields of a completion for tokens start..end-1."""
    positions = np.arange(start, end)
    fields = {
        "token_ids": np.array([token(seed, position) for position in positions], np.int32),
        "logprobs": (-positions / 8).astype(np.float32),
        "raw_logprobs": (-positions / 4).astype(np.float32),
        "versions": [[version, end - start]] if end > start else [],
        "seed": seed,
    }
    if tops:
        ids = fields["token_ids"][:, None] + np.arange(tops, dtype=np.int32)
        fields |= {"top_ids": ids, "top_logprobs": (-ids / 8).astype(np.float32)}
    return {**fields, "drawn_logprobs": (-positions / 2).astype(np.float32)} if drawn else fields


#: Of the prompt of two tokens that every scripted model has been asked to go on from.
PROMPT_LOGPROBS = np.array([np.nan, -0.5], np.float32)
PROMPT_TOPS = PromptTops(
    np.array([0, 2], np.int32),
    np.array([[-1, -1], [7, 2]], np.int32),
    np.array([[np.nan, np.nan], [-0.25, -0.5]], np.float32),
)
PROMPT_CHOSEN = np.array([[np.nan, np.nan, np.nan], [-1.0, -2.0, -np.inf]], np.float32)
PROMPT_ENTROPY = np.array([np.nan, 0.75], np.float32)
#: The fields of a reply that tells of them.
PROMPT_SCORES = {
    "prompt_logprobs": PROMPT_LOGPROBS,
    **PROMPT_TOPS.fields(),
    "prompt_chosen_logprobs": PROMPT_CHOSEN,
    "prompt_entropy": PROMPT_ENTROPY,
}


@dataclass
class Model:
    """A handler. Completion i of a request gets chunks of `every` tokens up to `reach[i]` (all without), then `fail`.

    `fail` is called as a handler is; without it, and without `reach`, requests end as they should.
    """

    version: int = 3
    every: int = 2
    reach: tuple[int, ...] | None = None
    fail: Callable[[ScriptedWorker, bytes, dict[str, Any]], None] | None = None
    drawn: bool = False

    def __call__(self, worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] != "generate":
            counting(worker, peer, header)
            return
        n, end, known = header.get("n", 1), header["max_tokens"], header.get("continue_from")
        assert header["stream"] == "tokens"
        if known is not None:
            assert n == 1 and "seed" not in header.get("sampling", {})
            self._check_known(known, header.get("logprobs", 0))
        done, tops = [], header.get("logprobs", 0)
        once = {"prompt_logprobs": PROMPT_LOGPROBS} if header.get("prompt_logprobs") else {}
        if header.get("prompt_top_logprobs") is not None:
            assert header["prompt_logprobs"] and header["prompt_top_logprobs"] == 2
            once = PROMPT_SCORES
        for index in range(n):
            seed = completion_seed(header["sampling"]["seed"], index) if known is None else known["seed"]
            start = 0 if known is None else len(known["token_ids"])
            reach = end if self.reach is None else self.reach[index]
            for offset in range(start, reach, self.every):
                upto = min(offset + self.every, reach)
                part = columns(seed, offset, upto, self.version, self.drawn, tops)
                part |= once if (index, offset) == (0, start) else {}
                if header.get("return_text"):  # lags a character behind, as one that may begin a stop string does
                    behind = upto - (upto < end)
                    first = max(offset - 1, 0) if offset > start else known["text_chars"] if known else 0
                    part["text"] = letters(seed, first, behind)
                more = {"finish_reason": "length"} if upto == end else {}
                worker.reply(peer, header, {"op": "chunk", "index": index, "offset": offset, **part, **more})
            whole = {**columns(seed, 0, end, self.version, self.drawn, tops), "index": index, "finish_reason": "length"}
            done.append({**whole, "text": letters(seed, 0, end)} if header.get("return_text") else whole)
        if self.fail is not None:
            self.fail(worker, peer, header)
            return
        timing = {"queued_s": 0.0, "prefill_s": 0.25, "decode_s": 1.0, "total_s": 1.25}
        counts = {"prompt_tokens": 2, "cached_tokens": 1, "preemptions": 1, "worker": f"w{self.version}"}
        reply = {
            "op": "result",
            "completions": done,
            "timing": timing,
            **counts,
            "metadata": header.get("metadata"),
            **once,
        }
        worker.reply(peer, header, reply)

    def _check_known(self, known: dict[str, Any], tops: int) -> None:
        count = len(known["token_ids"])
        expected = columns(known["seed"], 0, count, 0, self.drawn, tops)
        for name in ("top_ids", "top_logprobs") if tops and count else ():
            np.testing.assert_array_equal(known[name], expected[name])
        for name in ("token_ids", "logprobs", "raw_logprobs", *(["drawn_logprobs"] if self.drawn and count else [])):
            np.testing.assert_array_equal(known[name], expected[name])
        assert sum(run for _, run in known["versions"]) == count


def vanish(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    """Fail as a killed process does."""
    worker.vanish()


def refuse(code: str, **more: Any) -> Callable[[ScriptedWorker, bytes, dict[str, Any]], None]:
    """Fail with an `error` reply."""
    return lambda worker, peer, header: worker.reply(
        peer, header, {"op": "error", "code": code, "message": f"it is {code}", **more}
    )


def silent(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
    """Fail by saying nothing more."""


def check(completion: Any, seed: int, tokens: int, runs: list[tuple[int, int]], *, drawn: bool = False) -> None:
    """Every token once, with its log-probs, and the spans of the workers that sampled them."""
    expected = columns(seed, 0, tokens, 0)
    for name in ("token_ids", "logprobs", "raw_logprobs"):
        np.testing.assert_array_equal(getattr(completion, name), expected[name])
    if drawn:
        np.testing.assert_array_equal(completion.drawn_logprobs, -np.arange(tokens, dtype=np.float32) / 2)
    else:
        assert completion.drawn_logprobs is None
    assert completion.versions == runs and completion.seed == seed
